"""Building programs and launching their kernels.

Programs are kept in the process by source and options, and their binaries on disk by source, options, device and driver. A
binary that is damaged, or that the driver refuses, falls back to the source.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tilewright._files import write_atomically
from tilewright.devices.opencl import runtime
from tilewright.errors import DeviceError, KernelError

Scalar = np.generic


def options(defines: Mapping[str, Any]) -> tuple[str, ...]:
    """Compiler options that define these macros; a flag is a name that starts with '-' and has the value None."""
    return tuple(k if v is None else f"-D{k}={int(v) if isinstance(v, bool) else v}" for k, v in sorted(defines.items()))


def built(device: Any, source: str, defines: Mapping[str, Any]) -> Any:
    """The program, built. Raises KernelError with the compiler's own words."""
    flags = options(defines)
    key = (source, flags)
    program = device.programs.get(key)
    if program is None:
        with device.lock:
            program = device.programs.get(key)
            if program is None:
                program = device.programs[key] = _build(device, source, flags)
    return program


def _build(device: Any, source: str, flags: tuple[str, ...]) -> Any:
    cl = runtime.load()
    runtime.check_process()
    path = _cache_file(device, source, flags)
    with warnings.catch_warnings():  # a compiler's remarks are no trouble of the user's
        warnings.simplefilter("ignore")
        if path is not None:
            program = _from_binary(cl, device, path)
            if program is not None:
                return program
        try:
            program = cl.Program(device.context, source).build(options=list(flags), cache_dir=False)
        except cl.MemoryError as error:
            raise runtime.translate(error, device, "building a kernel") from error
        except (cl.Error, RuntimeError) as error:
            raise KernelError(f"{device.name}: a kernel does not build with {' '.join(flags)}:\n{error}") from error
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            binary = program.get_info(cl.program_info.BINARIES)[0]
            write_atomically(str(path), hashlib.sha256(binary).digest() + binary, DeviceError)
        except (OSError, DeviceError, cl.Error):  # a full or read-only disk costs time, nothing else
            pass
    return program


def _from_binary(cl: Any, device: Any, path: Path) -> Any:
    try:
        data = path.read_bytes()
        digest, binary = data[:32], data[32:]
        if hashlib.sha256(binary).digest() != digest:
            return None
        program = cl.Program(device.context, [device.cl], [binary]).build(cache_dir=False)
        program.all_kernels()
        return program
    except (OSError, cl.Error, RuntimeError):
        return None


def _cache_file(device: Any, source: str, flags: tuple[str, ...]) -> Path | None:
    folder = os.environ.get("TILEWRIGHT_CACHE")
    if folder is None:
        import platformdirs

        folder = platformdirs.user_cache_dir("tilewright")
    text = "\0".join([*device.identity()[:3], *flags, source])
    return Path(folder) / "opencl" / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.bin"


def launcher(
    device: Any,
    source: str,
    entry: str,
    *,
    size: Sequence[int],
    group: Sequence[int] | None = None,
    define: Mapping[str, Any] | None = None,
    scalars: Sequence[Scalar] = (),
    buffers: int,
) -> Callable[..., None]:
    """run(*buffers) that enqueues kernel `entry` of `source` over `size` work-items in groups of `group`.

    The kernel's arguments are `buffers` global pointers (None gives a null pointer), then `scalars`, which are set once. A
    size that its group does not divide is rounded up, so the kernel must leave what lies beyond. Nothing runs for an empty size.
    """
    if prod(size) == 0:
        return lambda *args: None
    cl = runtime.load()
    kernel = cl.Kernel(built(device, source, define or {}), entry)
    for i, s in enumerate(scalars):
        kernel.set_arg(buffers + i, s)
    taken = kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, device.cl)
    if taken > device.local_memory and not device.is_gpu:  # GPUs' drivers refuse it themselves, some only beyond more than they name; PoCL aborts
        raise KernelError(f"{device.name}: {entry} needs {taken} bytes of local memory and the device has {device.local_memory}")
    if group is not None:
        limit = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, device.cl)
        if prod(group) > limit:
            raise KernelError(f"{device.name}: {entry} needs groups of {prod(group)} work-items and the device allows it {limit}")
        size = [-(-s // g) * g for s, g in zip(size, group, strict=True)]
        group = tuple(group)
    size = tuple(size)
    lock, enqueue, set_arg, failures = device.lock, cl.enqueue_nd_range_kernel, kernel.set_arg, (cl.Error,)

    def run(*args: Any) -> None:
        try:
            with lock:
                for i, b in enumerate(args):
                    set_arg(i, None if b is None else b.mem)
                event = enqueue(device.queue, kernel, size, group)
                if device.events is not None:
                    device.events.append(event)
        except failures as error:
            raise runtime.translate(error, device, entry) from error

    return run
