"""Resizing in NumPy: gathers of rows and columns with their weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _places(a: Any, n: int, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Per output: the two input positions and the share of the second (None for nearest)."""
    out = a.size[axis]
    at = np.arange(out, dtype=np.float64)
    ratio = a.scale[axis] or n / out
    if a.mode == "nearest":
        low = np.minimum((at * ratio).astype(np.int64), n - 1)
        return low, low, None
    where = at * ((n - 1) / max(out - 1, 1)) if a.align_corners else np.maximum((at + 0.5) * ratio - 0.5, 0)
    low = np.minimum(where.astype(np.int64), n - 1)
    return low, np.minimum(low + 1, n - 1), np.minimum(where - low, 1)


def _along(a: Any, x: np.ndarray, axis: int) -> np.ndarray:
    low, high, part = _places(a, x.shape[2 + axis], axis)
    first = np.take(x, low, 2 + axis)
    if part is None:
        return first
    share = part.astype(x.dtype).reshape(-1, *[1] * (1 - axis))
    return first + (np.take(x, high, 2 + axis) - first) * share


@numpy_kernel("resize2d")
def _resize(a: Any, out: Any, x: Any) -> None:
    x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    np.copyto(out, _along(a, _along(a, x, 0), 1), casting="unsafe")


def _back(a: Any, g: np.ndarray, n: int, axis: int) -> np.ndarray:
    low, high, part = _places(a, n, axis)
    lines = np.moveaxis(g, 2 + axis, 0)
    total = np.zeros((n, *lines.shape[1:]), g.dtype)
    if part is None:
        np.add.at(total, low, lines)
    else:
        share = part.astype(g.dtype).reshape(-1, 1, 1, 1)
        np.add.at(total, low, lines * (1 - share))
        np.add.at(total, high, lines * share)
    return np.moveaxis(total, 0, 2 + axis)


@numpy_kernel("resize2d_grad")
def _resize_grad(a: Any, out: Any, g: Any) -> None:
    g = g.astype(np.float32) if g.dtype.itemsize == 2 else g
    np.copyto(out, _back(a.resize, _back(a.resize, g, a.size[0], 0), a.size[1], 1), casting="unsafe")
