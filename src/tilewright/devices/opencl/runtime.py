"""Which OpenCL devices there are and which of them work, what an error of theirs means, and fork.

A device is probed before it is listed: some name themselves and cannot build a kernel (an old compiler that does not know
the processor). Nothing here is imported by `import tilewright`, and PyOpenCL only once a device is asked for.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.errors import DeviceError, KernelError, OutOfMemory

MISSING = "PyOpenCL is not installed: pip install 'tilewright[opencl]', and a driver (of the GPU's vendor, or PoCL for the CPU)"
FORKED = "an OpenCL device cannot be used in a forked child process; start it with multiprocessing's 'spawn' method"

_PROBE = """
__kernel void probe(__global float *x, const float a) { const size_t i = get_global_id(0); x[i] = a * x[i] + (float)i; }
"""


@dataclass(frozen=True)
class Found:
    """A device of some platform: PyOpenCL's object, and why it cannot be used (empty where it can)."""

    platform: str
    name: str
    cl: Any
    fault: str = ""


_lock = threading.Lock()
_found: list[Found] | None = None
_pid = os.getpid()


def load() -> Any:
    """PyOpenCL. Raises DeviceError, which says how to get it."""
    try:
        import pyopencl
    except Exception as error:  # a broken loader library raises what it likes
        raise DeviceError(MISSING if isinstance(error, ImportError) else f"PyOpenCL cannot be loaded: {error}") from error
    return pyopencl


def found() -> list[Found]:
    """Every device that a platform lists, GPUs first, each probed once. Raises DeviceError without PyOpenCL or platforms."""
    global _found
    with _lock:
        if _found is None:
            _found = _discover()
        return _found


def usable() -> list[Found]:
    """Those that work: `opencl:0` is the first."""
    return [f for f in found() if not f.fault]


def _discover() -> list[Found]:
    cl = load()
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise DeviceError(
            f"no OpenCL driver is installed ({error}); install the GPU vendor's, or PoCL for the CPU (Debian: pocl-opencl-icd)"
        ) from None
    out = []
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error:
            continue  # a platform without devices
        for device in devices:
            out.append(Found(platform.name.strip(), device.name.strip(), device, _fault(cl, device)))
    kinds = (cl.device_type.GPU, cl.device_type.ACCELERATOR)
    return sorted(out, key=lambda f: next((i for i, k in enumerate(kinds) if f.cl.type & k), len(kinds)))


def _fault(cl: Any, device: Any) -> str:
    """Why the device cannot be used: it does not build the simplest kernel, or computes it wrong."""
    try:
        if not device.available or not device.compiler_available:
            return "its driver has no compiler for it"
        context = cl.Context([device])
        queue = cl.CommandQueue(context)
        x = np.linspace(0, 1, 64, dtype=np.float32)
        memory = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=x)
        cl.Program(context, _PROBE).build(cache_dir=False).probe(queue, (64,), None, memory, np.float32(2))
        out = np.empty_like(x)
        cl.enqueue_copy(queue, out, memory)
        return "" if np.allclose(out, 2 * x + np.arange(64), 1e-6) else "it computes a simple kernel wrong"
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "error" in line.lower() or "unknown" in line.lower()), lines[0] if lines else type(error).__name__)
        return f"it cannot build a simple kernel: {why}"


def translate(error: Exception, device: Any, doing: str) -> Exception:
    """PyOpenCL's error as one of ours, with what it means."""
    cl = load()
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, cl.MemoryError) or any(code in text for code in ("MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY")):
        return OutOfMemory(f"{device.name}: out of memory in {doing} ({text}); use a smaller batch or input")
    if any(code in text for code in ("INVALID_COMMAND_QUEUE", "INVALID_CONTEXT", "DEVICE_NOT_AVAILABLE", "-9999")):
        return DeviceError(
            f"{device.name}: the driver gave up on this process in {doing} ({text}); what lay on the device is lost, start a new process. "
            "A kernel that wrote outside its memory does this: please report what was run"
        )
    return KernelError(f"{device.name}: {doing} failed: {text}")


class Forked:
    """Stands for the queue of a child process, which the driver does not support."""

    def __getattr__(self, name: str) -> Any:
        raise DeviceError(FORKED)


def check_process() -> None:
    if os.getpid() != _pid:
        raise DeviceError(FORKED)
