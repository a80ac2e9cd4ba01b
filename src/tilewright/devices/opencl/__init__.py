"""OpenCL devices through PyOpenCL: one context and one in-order queue a device, memory from PyOpenCL's pool.

All threads share a device's queue: what one thread writes another reads, and the pool hands memory on as soon as it is
dropped, so that a queue for each thread would need an event for every buffer. A lock holds arguments and launch together.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.devices.api import Device, Spec, Stamp, memory_order
from tilewright.devices.opencl import runtime
from tilewright.errors import DeviceError, OutOfMemory

SEVERAL = True  # there may be more than one, so each is named with its number


class ClBuffer:
    """A block of device memory `mem`. Goes back to the pool when dropped."""

    __slots__ = ("__weakref__", "keep", "mem", "nbytes", "offset", "stamped")

    def __init__(self, mem: Any, nbytes: int, keep: ClBuffer | None = None, offset: int = 0) -> None:
        self.mem = mem
        self.nbytes = nbytes
        self.keep = keep  # for a view: the buffer it lies in
        self.offset = offset
        self.stamped: Stamp | None = None

    def view(self, offset: int, nbytes: int) -> ClBuffer:
        """Part of this memory, sharing it and its stamp. `offset` must be a multiple of `OpenCLDevice.alignment`."""
        root = self if self.keep is None else self.keep
        offset += self.offset
        cl = runtime.load()
        whole = cl.Buffer.from_int_ptr(root.mem.int_ptr, retain=True)
        part = ClBuffer(whole.get_sub_region(offset, max(nbytes, 1)), nbytes, root, offset)
        part.stamped = root.stamp
        return part

    @property
    def stamp(self) -> Stamp:
        if self.keep is not None:
            return self.keep.stamp
        if self.stamped is None:
            self.stamped = Stamp()
        return self.stamped

    def touch(self) -> None:
        self.stamp.touch()


class OpenCLDevice(Device):
    kind = "opencl"

    def __init__(self, name: str, device: Any, platform: str) -> None:
        super().__init__(name)
        cl = runtime.load()
        import pyopencl.tools

        self.cl = device
        self.platform = platform
        self.context = cl.Context([device])
        self.queue: Any = cl.CommandQueue(self.context)
        self.lock = threading.RLock()
        self.events: list[Any] | None = None  # those of launches, while they are timed
        self.programs: dict[Any, Any] = {}
        self.pool = pyopencl.tools.MemoryPool(pyopencl.tools.ImmediateAllocator(self.queue))
        self.alignment = max(int(device.mem_base_addr_align) // 8, 64)
        self.max_alloc = int(device.max_mem_alloc_size)
        self.local_memory = int(device.local_mem_size)
        self.max_group = int(device.max_work_group_size)
        self.units = int(device.max_compute_units)
        self.is_gpu = bool(device.type & cl.device_type.GPU)
        self.has_fp64 = "cl_khr_fp64" in device.extensions or bool(getattr(device, "double_fp_config", 0))
        self.has_fp16 = "cl_khr_fp16" in device.extensions
        self._identity = (f"{device.name.strip()} ({platform})", f"{device.version.strip()} {device.driver_version.strip()}", "", 1)
        _opened.append(self)

    def allocate(self, nbytes: int) -> ClBuffer:
        if nbytes > self.max_alloc:
            raise OutOfMemory(
                f"{self.name}: one buffer of {nbytes} bytes ({nbytes / 2**30:.2f} GiB) was asked for and the device allows "
                f"{self.max_alloc} ({self.max_alloc / 2**30:.2f} GiB); use a smaller batch or input"
            )
        try:
            return ClBuffer(self.pool.allocate(nbytes or 1), nbytes)
        except runtime.load().Error as error:  # the pool has freed what it held and tried again by itself
            held, free = self.pool.active_bytes, int(self.cl.global_mem_size) - self.pool.active_bytes
            if isinstance(error, runtime.load().MemoryError):
                raise OutOfMemory(
                    f"{self.name}: {nbytes} bytes ({nbytes / 2**30:.2f} GiB) could not be allocated while {held} are in use; at most about "
                    f"{max(free, 0)} would fit; use a smaller batch or input"
                ) from error
            raise runtime.translate(error, self, "allocating memory") from error

    def upload(self, array: np.ndarray, to: Spec) -> ClBuffer:
        buffer = self.allocate(to.nbytes)
        self.write(buffer, array, to)
        return buffer

    def write(self, buffer: ClBuffer, array: np.ndarray, of: Spec) -> None:
        if not of.nbytes:
            return
        with np.errstate(all="ignore"):
            block = np.ascontiguousarray(array.transpose(memory_order(of.ndim, of.layout)), of.dtype.np)
        self._copy(buffer.mem, block.reshape(-1).view(np.uint8))

    def download(self, buffer: ClBuffer, of: Spec) -> np.ndarray:
        order = memory_order(of.ndim, of.layout)
        block = np.empty([of.shape[a] for a in order], of.dtype.np)
        if of.nbytes:
            self._copy(block.reshape(-1).view(np.uint8), buffer.mem)
        return np.ascontiguousarray(block.transpose(np.argsort(order))) if of.ndim else block

    def _copy(self, to: Any, source: Any) -> None:
        cl = runtime.load()
        try:
            cl.enqueue_copy(self.queue, to, source, is_blocking=True)
        except cl.Error as error:
            raise runtime.translate(error, self, "copying memory") from error

    def synchronize(self) -> None:
        try:
            self.queue.finish()
        except runtime.load().Error as error:
            raise runtime.translate(error, self, "waiting for the device") from error

    def seconds(self, run: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
        """What the device itself spent on the launches in `run`, by its own timestamps."""
        cl = runtime.load()
        with self.lock:
            usual = self.queue
            usual.finish()
            if self._profiling is None:
                self._profiling = cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
            self.queue, self.events = self._profiling, []
            try:
                run()
                self.queue.finish()
                return sum(e.profile.end - e.profile.start for e in self.events) * 1e-9
            finally:
                self.queue, self.events = usual, None

    _profiling: Any = None

    def identity(self) -> tuple[str, str, str, int]:
        return self._identity

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "model": self.cl.name.strip(),
            "platform": self.platform,
            "driver": self.cl.driver_version.strip(),
            "units": self.units,
            "memory_GiB": round(int(self.cl.global_mem_size) / 2**30, 1),
            "fp64": self.has_fp64,
            "missing": [],
        }


_opened: list[OpenCLDevice] = []


def _in_child() -> None:
    for device in _opened:
        device.queue = device.pool = runtime.Forked()  # type: ignore[assignment]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def names() -> Sequence[str]:
    """The names of the devices that work; [] where there are none."""
    try:
        return [f"opencl:{i}" for i in range(len(runtime.usable()))]
    except DeviceError:
        return []


def open_device(name: str, index: int) -> OpenCLDevice:
    runtime.check_process()
    there = runtime.usable()
    if index >= len(there):
        broken = [f"{f.name} ({f.platform}): {f.fault}" for f in runtime.found() if f.fault]
        have = ", ".join(f"opencl:{i} {f.name}" for i, f in enumerate(there)) or "none that works"
        raise DeviceError(f"device {name!r} does not exist: OpenCL devices here are {have}{'; ' if broken else ''}{'; '.join(broken)}")
    return OpenCLDevice(name, there[index].cl, there[index].platform)
