"""Cache-sized pieces, on all cores: what makes a chain of NumPy calls on big arrays run at memory speed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

# Elements a piece. Between pieces threads wait for the interpreter's lock: with 2^15 two were slower than one, with 2^18
# nearly twice as fast, and a piece still fits a core's share of the caches.
BLOCK = 1 << 18
PARALLEL = 1 << 18  # elements below which threads cost more than they bring

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = ThreadPoolExecutor(cores(), "tilewright-numpy")
    return _pool


def cores() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit():
        return max(1, int(asked))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget() -> None:
    global _pool
    _pool = None  # its threads did not come along


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def flat(a: np.ndarray) -> np.ndarray | None:
    """A 1-D view of a dense array in memory order, or None."""
    if a.flags.c_contiguous:
        return a.reshape(-1)
    if a.ndim in (3, 4, 5):
        moved = np.moveaxis(a, 1, -1)
        if moved.flags.c_contiguous:
            return moved.reshape(-1)
    return None


def split(n: int, run: Callable[[int, int], None]) -> None:
    """run(start, stop) over pieces of range(n), in order within a core, on all cores when n is large."""
    threads = cores()

    def part(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):
            for i in range(start, stop, BLOCK):
                run(i, min(i + BLOCK, stop))

    if n < PARALLEL or threads == 1:
        part(0, n)
    else:
        share(n, part)


def share(n: int, run: Callable[[int, int], None]) -> None:
    """run(start, stop) at once over one part of range(n) for each core."""
    threads = max(1, min(cores(), n))
    bounds = [n * k // threads for k in range(threads + 1)]
    jobs = [_workers().submit(run, a, b) for a, b in pairwise(bounds[1:])]
    run(bounds[0], bounds[1])
    for job in jobs:
        job.result()


def elementwise(fn: Callable[..., None], out: np.ndarray, *arrays: Any) -> None:
    """fn(out, *arrays) in pieces where all operands are dense alike; scalars (0-d) go along whole."""
    if out.size <= BLOCK:
        fn(out, *arrays)
        return
    dense = [out, *[a for a in arrays if a.ndim]]
    if any(a.shape != out.shape or a.strides != tuple(s // out.itemsize * a.itemsize for s in out.strides) for a in dense):
        fn(out, *arrays)
        return
    views = [flat(a) if a.ndim else a for a in (out, *arrays)]
    if any(v is None for v in views):
        fn(out, *arrays)
        return
    split(out.size, lambda i, j: fn(*[v[i:j] if v.ndim else v for v in views]))  # type: ignore[index]
