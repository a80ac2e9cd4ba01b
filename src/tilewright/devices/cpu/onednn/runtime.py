"""Running oneDNN primitives: threads, streams, scratch memory, fork, denormals, the fast path of execution.

Every Python thread has its own stream and scratch buffer, made at its first use of oneDNN. Execution is
synchronous: when :meth:`Exec.run` returns, the outputs are written.

*Threads.* The number of OpenMP threads is a setting of each calling thread; :func:`set_num_threads` changes
it for all, lazily. A primitive is planned for a number of threads, so an :class:`Exec` always runs with the
number that its descriptor was created under, and :class:`PrimitiveCache` keeps entries apart by it.

*Fork.* GNU OpenMP keeps its idle workers in a pool that belongs to the calling thread. A forked child
inherits the pool without the workers and waits for them for ever. Before a fork the forking thread
therefore lets go of its pool (OpenMP 5.0's ``omp_pause_resource_all``; both sides make a new one when they
need it), and where the OpenMP library is too old for that, the child stays at one thread.

*Denormals.* Results below the smallest normal number slow a core down a hundredfold, so the control
register of each thread that runs oneDNN (x86 MXCSR) is set to flush them to zero (FTZ) and to read them as
zero (DAZ).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from ctypes import byref, c_int, c_uint32, c_void_p
from typing import Any

import numpy as np

from . import capi
from .capi import ExecArg, Lib, MemoryDesc, OneDNNError, Primitive, PrimitiveDesc

# --------------------------------------------------------------------------------------- thread counts

_generation = 0  # raised by every change of a process-wide setting; threads compare it with their own
_asked_threads: int | None = None
_fork_crippled = False  # in a child whose OpenMP pool could not be saved


def _openmp(lib: Lib, name: str, *argtypes: Any, restype: Any = None) -> Any:
    """A function of the OpenMP library that ``lib`` itself is linked with, or None."""
    if lib.runtime != "openmp":
        return None
    try:
        function = lib.held_dll[name]  # the look-up goes on to the libraries that it depends on
    except AttributeError:
        return None
    function.argtypes = list(argtypes)
    function.restype = restype
    return function


def usable_cores() -> int:
    """Cores that this process may use (its affinity), or ``OMP_NUM_THREADS`` where that is set."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_num_threads() -> int:
    """Threads that newly created primitives are planned for."""
    return getattr(_local, "planned", None) or all_threads()


@contextlib.contextmanager
def planned_for(threads: int) -> Iterator[None]:
    """Primitives that this Python thread makes inside the block are planned for, and will run on, so many threads."""
    before = getattr(_local, "planned", None)
    _local.planned = min(threads, all_threads())
    try:
        yield
    finally:
        _local.planned = before


def all_threads() -> int:
    """The number of threads set for the process."""
    lib = capi.load()
    if _fork_crippled or lib.runtime in ("sequential", "threadpool"):
        return 1
    if lib.runtime == "openmp" and _asked_threads is not None:
        return _asked_threads
    return usable_cores()


def set_num_threads(count: int) -> None:
    """Set the number of threads of primitives created from now on, in every Python thread.

    Raises:
        ValueError: if ``count`` is less than 1.
        OneDNNError: where the build does not run on OpenMP and ``count`` is not what it uses.
    """
    global _asked_threads, _generation
    if count < 1:
        raise ValueError(f"set_num_threads({count}): a thread count is at least 1")
    lib = capi.load()
    if lib.runtime != "openmp" and count != get_num_threads():
        raise OneDNNError(
            f"set_num_threads({count}): {lib!r} does not run on OpenMP, so its thread count cannot be set; "
            "use an OpenMP build (`pip install onednn-cpu-gomp`)"
        )
    _asked_threads = count
    _generation += 1


# ------------------------------------------------------------------------------------------- denormals

_FTZ_DAZ = 0x8040
# void f(uint32_t masks[3]): MXCSR = (MXCSR & masks[0]) | masks[1]; masks[2] = the result (System V ABI)
_SET_MXCSR = bytes.fromhex(
    "f30f1efa"  # endbr64
    "4883ec08"  # sub rsp, 8
    "0fae1c24"  # stmxcsr [rsp]
    "8b0424"  # mov eax, [rsp]
    "2307"  # and eax, [rdi]
    "0b4704"  # or eax, [rdi + 4]
    "890424"  # mov [rsp], eax
    "0fae1424"  # ldmxcsr [rsp]
    "894708"  # mov [rdi + 8], eax
    "4883c408"  # add rsp, 8
    "c3"  # ret
)


class _Mxcsr:
    """The control register of SSE arithmetic, reached by 35 bytes of machine code: no compiler is needed."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.address = 0
        if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "win32":
            self.reason = f"denormals are not flushed: not written for {platform.machine()} on {sys.platform}"
            return
        try:
            # Write first, then make it executable: many systems refuse memory that is both at once.
            self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._page.write(_SET_MXCSR)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
            mprotect = ctypes.CDLL(None, use_errno=True).mprotect
            mprotect.argtypes = [c_void_p, ctypes.c_size_t, c_int]
            if mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except (OSError, AttributeError, ValueError) as error:
            self.reason = f"denormals are not flushed: the system refuses executable memory ({error})"
            return
        self._call = ctypes.PYFUNCTYPE(None, c_void_p)(address)
        self.address = address

    def change(self, keep: int, add: int) -> int:
        """Set this thread's register to ``(old & keep) | add`` and return the new value."""
        masks = (c_uint32 * 3)(keep, add, 0)
        self._call(ctypes.addressof(masks))
        return masks[2]


_flush = True
_mxcsr_made: _Mxcsr | None = None


def _mxcsr() -> _Mxcsr:
    global _mxcsr_made
    if _mxcsr_made is None:
        # NumPy derives a type's limits once, by arithmetic, and warns if the smallest subnormal comes out
        # as zero.
        for dtype in (np.float16, np.float32, np.float64, np.longdouble):
            limits = np.finfo(dtype)
            _ = limits.smallest_subnormal, limits.tiny, repr(limits)
        _mxcsr_made = _Mxcsr()
    return _mxcsr_made


def _apply_flush(lib: Lib, threads: int) -> None:
    """Set FTZ and DAZ as asked in this thread and in the OpenMP workers that serve it."""
    register = _mxcsr()
    if register.reason is not None:
        return
    keep, add = (0xFFFFFFFF, _FTZ_DAZ) if _flush else (0xFFFFFFFF ^ _FTZ_DAZ, 0)
    register.change(keep, add)
    # Workers made from here on copy this thread's register; those that wait in its pool are told by a
    # parallel region.
    parallel = _openmp(lib, "GOMP_parallel", c_void_p, c_void_p, ctypes.c_uint, ctypes.c_uint)
    if parallel is not None and threads > 1:
        masks = (c_uint32 * 3)(keep, add, 0)
        parallel(register.address, ctypes.addressof(masks), threads, 0)


def flush_denormals(on: bool) -> None:
    """Flush denormals to zero (the default) or not, in every thread that uses oneDNN.

    It takes effect in the calling thread and its workers at once, in other threads at their next execution.
    The calling thread's NumPy and Python arithmetic follow the same setting.
    """
    global _flush, _generation
    _flush = bool(on)
    _generation += 1
    enter()


@contextlib.contextmanager
def denormals_kept() -> Iterator[None]:
    """This thread computes with denormals inside the block, whatever the setting."""
    register = _mxcsr()
    enter()
    if register.reason is not None:
        yield
        return
    before = register.change(0xFFFFFFFF, 0) & _FTZ_DAZ
    register.change(0xFFFFFFFF ^ _FTZ_DAZ, 0)
    try:
        yield
    finally:
        register.change(0xFFFFFFFF, before)


def denormals_flushed() -> bool:
    """Whether the calling thread flushes denormals now."""
    register = _mxcsr()
    return register.reason is None and register.change(0xFFFFFFFF, 0) & _FTZ_DAZ == _FTZ_DAZ


def flush_reason() -> str | None:
    """Why denormals cannot be flushed on this machine; None where they can."""
    return _mxcsr().reason


# ---------------------------------------------------------------------------------------- thread state


class _ThreadState:
    """What one Python thread needs to execute: stream, scratch buffer, settings as last applied."""

    __slots__ = (
        "_lib",
        "generation",
        "scratch",
        "scratch_ptr",
        "scratch_size",
        "set_omp",
        "stream",
        "threads",
    )

    def __init__(self, lib: Lib) -> None:
        self._lib = lib
        out = c_void_p()
        capi.check(lib.held.stream_create(byref(out), lib.engine, 1), "stream_create")
        self.stream = out
        self.scratch: np.ndarray | None = None
        self.scratch_ptr = 0
        self.scratch_size = 0
        self.threads = 0
        self.generation = -1
        self.set_omp = _openmp(lib, "omp_set_num_threads", c_int)

    def __del__(self) -> None:
        if getattr(self, "stream", None):
            self._lib.held.stream_destroy(self.stream)

    def refresh(self) -> None:
        """Apply the process-wide settings to this thread."""
        self.generation = _generation
        self.use_threads(all_threads())
        _apply_flush(self._lib, self.threads)

    def use_threads(self, count: int) -> None:
        """Run what follows in this thread on ``count`` OpenMP threads."""
        if _fork_crippled and count > 1:
            raise OneDNNError(
                f"a primitive planned for {count} threads before a fork cannot run in the child: this "
                "OpenMP library (older than 5.0) cannot rebuild its threads; create it anew in the child"
            )
        if count != self.threads:
            self.threads = count
            if self.set_omp is not None:
                self.set_omp(count)

    def grow(self, size: int) -> None:
        """Make the scratch buffer at least ``size`` bytes, page-aligned; it never shrinks."""
        self.scratch = None  # first: the old one need not live beside the new one
        self.scratch = np.empty(size + 4096, np.uint8)
        address = self.scratch.ctypes.data
        self.scratch_ptr = address + -address % 4096
        self.scratch_size = size


_local = threading.local()


def enter() -> _ThreadState:
    """This thread's state, made at its first use and brought up to date."""
    try:
        state = _local.state
    except AttributeError:
        state = _local.state = _ThreadState(capi.load())
    if state.generation != _generation:
        state.refresh()
    return state


def _enter_to_create() -> None:
    enter().use_threads(get_num_threads())


capi.enter_thread = _enter_to_create
capi.count_threads = get_num_threads


def release_scratch() -> None:
    """Give back the calling thread's scratch buffer."""
    state = enter()
    state.scratch, state.scratch_ptr, state.scratch_size = None, 0, 0


# ------------------------------------------------------------------------------------------------ fork

_cache_lock = threading.RLock()
_pool_released = False


def _before_fork() -> None:
    global _pool_released
    # No other thread may be inside oneDNN's global locks while the process is copied.
    capi._load_lock.acquire()
    capi.create_lock.acquire()
    _cache_lock.acquire()
    lib = capi._lib
    if lib is not None:
        pause = _openmp(lib, "omp_pause_resource_all", c_int, restype=c_int)
        _pool_released = pause is not None and pause(1) == 0


def _after_fork_in_parent() -> None:
    _cache_lock.release()
    capi.create_lock.release()
    capi._load_lock.release()


def _after_fork_in_child() -> None:
    global _fork_crippled, _generation, _asked_threads
    _after_fork_in_parent()
    lib = capi._lib
    if lib is None:
        return
    if lib.runtime == "openmp" and not _pool_released:
        _fork_crippled, _asked_threads = True, 1
    _generation += 1
    if hasattr(_local, "state"):
        del _local.state


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


# ------------------------------------------------------------------------------------------- execution


class _Arguments:
    """One set of memory objects for an execution: used by one thread at a time."""

    __slots__ = ("_array", "_free", "last", "memories", "pointer", "scratch")

    def __init__(self, lib: Lib, arguments: Sequence[tuple[int, MemoryDesc]], scratch: MemoryDesc | None) -> None:
        self._free = lib.held.memory_destroy
        self.memories: list[int] = []
        self._array = (ExecArg * (len(arguments) + (scratch is not None)))()
        self.pointer = c_void_p(ctypes.addressof(self._array))
        entries = [*arguments, (capi.ARG_SCRATCHPAD, scratch)] if scratch is not None else arguments
        for place, (arg, md) in enumerate(entries):
            out = c_void_p()
            assert md is not None
            capi.check(lib.held.memory_create(byref(out), md.ptr, lib.engine, None), f"memory_create({md!r})")
            self.memories.append(out.value or 0)
            self._array[place] = ExecArg(arg, out)
        self.last: tuple[int, ...] = (0,) * len(arguments)
        self.scratch = 0

    def __del__(self) -> None:
        for memory in getattr(self, "memories", ()):
            self._free(memory)


class Exec:
    """A primitive with its argument descriptors, ready to run on raw addresses from any thread.

    Made by :func:`bind`. ``impl`` is the implementation's name, ``scratch_bytes`` what it takes from the
    thread's scratch buffer, ``threads`` the number of threads it runs on.
    """

    __slots__ = (
        "_arguments",
        "_count",
        "_execute",
        "_free",
        "_lib",
        "_prim_ptr",
        "_scratch_md",
        "_set",
        "primitive",
        "run",
        "scratch_bytes",
        "threads",
    )

    run: Callable[..., None]

    def __init__(self, primitive: Primitive, arguments: Sequence[tuple[int, MemoryDesc]], release_gil: bool = True) -> None:
        lib = capi.load()
        self.primitive = primitive
        self.threads = primitive.pd.threads
        self._lib = lib
        self._arguments = tuple(arguments)
        self._scratch_md = primitive.pd.scratchpad_md
        self.scratch_bytes = self._scratch_md.nbytes if self._scratch_md is not None else 0
        self._count = len(self._arguments) + (self._scratch_md is not None)
        # Without declared types a call is a third cheaper; all its arguments are c_void_p but one int.
        self._execute = (lib.cdll if release_gil else lib.held_dll)["dnnl_primitive_execute"]
        self._set = lib.held.memory_set_data_handle
        self._prim_ptr = primitive.ptr
        self._free: list[_Arguments] = [self._make()]
        self.run = self._compile()

    def _make(self) -> _Arguments:
        return _Arguments(self._lib, self._arguments, self._scratch_md)

    @property
    def impl(self) -> str:
        return self.primitive.pd.impl

    def _compile(self) -> Callable[..., None]:
        # All that the fast path touches is a local of this closure: attribute look-ups are most of its cost.
        free, local, count = self._free, _local, self._count
        lib, described, scratch_md = self._lib, self._arguments, self._scratch_md

        def make() -> _Arguments:  # not the method: a cycle through this object would keep its code until a collection
            return _Arguments(lib, described, scratch_md)

        take, give = free.pop, free.append
        execute, set_handle, primitive = self._execute, self._set, c_void_p(self._prim_ptr)
        threads, scratch_bytes, expected = self.threads, self.scratch_bytes, len(self._arguments)
        # Also keeps the primitive alive as long as the closure.
        owner = self.primitive

        def run(*addresses: int) -> None:
            """Execute on the given addresses, one per bound argument and in their order."""
            try:
                state = local.state
            except AttributeError:
                state = enter()
            if state.generation != _generation:
                state.refresh()
            if state.threads != threads:
                state.use_threads(threads)
            try:
                arguments = take()
            except IndexError:
                arguments = make()
            if addresses != arguments.last:
                if len(addresses) != expected:
                    give(arguments)
                    raise OneDNNError(f"oneDNN run: {len(addresses)} addresses for {expected} arguments")
                for _ in map(set_handle, arguments.memories, addresses):  # faster than comparing each one
                    pass
                arguments.last = addresses
            if scratch_bytes:
                if state.scratch_size < scratch_bytes:
                    state.grow(scratch_bytes)
                if arguments.scratch != state.scratch_ptr:
                    set_handle(arguments.memories[-1], state.scratch_ptr)
                    arguments.scratch = state.scratch_ptr
            status = execute(primitive, state.stream, count, arguments.pointer)
            give(arguments)
            if status:
                shown = ", ".join(f"{arg}={md!r}" for arg, md in described)
                capi.check(status, f"execute {owner.pd.name} ({owner.pd.impl}; {shown})")

        return run

    def fixed(self, *addresses: int) -> Callable[[], None]:
        """A call without arguments that runs on these addresses: a plan's replay.

        Addresses that never change are bound once, so such a call costs only the execution.
        """
        twin = Exec.__new__(Exec)
        for name in Exec.__slots__:
            if name not in ("run", "_free"):
                setattr(twin, name, getattr(self, name))
        twin._free = [self._make()]
        run = twin._compile()
        return lambda: run(*addresses)

    def __repr__(self) -> str:
        return f"Exec({self.primitive.pd.name}, {self.impl}, {self.threads} threads)"


def bind(
    primitive: Primitive | PrimitiveDesc,
    arguments: Sequence[tuple[int, MemoryDesc]],
    *,
    release_gil: bool = True,
) -> Exec:
    """Prepare a primitive for execution on addresses.

    Args:
        primitive: the primitive, or the descriptor to make it from. arguments: (argument index, layout) in
        the order in which addresses will be given; the scratchpad is added
            by itself.
        release_gil: let other Python threads run meanwhile. Without it, a call of a few microseconds cannot
        lose
            the interpreter lock to a busy thread for a whole switch interval.

    The caller keeps the buffers alive, 64-byte aligned where speed matters, and as large as ``md.nbytes``.
    """
    if isinstance(primitive, PrimitiveDesc):
        primitive = Primitive(primitive)
    return Exec(primitive, arguments, release_gil)


class PrimitiveCache:
    """A bounded map from hashable keys to prepared objects; the least recently used entry leaves first.

    Entries belong to the thread count under which they were put: after :func:`set_num_threads` they are not
    found. Safe across threads; two threads that miss the same key may both make it, and the first one is
    kept.
    """

    def __init__(self, capacity: int = 512) -> None:
        if capacity < 1:
            raise ValueError(f"PrimitiveCache(capacity={capacity}): a capacity is at least 1")
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of ``key``, made by ``make()`` where it is missing; its exceptions pass through."""
        key = (_asked_threads, key)
        entries = self._entries
        found = entries.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread may have evicted it meanwhile
                entries.move_to_end(key)
            return found
        made = make()
        with _cache_lock:
            kept = entries.setdefault(key, made)
            while len(entries) > self.capacity:
                entries.popitem(last=False)
        return kept

    def clear(self) -> None:
        with _cache_lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
