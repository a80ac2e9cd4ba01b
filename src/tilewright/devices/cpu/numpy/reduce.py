"""Reductions in NumPy. Half types accumulate in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _half(x: np.ndarray) -> bool:
    return x.dtype.itemsize == 2 and x.dtype.kind not in "iu"


@numpy_kernel("sum")
def _sum(a: Any, out: Any, x: Any) -> None:
    if _half(x):
        np.copyto(out, x.astype(np.float32).sum(a.axes, keepdims=a.keepdims), casting="unsafe")
    else:
        np.sum(x, axis=a.axes, keepdims=a.keepdims, out=out)


@numpy_kernel("prod")
def _prod(a: Any, out: Any, x: Any) -> None:
    x = x.astype(np.float32) if _half(x) else x
    np.copyto(out, np.multiply.reduce(x, axis=a.axes, keepdims=a.keepdims), casting="unsafe")


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
    np.copyto(out, np.argmax(x.astype(np.float32) if _half(x) else x, axis=a.axis, keepdims=a.keepdims))


@numpy_kernel("argmin")
def _argmin(a: Any, out: Any, x: Any) -> None:
    np.copyto(out, np.argmin(x.astype(np.float32) if _half(x) else x, axis=a.axis, keepdims=a.keepdims))


@numpy_kernel("cumsum")
def _cumsum(axis: Any, out: Any, x: Any) -> None:
    np.copyto(out, np.add.accumulate(x.astype(np.float32) if _half(x) else x, axis=axis), casting="unsafe")


@numpy_kernel("topk")
def _topk(a: Any, outs: Any, x: Any) -> None:
    values, index = outs
    x = x.astype(np.float32) if _half(x) else x
    lines = np.moveaxis(x, a.axis, -1)
    order = np.argsort(lines, axis=-1, kind="stable") if not a.largest else np.flip(
        lines.shape[-1] - 1 - np.argsort(np.flip(lines, -1), axis=-1, kind="stable"), -1
    )  # fmt: skip
    chosen = np.moveaxis(order[..., : a.k], -1, a.axis)
    np.copyto(index, chosen)
    np.copyto(values, np.take_along_axis(x, chosen, a.axis), casting="unsafe")
