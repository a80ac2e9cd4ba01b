"""Movement ops in NumPy."""

from __future__ import annotations

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.errors import ArgumentError


@numpy_kernel("to_layout", "copy", "cast")
def _copy(attrs, out, x):
    np.copyto(out, x, casting="unsafe")


@numpy_kernel("reshape")
def _reshape(attrs, out, x):
    np.copyto(out, x.reshape(attrs))


@numpy_kernel("expand")
def _expand(attrs, out, x):
    np.copyto(out, np.broadcast_to(x, attrs))


@numpy_kernel("transfer")
def _transfer(attrs, out, x):
    np.copyto(out, x)


@numpy_kernel("permute")
def _permute(attrs, out, x):
    np.copyto(out, x.transpose(attrs))


@numpy_kernel("concat")
def _concat(axis, out, *xs):
    np.concatenate(xs, axis, out=out)


@numpy_kernel("slice")
def _slice(attrs, out, x):
    np.copyto(out, x[attrs.slices])


@numpy_kernel("slice_put")
def _slice_put(attrs, out, g):
    out[...] = 0
    out[attrs.cut.slices] = g


@numpy_kernel("pad")
def _pad(attrs, out, x):
    out[...] = attrs.value
    inner = tuple(slice(max(b, 0), s - max(e, 0)) for (b, e), s in zip(attrs.widths, out.shape, strict=True))
    kept = tuple(slice(max(-b, 0), s - max(-e, 0)) for (b, e), s in zip(attrs.widths, x.shape, strict=True))
    out[inner] = x[kept]


def _check(name, index, size):
    if index.size and not (-size <= index.min() and index.max() < size):
        bad = index.max() if index.max() >= size else index.min()
        raise ArgumentError(f"{name}: index {bad} is outside the axis; it must be from {-size} to {size - 1}")


@numpy_kernel("take")
def _take(axis, out, x, index):
    _check("take", index, x.shape[axis])
    np.copyto(out, np.take(x, index, axis, mode="wrap"))


@numpy_kernel("index_add")
def _index_add(axis, out, x, index, source):
    _check("index_add", index, x.shape[axis])
    np.copyto(out, x)
    np.add.at(np.moveaxis(out, axis, 0), index, np.moveaxis(source, axis, 0))


def _grid(axis, shape, index):
    grid = list(np.ogrid[tuple(slice(s) for s in shape)])
    grid[axis] = index
    return tuple(grid)


@numpy_kernel("gather")
def _gather(axis, out, x, index):
    _check("gather", index, x.shape[axis])
    np.copyto(out, x[_grid(axis, index.shape, index)])


@numpy_kernel("scatter_add")
def _scatter_add(axis, out, x, index, source):
    _check("scatter_add", index, x.shape[axis])
    np.copyto(out, x)
    np.add.at(out, _grid(axis, index.shape, index), source)
