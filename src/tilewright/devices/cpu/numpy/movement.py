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


@numpy_kernel("split")
def _split(a, outs, x):
    at = 0
    for out, n in zip(outs, a.sizes, strict=True):
        np.copyto(out, x[(slice(None),) * a.axis + (slice(at, at + n),)])
        at += n


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


def _borders(mode, size, b, e):
    """The border before and the one after an axis, as slices of the padded axis, and what each shows, of the inner one."""
    if mode == "replicate":
        shown = slice(0, 1), slice(size - 1, size)
    else:
        stop = size - 2 - e
        shown = slice(b, 0, -1), slice(size - 2, stop if stop >= 0 else None, -1)
    return [pair for pair, width in zip(zip((slice(0, b), slice(b + size, None)), shown, strict=True), (b, e), strict=True) if width]


@numpy_kernel("pad_border")
def _pad_border(a, out, x):
    at = [slice(b, b + s) for (b, _), s in zip(a.widths, x.shape, strict=True)]
    out[tuple(at)] = x
    for axis, ((b, e), size) in enumerate(zip(a.widths, x.shape, strict=True)):
        inner = out[tuple(at)]
        at[axis] = slice(None)  # whole from here on: later axes repeat the borders of earlier ones
        grown = out[tuple(at)]
        lead = (slice(None),) * axis
        for border, shown in _borders(a.mode, size, b, e):
            grown[(*lead, border)] = inner[(*lead, shown)]


@numpy_kernel("pad_border_grad")
def _pad_border_grad(a, out, g):
    g = _wide(g)
    for axis, (b, e) in enumerate(a.widths):
        if b or e:
            size = out.shape[axis]
            lead = (slice(None),) * axis
            inner = g[(*lead, slice(b, b + size))].copy(order="K")
            for border, shown in _borders(a.mode, size, b, e):
                part = g[(*lead, border)]
                inner[(*lead, shown)] += part.sum(axis, keepdims=True) if a.mode == "replicate" else part
            g = inner
    np.copyto(out, g, casting="unsafe")


def _wide(x):
    """Half types add up in float32."""
    return x.astype(np.float32) if x.itemsize == 2 and x.dtype.kind not in "iu" else x


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
    total = _wide(x)
    if total is x:
        np.copyto(out, x)
        total = out
    np.add.at(np.moveaxis(total, axis, 0), index, np.moveaxis(_wide(source), axis, 0))
    if total is not out:
        np.copyto(out, total, casting="unsafe")


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
    total = _wide(x)
    if total is x:
        np.copyto(out, x)
        total = out
    np.add.at(total, _grid(axis, index.shape, index), _wide(source))
    if total is not out:
        np.copyto(out, total, casting="unsafe")
