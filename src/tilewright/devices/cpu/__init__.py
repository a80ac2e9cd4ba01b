"""The CPU: oneDNN where it is installed and right, NumPy for everything else. Buffers come from a pool."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
from typing import Any

import numpy as np

from tilewright.devices.api import Device, Spec, Stamp
from tilewright.errors import DeviceError, OutOfMemory

ALIGN = 64  # bytes: a cache line, and the widest vector
LARGE = 1 << 20  # bytes from which a block is mapped by itself
HUGE = 1 << 28  # bytes from which the system is asked what it has left


class CpuBuffer:
    """A block of host memory: address `ptr`, `raw` bytes as a NumPy array. Goes back to its pool when dropped."""

    __slots__ = ("__weakref__", "keep", "nbytes", "pool", "ptr", "raw", "stamped")

    def __init__(self, ptr: int, nbytes: int, raw: Any, pool: Pool | None = None, keep: Any = None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.raw = raw
        self.pool = pool
        self.keep = keep  # for a view: the buffer it lies in; for foreign memory: its owner
        self.stamped: Stamp | None = None

    def __del__(self) -> None:
        try:
            pool = self.pool
        except AttributeError:  # Ctrl-C came while it was made
            return
        if pool is not None:
            pool.give(self.raw, self.ptr)

    def array(self, spec: Spec) -> np.ndarray:
        """A writable view of the memory as `spec` lays it out. It must not outlive the buffer: see `export`."""
        return np.ndarray(spec.shape, spec.dtype.np, self.raw, 0, spec.strides)

    def export(self, spec: Spec, writable: bool) -> np.ndarray:
        """As `array`, but the result keeps the buffer alive."""
        if not spec.nbytes:
            return np.empty(spec.shape, spec.dtype.np)
        out = np.ndarray(spec.shape, spec.dtype.np, np.asarray(_Exported(self)), 0, spec.strides)
        if not writable:
            out.flags.writeable = False
        return out

    def view(self, offset: int, nbytes: int) -> CpuBuffer:
        """Part of this memory, sharing it and its stamp."""
        part = CpuBuffer(self.ptr + offset, nbytes, self.raw[offset : offset + nbytes], keep=self)
        part.stamped = self.stamp
        return part

    @property
    def stamp(self) -> Stamp:
        if isinstance(self.keep, CpuBuffer):
            return self.keep.stamp
        if self.stamped is None:
            self.stamped = Stamp()
        if self.keep is not None:
            self.stamped.version += 1  # its owner writes unseen, so nothing derived from it is kept
        return self.stamped

    def touch(self) -> None:
        """Say that the contents were changed in place."""
        self.stamp.touch()


class _Exported:
    """Lends a buffer's memory to NumPy; the array's base keeps this, and this keeps the buffer."""

    def __init__(self, buffer: CpuBuffer) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.ptr, not buffer.raw.flags.writeable),
            "version": 3,
        }


def available_memory() -> int:
    """Bytes that can be had without swapping, where the system says; else no limit."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 2**63


def _new_block(size: int) -> np.ndarray:
    """Fresh memory with room to align. Large blocks are mapped by themselves: dropped, they go back to the system at
    once, where the C library would keep them; huge pages make their first touch cheaper."""
    if size < LARGE:
        return np.empty(size + ALIGN, np.uint8)
    if size > HUGE and size > available_memory():
        raise MemoryError  # Linux would promise it, and kill the process at the first touch
    block = mmap.mmap(-1, size + ALIGN)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


class Pool:
    """Recycles blocks by size class, so that a steady loop asks the system for nothing (and takes no page faults).

    Sizes round up by at most an eighth. Memory in use and idle together stay within twice the most that was ever in use
    at once (at least 64 MiB); beyond that the size classes idle longest are dropped. Less room would drop, in a net
    whose layers differ in size, blocks that the next pass needs again: a page fault for every 4 KiB.
    """

    FLOOR = 64 << 20

    def __init__(self) -> None:
        self.free: dict[int, list[tuple[Any, int]]] = {}
        self.live = 0  # bytes handed out
        self.idle = 0  # bytes waiting in `free`
        self.peak = 0
        self._lock = threading.RLock()  # re-entrant: a collection inside `take` may drop a buffer, which calls `give`

    @staticmethod
    def size_class(nbytes: int) -> int:
        if nbytes <= 512:
            return (nbytes + 63) & ~63 or 64
        step = 1 << (nbytes.bit_length() - 4)
        return (nbytes + step - 1) & -step

    def take(self, nbytes: int) -> CpuBuffer:
        size = self.size_class(nbytes)
        with self._lock:
            self.live += size
            if self.live > self.peak:
                self.peak = self.live
            blocks = self.free.get(size)
            if blocks:
                raw, ptr = blocks.pop()
                self.idle -= size
                return CpuBuffer(ptr, nbytes, raw, self)
            limit = max(2 * self.peak, self.FLOOR)
            if self.idle and self.live + self.idle > limit:
                self._trim(limit - self.live)
        try:
            block = _new_block(size)
        except (MemoryError, OSError):
            self.trim()
            try:
                block = _new_block(size)
            except (MemoryError, OSError):
                self.live -= size
                raise OutOfMemory(
                    f"cpu: {nbytes} bytes ({nbytes / 2**30:.2f} GiB) could not be allocated while {self.live} are in use; "
                    "use a smaller batch or input"
                ) from None
        start = -block.ctypes.data % ALIGN
        raw = block[start : start + size]
        return CpuBuffer(raw.ctypes.data, nbytes, raw, self)

    def give(self, raw: Any, ptr: int) -> None:
        size = raw.nbytes
        with self._lock:
            self.live -= size
            self.idle += size
            blocks = self.free.pop(size, None)
            if blocks is None:
                blocks = []
            blocks.append((raw, ptr))
            self.free[size] = blocks  # moves to the end: classes idle longest come first

    def _trim(self, room: int) -> None:
        for size in list(self.free):
            blocks = self.free[size]
            while blocks and self.idle > room:
                blocks.pop()
                self.idle -= size
            if not blocks:
                del self.free[size]
            if self.idle <= room:
                return

    def trim(self) -> None:
        """Give all idle memory back to the system."""
        with self._lock:
            self._trim(0)


class CpuDevice(Device):
    kind = "cpu"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pool = Pool()
        self._identity: tuple[str, str, str, int] | None = None
        self.allocate = self.pool.take
        # What evicted primitives leave is scattered over the heap, and glibc gives pages back only when asked.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:
            self.plans.on_eviction = lambda: trim(0)

    def allocate(self, nbytes: int) -> CpuBuffer:
        return self.pool.take(nbytes)

    def upload(self, array: np.ndarray, to: Spec) -> CpuBuffer:
        buffer = self.pool.take(to.nbytes)
        self.write(buffer, array, to)
        return buffer

    def write(self, buffer: CpuBuffer, array: np.ndarray, of: Spec) -> None:
        with np.errstate(all="ignore"):  # what a type cannot hold becomes inf, or for integers what the machine makes of it
            np.copyto(buffer.array(of), array, casting="unsafe")

    def alias(self, array: np.ndarray) -> CpuBuffer:
        """A buffer that *is* the array's memory (dense, any order)."""
        start = array.__array_interface__["data"][0]
        raw = np.asarray(_Foreign(start, array))
        return CpuBuffer(start, array.nbytes, raw, keep=array)

    def download(self, buffer: CpuBuffer, of: Spec) -> np.ndarray:
        return np.array(buffer.array(of), order="C", copy=True)

    def set_threads(self, count: int) -> None:
        """Threads that kernels use from now on (oneDNN's; NumPy's BLAS follows its own setting)."""
        from tilewright.devices.cpu.onednn import capi, runtime

        if capi.available() is None:
            runtime.set_num_threads(count)
            self.plans.clear()  # a primitive is made for a number of threads
            self._identity = None

    def identity(self) -> tuple[str, str, str, int]:
        if self._identity is None:
            from tilewright.devices.cpu.numpy._blocks import cores
            from tilewright.devices.cpu.onednn import capi, runtime

            library, threads = f"NumPy {np.__version__}", cores()
            if capi.available() is None:
                library, threads = f"oneDNN {capi.load().version_string}, {library}", runtime.get_num_threads()
            limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
            self._identity = (_model() + (f" as {limit}" if limit else ""), "", library, threads)
        return self._identity

    def describe(self) -> dict[str, Any]:
        from tilewright.devices.cpu.onednn import capi

        missing = capi.available()
        return {
            "name": self.name,
            "kind": self.kind,
            "model": _model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "onednn": capi.load().version_string if missing is None else None,
            "missing": [] if missing is None else [missing],
        }


class _Foreign:
    def __init__(self, ptr: int, array: np.ndarray) -> None:
        self.__array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (ptr, not array.flags.writeable),
            "version": 3,
        }


def _model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def names() -> list[str]:
    return ["cpu"]


def open_device(name: str, index: int) -> CpuDevice:
    if index:
        raise DeviceError(f"device {name!r} does not exist: the processor's cores are one device; use 'cpu'")
    return CpuDevice(name)
