"""Normalisation in NumPy; statistics in two passes, in float32 at least."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _side(v: np.ndarray, nd: int) -> np.ndarray:
    return v.reshape(1, -1, *[1] * (nd - 2))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _bits(positive: np.ndarray, layout: str) -> np.ndarray:
    lies = np.moveaxis(positive, 1, -1) if layout == "channels_last" and positive.ndim > 2 else positive
    return np.packbits(np.ascontiguousarray(lies), bitorder="little")


def _unbits(mask: np.ndarray, shape: Any, layout: str) -> np.ndarray:
    flat = np.unpackbits(mask, count=math.prod(shape), bitorder="little").view(bool)
    if layout == "channels_last" and len(shape) > 2:
        return np.moveaxis(flat.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
    return flat.reshape(shape)


def activate(name: str | None, y: np.ndarray) -> None:
    """In place; NaN stays."""
    if name == "relu":
        np.maximum(y, 0, out=y)
    elif name == "relu6":
        np.clip(y, 0, 6, out=y)


@numpy_kernel("batch_norm_train")
def train(a: Any, outs: Any, x: Any, w: Any, b: Any) -> None:
    y, mean, var = outs[:3]
    x = _wide(x)
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1] if x.shape[1] else 0
    if not count:
        mean[...] = var[...] = 0
        return
    m = np.add.reduce(x, axes, dtype=np.float64) / count
    d = x - _side(m.astype(x.dtype), x.ndim)
    v = np.add.reduce(d * d, axes, dtype=np.float64) / count
    mean[...], var[...] = m, v
    scale = (1 / np.sqrt(v + a.eps)).astype(x.dtype)
    d *= _side(scale if w is None else scale * _wide(w), x.ndim)
    if b is not None:
        d += _side(_wide(b), x.ndim)
    if a.activation:
        outs[3][...] = _bits((d > 0) & (d < 6) if a.activation == "relu6" else d > 0, a.layout)
        activate(a.activation, d)
    np.copyto(y, d, casting="unsafe")


@numpy_kernel("batch_norm_grad")
def _grad(a: Any, outs: Any, g: Any, x: Any, m: Any, v: Any, w: Any, mask: Any) -> None:
    dx, dw, db = outs
    g, x = _wide(g), _wide(x)
    axes, nd = (0, *range(2, x.ndim)), x.ndim
    count = max(x.size // max(x.shape[1], 1), 1)
    if mask is not None:
        g = np.where(_unbits(mask, g.shape, a.layout), g, g.dtype.type(0))
    rstd = (1 / np.sqrt(v.astype(np.float64) + a.eps)).astype(x.dtype)
    xhat = x - _side(m.astype(x.dtype), nd)
    xhat *= _side(rstd, nd)
    sum_g, sum_gx = np.add.reduce(g, axes, dtype=np.float64), np.add.reduce(g * xhat, axes, dtype=np.float64)
    dw[...], db[...] = sum_gx, sum_g
    xhat *= _side((sum_gx / count).astype(x.dtype), nd)
    np.subtract(g, xhat, out=xhat)
    xhat -= _side((sum_g / count).astype(x.dtype), nd)
    xhat *= _side(rstd if w is None else rstd * _wide(w), nd)
    np.copyto(dx, xhat, casting="unsafe")


@numpy_kernel("batch_norm_infer")
def _infer(a: Any, out: Any, x: Any, m: Any, v: Any, w: Any, b: Any) -> None:
    scale = 1 / np.sqrt(_wide(v) + a.eps)
    scale = scale if w is None else scale * _wide(w)
    y = _wide(x) - _side(_wide(m), x.ndim)
    y *= _side(scale, x.ndim).astype(y.dtype)
    if b is not None:
        y += _side(_wide(b), x.ndim)
    activate(a.activation, y)
    np.copyto(out, y, casting="unsafe")


@numpy_kernel("running_average")
def _running(a: Any, out: Any, running: Any, value: Any) -> None:
    np.copyto(out, running * (1 - a.momentum) + value * (a.momentum * a.scale), casting="unsafe")


@numpy_kernel("standardize")
def _standardize(eps: Any, outs: Any, x: Any) -> None:
    y, rstd = outs
    x = _wide(x)
    if not x.size:
        rstd[...] = 0
        return
    d = x - np.add.reduce(x, 1, keepdims=True) / x.dtype.type(x.shape[1])
    r = 1 / np.sqrt(np.einsum("ij,ij->i", d, d) / x.shape[1] + eps)
    rstd[...] = r
    d *= r[:, None]
    np.copyto(y, d, casting="unsafe")
