"""Pooling in NumPy: one strided slice of the input per tap of the window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _spans(size: int, out: int, tap: int, stride: int, before: int, dilation: int) -> tuple[slice, slice] | None:
    """Which outputs a tap meets inside the input, and the input elements it meets."""
    first = tap * dilation - before
    low = max(0, -(first // stride))
    high = min(out, (size - 1 - first) // stride + 1)
    if low >= high:
        return None
    start = first + low * stride
    return slice(low, high), slice(start, start + (high - low - 1) * stride + 1, stride)


def _taps(a: Any, x: np.ndarray, y: np.ndarray) -> Iterator[tuple[int, Any, Any]]:
    """For each tap that meets the input `x`: its number, the slices of the output `y` and those of the input."""
    h, w, oh, ow = x.shape[2], x.shape[3], y.shape[2], y.shape[3]
    t, le, _, _ = a.padding
    for i in range(a.kernel[0]):
        rows = _spans(h, oh, i, a.stride[0], t, a.dilation[0])
        for j in range(a.kernel[1]):
            cols = _spans(w, ow, j, a.stride[1], le, a.dilation[1])
            if rows and cols:
                yield i * a.kernel[1] + j, (slice(None), slice(None), rows[0], cols[0]), (slice(None), slice(None), rows[1], cols[1])


def max_pool(a: Any, y: np.ndarray, tap: np.ndarray, x: np.ndarray) -> None:
    y[...] = np.iinfo(y.dtype).min if y.dtype.kind in "iu" else -np.inf
    tap[...] = 0
    first = np.zeros(y.shape[2:], bool)
    for k, o, i in _taps(a, x, y):
        value, best = x[i], y[o]
        # The first tap always wins, so that a window of -inf points inside; NaN wins over all but an earlier NaN.
        better = (value > best) | ((value != value) & (best == best)) | ~first[o[2:]]
        first[o[2:]] = True
        np.copyto(best, value, where=better)
        np.copyto(tap[o], k, where=better, casting="unsafe")


@numpy_kernel("max_pool2d")
def _max(a: Any, outs: Any, x: Any) -> None:
    y, tap = outs
    max_pool(a, y, tap, x)


@numpy_kernel("max_pool2d_grad")
def _max_grad(a: Any, out: Any, g: Any, tap: Any) -> None:
    total = out if out.dtype.itemsize > 2 else np.empty_like(out, dtype=np.float32)
    total[...] = 0
    for k, o, i in _taps(a.pool, out, g):
        total[i] += np.where(tap[o] == k, g[o], 0)
    if total is not out:
        np.copyto(out, total, casting="unsafe")


@numpy_kernel("max_pool2d_pick")
def _pick(a: Any, out: Any, v: Any, tap: Any) -> None:
    out[...] = 0
    for k, o, i in _taps(a, v, out):
        np.copyto(out[o], v[i], where=tap[o] == k)


def _divisors(a: Any, shape: Any, windows: Any, dtype: Any) -> np.ndarray:
    oh, ow = windows[2:]
    if a.divisor:
        return np.full((oh, ow), a.divisor, dtype)
    counts = []
    for axis, o in ((0, oh), (1, ow)):
        low, high = (-a.padding[axis], shape[2 + axis] + a.padding[2 + axis]) if a.count_include_pad else (0, shape[2 + axis])
        starts = np.arange(o) * a.stride[axis] - a.padding[axis]
        count = np.zeros(o)
        for k in range(a.kernel[axis]):
            at = starts + k * a.dilation[axis]
            count += (at >= low) & (at < high)
        counts.append(count)
    return np.maximum(np.outer(*counts), 1).astype(dtype)


def _wide(dtype: Any) -> Any:
    return np.float32 if dtype.itemsize == 2 else dtype


@numpy_kernel("avg_pool2d")
def _avg(a: Any, out: Any, x: Any) -> None:
    total = np.zeros_like(out, dtype=_wide(out.dtype))
    if a.kernel == x.shape[2:] and not any(a.padding) and a.dilation == (1, 1):
        np.sum(x, (2, 3), keepdims=True, dtype=total.dtype, out=total)
    else:
        for _, o, i in _taps(a, x, out):
            total[o] += x[i]
    np.divide(total, _divisors(a, x.shape, out.shape, total.dtype), out=out, casting="unsafe")


@numpy_kernel("avg_pool2d_grad")
def _avg_grad(a: Any, out: Any, g: Any) -> None:
    wide = _wide(out.dtype)
    share = g / _divisors(a.pool, out.shape, g.shape, wide)
    total = out if out.dtype == wide else np.empty_like(out, dtype=wide)
    total[...] = 0
    for _, o, i in _taps(a.pool, out, g):
        total[i] += share[o]
    if total is not out:
        np.copyto(out, total, casting="unsafe")
