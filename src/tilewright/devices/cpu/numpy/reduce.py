"""Reductions in NumPy. Half types accumulate in float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _half(x: np.ndarray) -> bool:
    return x.dtype.itemsize == 2 and x.dtype.kind not in "iu"


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if _half(x) else x


def _count(x: np.ndarray, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[i] for i in axes)


@numpy_kernel("sum")
def _sum(a: Any, out: Any, x: Any) -> None:
    if _half(x):
        np.copyto(out, np.add.reduce(_wide(x), axis=a.axes, keepdims=a.keepdims), casting="unsafe")
    else:
        np.add.reduce(x, axis=a.axes, dtype=out.dtype, keepdims=a.keepdims, out=out)


@numpy_kernel("mean")
def _mean(a: Any, out: Any, x: Any) -> None:
    total = np.add.reduce(_wide(x), axis=a.axes, dtype=None if x.dtype.kind in "fV" else np.int64, keepdims=a.keepdims)
    np.divide(total, _count(x, a.axes), out=out, casting="unsafe")


@numpy_kernel("var")
def _var(a: Any, out: Any, x: Any) -> None:
    """Two passes, corrected for the rounding of the mean (Chan, Golub and LeVeque, 1983)."""
    x = _wide(x)
    count = _count(x, a.axes)
    d = np.empty_like(x)
    np.subtract(x, np.add.reduce(x, axis=a.axes, keepdims=True) / x.dtype.type(max(count, 1)), out=d)
    left = np.add.reduce(d, axis=a.axes, keepdims=a.keepdims)
    np.multiply(d, d, out=d)
    total = np.add.reduce(d, axis=a.axes, keepdims=a.keepdims) - left * left / x.dtype.type(max(count, 1))
    rest = count - a.correction
    np.divide(np.maximum(total, 0), rest if rest > 0 else math.nan, out=out, casting="unsafe")


@numpy_kernel("logsumexp")
def _logsumexp(a: Any, out: Any, x: Any) -> None:
    x = _wide(x)
    top = np.maximum.reduce(x, axis=a.axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), x.dtype.type(0), top)
    e = np.empty_like(x)
    np.exp(np.subtract(x, top, out=e), out=e)
    total = np.log(np.add.reduce(e, axis=a.axes, keepdims=True)) + top
    np.copyto(out, total.reshape(out.shape), casting="unsafe")


@numpy_kernel("prod")
def _prod(a: Any, out: Any, x: Any) -> None:
    dtype = None if x.dtype.kind in "fV" else np.int64
    np.copyto(out, np.multiply.reduce(_wide(x), axis=a.axes, dtype=dtype, keepdims=a.keepdims), casting="unsafe")


@numpy_kernel("max")
def _max(a: Any, out: Any, x: Any) -> None:
    np.maximum.reduce(x, axis=a.axes, keepdims=a.keepdims, out=out)


@numpy_kernel("min")
def _min(a: Any, out: Any, x: Any) -> None:
    np.minimum.reduce(x, axis=a.axes, keepdims=a.keepdims, out=out)


@numpy_kernel("any")
def _any(a: Any, out: Any, x: Any) -> None:
    np.logical_or.reduce(x, axis=a.axes, keepdims=a.keepdims, out=out)


@numpy_kernel("all")
def _all(a: Any, out: Any, x: Any) -> None:
    np.logical_and.reduce(x, axis=a.axes, keepdims=a.keepdims, out=out)


@numpy_kernel("argmax")
def _argmax(a: Any, out: Any, x: Any) -> None:
    np.copyto(out, np.argmax(_wide(x), axis=a.axis, keepdims=a.keepdims))


@numpy_kernel("argmin")
def _argmin(a: Any, out: Any, x: Any) -> None:
    np.copyto(out, np.argmin(_wide(x), axis=a.axis, keepdims=a.keepdims))


@numpy_kernel("cumsum")
def _cumsum(axis: Any, out: Any, x: Any) -> None:
    np.copyto(out, np.add.accumulate(_wide(x), axis=axis, dtype=None if x.dtype.kind in "fV" else np.int64), casting="unsafe")


@numpy_kernel("topk")
def _topk(a: Any, outs: Any, x: Any) -> None:
    values, index = outs
    x = _wide(x)
    lines = np.moveaxis(x, a.axis, -1)
    order = np.argsort(lines, axis=-1, kind="stable") if not a.largest else np.flip(
        lines.shape[-1] - 1 - np.argsort(np.flip(lines, -1), axis=-1, kind="stable"), -1
    )  # fmt: skip
    chosen = np.moveaxis(order[..., : a.k], -1, a.axis)
    np.copyto(index, chosen)
    np.copyto(values, np.take_along_axis(x, chosen, a.axis), casting="unsafe")
