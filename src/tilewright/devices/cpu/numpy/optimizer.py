"""Optimizer updates in NumPy: in cache-sized pieces on all cores, so that each operand moves through memory once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.devices.cpu.numpy._blocks import split


def _decayed(g: np.ndarray, p: np.ndarray, decay: Any) -> np.ndarray:
    return g + p * decay if decay else g


@numpy_kernel("sgd_update")
def _sgd(a: Any, outs: Any, p: Any, g: Any, v: Any, hyper: Any) -> None:
    lr, momentum, decay = (p.dtype.type(h) for h in hyper)
    p_out, v_out = outs if a.momentum else (outs, None)

    def run(i: int, j: int) -> None:
        step = _decayed(g[i:j], p[i:j], decay)
        if v_out is not None:
            new = v[i:j] * momentum
            new += step
            v_out[i:j] = new
            if a.nesterov:
                new *= momentum
                new += step
            step = new
            step *= lr
        else:
            step = step * lr
        np.subtract(p[i:j], step, out=p_out[i:j])

    split(p.size, run)


@numpy_kernel("adam_update")
def _adam(a: Any, outs: Any, p: Any, g: Any, m: Any, v: Any, hyper: Any) -> None:
    real = p.dtype.type
    lr, b1, b2, eps, decay, fix1, fix2 = (float(h) for h in hyper)
    p_out, m_out, v_out = outs
    rate, root = real(lr / fix1), real(fix2)

    def run(i: int, j: int) -> None:
        here = p[i:j] * real(1 - lr * decay) if a.decoupled and decay else p[i:j]
        step = g[i:j] if a.decoupled else _decayed(g[i:j], p[i:j], real(decay))
        first = m[i:j] * real(b1)
        first += step * real(1 - b1)
        m_out[i:j] = first
        second = step * step
        second *= real(1 - b2)
        second += v[i:j] * real(b2)
        v_out[i:j] = second
        second /= root
        np.sqrt(second, out=second)
        second += real(eps)
        first /= second
        first *= rate
        np.subtract(here, first, out=p_out[i:j])

    split(p.size, run)


@numpy_kernel("rmsprop_update")
def _rmsprop(a: Any, outs: Any, p: Any, g: Any, s: Any, v: Any, hyper: Any) -> None:
    lr, alpha, eps, decay, momentum = (p.dtype.type(h) for h in hyper)
    p_out, s_out = outs[:2]
    rest = p.dtype.type(1 - float(hyper[1]))

    def run(i: int, j: int) -> None:
        step = _decayed(g[i:j], p[i:j], decay)
        mean = s[i:j] * alpha
        mean += step * step * rest
        s_out[i:j] = mean
        np.sqrt(mean, out=mean)
        mean += eps
        step = step / mean
        if a.momentum:
            step += v[i:j] * momentum
            outs[2][i:j] = step
        np.subtract(p[i:j], step * lr, out=p_out[i:j])

    split(p.size, run)
