"""Optimizer updates in NumPy: in cache-sized pieces on all cores, so that each operand moves through memory once.

Every step writes into an output or into scratch that a thread keeps, because fresh temporaries of this size cost page
faults. Half types are updated in float32 and rounded once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.devices.cpu.numpy._blocks import BLOCK, split

_kept = threading.local()


def _scratch(kind: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of n elements, the thread's own."""
    held = _kept.__dict__.get(kind)
    if held is None:
        held = _kept.__dict__[kind] = (np.empty(BLOCK, kind), np.empty(BLOCK, kind))
    return held[0][:n], held[1][:n]


def _update(outs: list[Any], ins: list[Any], fn: Callable[..., None]) -> None:
    """fn(s, t, outs, ins) on each piece, s and t scratch."""
    half = ins[0].dtype.itemsize < 4
    kind = np.dtype(np.float32) if half else ins[0].dtype

    def run(i: int, j: int) -> None:
        here, there = [None if a is None else a[i:j] for a in ins], [o[i:j] for o in outs]
        s, t = _scratch(kind.name, j - i)
        if not half:
            fn(s, t, there, here)
            return
        wide = [np.empty(j - i, kind) for _ in outs]
        fn(s, t, wide, [None if a is None else a.astype(kind) for a in here])
        for o, w in zip(there, wide, strict=True):
            o[...] = w

    split(ins[0].size, run)


def _decayed(s: np.ndarray, g: np.ndarray, p: np.ndarray, decay: float) -> np.ndarray:
    """g + decay * p; s is overwritten when decay is not 0."""
    if not decay:
        return g
    np.multiply(p, decay, out=s)
    s += g
    return s


@numpy_kernel("sgd_update")
def _sgd(a: Any, outs: Any, p: Any, g: Any, v: Any, hyper: Any) -> None:
    lr, momentum, decay = (float(h) for h in hyper)

    def run(s: Any, t: Any, outs: Any, ins: Any) -> None:
        p, g, v = ins
        step = _decayed(s, g, p, decay)
        if a.momentum:
            new = outs[1]
            np.multiply(v, momentum, out=new)
            new += step
            if a.nesterov:
                np.multiply(new, momentum, out=t)
                t += step
                step = t
            else:
                step = new
        np.multiply(step, lr, out=t)
        np.subtract(p, t, out=outs[0])

    _update(outs if a.momentum else [outs], [p, g, v], run)


@numpy_kernel("adam_update")
def _adam(a: Any, outs: Any, p: Any, g: Any, m: Any, v: Any, hyper: Any) -> None:
    lr, b1, b2, eps, decay, fix1, fix2 = (float(h) for h in hyper)
    root = math.sqrt(fix2)  # sqrt(v / fix2) + eps = (sqrt(v) + eps * root) / root
    rate, floor = lr * root / fix1, eps * root

    def run(s: Any, t: Any, outs: Any, ins: Any) -> None:
        p, g, m, v = ins
        to, mean, square = outs
        step = g if a.decoupled else _decayed(s, g, p, decay)
        np.multiply(step, step, out=t)
        t *= 1 - b2
        np.multiply(v, b2, out=square)
        square += t
        np.multiply(step, 1 - b1, out=t)
        np.multiply(m, b1, out=mean)
        mean += t
        np.sqrt(square, out=s)
        s += floor
        np.divide(mean, s, out=s)
        s *= rate
        if a.decoupled and decay:
            np.multiply(p, 1 - lr * decay, out=t)
            p = t
        np.subtract(p, s, out=to)

    _update(outs, [p, g, m, v], run)


@numpy_kernel("rmsprop_update")
def _rmsprop(a: Any, outs: Any, p: Any, g: Any, s: Any, v: Any, hyper: Any) -> None:
    lr, alpha, eps, decay, momentum = (float(h) for h in hyper)

    def run(s: Any, t: Any, outs: Any, ins: Any) -> None:
        p, g, old, v = ins
        square = outs[1]
        step = _decayed(s, g, p, decay)
        np.multiply(step, step, out=t)
        t *= 1 - alpha
        np.multiply(old, alpha, out=square)
        square += t
        np.sqrt(square, out=t)
        t += eps
        np.divide(step, t, out=t)
        if a.momentum:
            np.multiply(v, momentum, out=outs[2])
            outs[2] += t
            step = outs[2]
        else:
            step = t
        np.multiply(step, lr, out=t)
        np.subtract(p, t, out=outs[0])

    _update(outs, [p, g, s, v], run)
