"""Convolution in NumPy: im2col and BLAS, in pieces of bounded size.

The input is laid out as a matrix of windows, a piece of several images or of some rows of one at a time, and multiplied
by the weights (Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing",
2006). The gradient of the input goes the other way, a tap of the window at a time. With one channel a group, a product of
matrices would be mostly overhead, so there each tap is multiplied and added on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.devices.cpu.numpy._blas import alone
from tilewright.devices.cpu.numpy._epilogue import epilogue

PIECE = 4 << 20  # bytes of the window matrix held at once: it is written and read again, best from a core's own cache
TAPS = 512 << 10  # bytes that the taps of a window go over again and again


def _nhwc(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1)


def _work(x: np.ndarray) -> np.ndarray:
    """Half types are computed in float32."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def _padded(x: np.ndarray, padding: Any) -> np.ndarray:
    """Images (N, H, W, C) with zero padding (negative crops)."""
    t, le, b, r = padding
    x = x[:, max(-t, 0) : x.shape[1] - max(-b, 0), max(-le, 0) : x.shape[2] - max(-r, 0)]
    if max(t, le, b, r) <= 0:
        return x
    out = np.zeros(
        (x.shape[0], x.shape[1] + max(t, 0) + max(b, 0), x.shape[2] + max(le, 0) + max(r, 0), x.shape[3]),
        x.dtype,
    )
    out[:, max(t, 0) : max(t, 0) + x.shape[1], max(le, 0) : max(le, 0) + x.shape[2]] = x
    return out


def _windows(x: np.ndarray, a: Any, kh: int, kw: int, oh: int, ow: int) -> np.ndarray:
    """A view (N, OH, OW, kh, kw, C) of a padded (N, H, W, C)."""
    n, h, w, c = x.strides
    shape = (x.shape[0], oh, ow, kh, kw, x.shape[3])
    strides = (n, h * a.stride[0], w * a.stride[1], h * a.dilation[0], w * a.dilation[1], c)
    return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)


def _pieces(images: int, rows: int, row_bytes: int, bound: int) -> Iterator[tuple[slice, list[slice]]]:
    """Images together, and the rows of them together, whose windows (`row_bytes` a row) fit in `bound`."""
    together = min(images, bound // max(row_bytes * rows, 1))
    if together >= 1:
        for i in range(0, images, together):
            yield slice(i, min(i + together, images)), [slice(0, rows)]
        return
    step = max(1, bound // max(row_bytes, 1))
    for i in range(images):
        yield slice(i, i + 1), [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def _taps(a: Any, kh: int, kw: int, rows: slice, ow: int) -> Any:
    """For each tap of the window: its place, and what it meets of the padded input for these rows of the output."""
    for i in range(kh):
        for j in range(kw):
            top, left = i * a.dilation[0] + rows.start * a.stride[0], j * a.dilation[1]
            down, across = (rows.stop - rows.start - 1) * a.stride[0], (ow - 1) * a.stride[1]
            yield i, j, slice(top, top + down + 1, a.stride[0]), slice(left, left + across + 1, a.stride[1])


def _each(part: np.ndarray, times: int) -> np.ndarray:
    """Channels repeated, each for as many outputs as its group has."""
    return np.repeat(part, times, axis=3) if times > 1 else part


@numpy_kernel("conv2d", variant="im2col")
@alone
def _conv2d(a: Any, out: Any, x: Any, w: Any, b: Any, residual: Any) -> None:
    f, cg, kh, kw = w.shape
    n, _, oh, ow = out.shape
    x, w = _work(_nhwc(x)), _work(w)
    y = out if out.dtype == x.dtype else np.empty_like(out, dtype=x.dtype)
    dest = _nhwc(y)
    depthwise, fg = cg == 1 and a.groups > 1, f // a.groups
    row_bytes = ow * (f if depthwise else kh * kw * cg) * x.itemsize
    for images, blocks in _pieces(n, oh, row_bytes, TAPS if depthwise else PIECE):
        padded = _padded(x[images], a.padding)
        if depthwise:
            for rows in blocks:
                _depthwise(a, dest[images, rows], padded, w, rows, ow)
            continue
        windows = _windows(padded, a, kh, kw, oh, ow)
        for g in range(a.groups):
            weight = w[g * fg : (g + 1) * fg].transpose(0, 2, 3, 1).reshape(fg, kh * kw * cg).T
            for rows in blocks:
                into = dest[images, rows, :, g * fg : (g + 1) * fg]
                places = into.shape[0] * into.shape[1] * ow
                part = windows[:, rows, ..., g * cg : (g + 1) * cg].reshape(places, kh * kw * cg)
                if into.flags.c_contiguous:
                    np.matmul(part, weight, out=into.reshape(places, fg))
                else:
                    into[...] = (part @ weight).reshape(into.shape)
    epilogue(y, b, residual, a.activation, a.alpha, a.beta)
    if y is not out:
        np.copyto(out, y, casting="unsafe")


def _depthwise(a: Any, dest: np.ndarray, padded: np.ndarray, w: np.ndarray, rows: slice, ow: int) -> None:
    """Some rows (N, rows, OW, F): multiply and add, a tap of the window at a time."""
    f, _, kh, kw = w.shape
    product = np.empty(dest.shape, dest.dtype)
    for i, j, down, across in _taps(a, kh, kw, rows, ow):
        first = i == 0 and j == 0
        np.multiply(_each(padded[:, down, across], f // a.groups), w[:, 0, i, j], out=dest if first else product)
        if not first:
            dest += product


@numpy_kernel("conv2d_input_grad", variant="col2im")
@alone
def _input_grad(attrs: Any, out: Any, g: Any, w: Any) -> None:
    a = attrs.conv
    f, cg, kh, kw = w.shape
    n, _, oh, ow = g.shape
    t, le, b, r = a.padding
    h, wd = attrs.size
    grad, weight = _work(_nhwc(g)), _work(w)
    depthwise, fg = cg == 1 and a.groups > 1, f // a.groups
    dest = _nhwc(out)
    height, width = max(h + max(t, 0) + max(b, 0), 1), max(wd + max(le, 0) + max(r, 0), 1)
    taps = [weight[q * fg : (q + 1) * fg].transpose(2, 3, 0, 1).copy() for q in range(0 if depthwise else a.groups)]
    row_bytes = ow * max(f, out.shape[1]) * grad.itemsize
    for images, blocks in _pieces(n, oh, row_bytes, TAPS):
        full = np.zeros((images.stop - images.start, height, width, out.shape[1]), grad.dtype)
        view = full[:, max(-t, 0) :, max(-le, 0) :]
        for rows in blocks:
            upper = grad[images, rows]
            if depthwise:
                for i, j, down, across in _taps(a, kh, kw, rows, ow):
                    product = upper * weight[:, 0, i, j]
                    view[:, down, across] += product.reshape(*product.shape[:3], a.groups, fg).sum(-1) if fg > 1 else product
                continue
            for q in range(a.groups):
                part = upper[..., q * fg : (q + 1) * fg].reshape(upper.shape[0] * upper.shape[1] * ow, fg)
                for i, j, down, across in _taps(a, kh, kw, rows, ow):
                    view[:, down, across, q * cg : (q + 1) * cg] += (part @ taps[q][i, j]).reshape(*upper.shape[:3], cg)
        dest[images] = full[:, max(t, 0) : max(t, 0) + h, max(le, 0) : max(le, 0) + wd]


@numpy_kernel("conv2d_weight_grad", variant="im2col")
@alone
def _weight_grad(attrs: Any, out: Any, x: Any, g: Any) -> None:
    a = attrs.conv
    dw, db = out if attrs.bias else (out, None)
    f, cg, kh, kw = dw.shape
    n, _, oh, ow = g.shape
    x, grad = _work(_nhwc(x)), _work(_nhwc(g))
    depthwise, fg = cg == 1 and a.groups > 1, f // a.groups
    total = np.zeros((f, kh, kw, cg), grad.dtype)
    row_bytes = ow * (f if depthwise else kh * kw * cg) * grad.itemsize
    for images, blocks in _pieces(n, oh, row_bytes, TAPS if depthwise else PIECE):
        padded = _padded(x[images], a.padding)
        windows = _windows(padded, a, kh, kw, oh, ow)
        for rows in blocks:
            upper = grad[images, rows]
            places = upper.shape[0] * upper.shape[1] * ow
            if depthwise:
                for i, j, down, across in _taps(a, kh, kw, rows, ow):
                    total[:, i, j, 0] += np.einsum("nhwf,nhwf->f", _each(padded[:, down, across], fg), upper)
                continue
            for q in range(a.groups):
                part = windows[:, rows, ..., q * cg : (q + 1) * cg].reshape(places, kh * kw * cg)
                above = upper[..., q * fg : (q + 1) * fg].reshape(places, fg)
                total[q * fg : (q + 1) * fg] += (above.T @ part).reshape(fg, kh, kw, cg)
    np.copyto(dw, total.transpose(0, 3, 1, 2), casting="unsafe")
    if db is not None:
        np.copyto(db, grad.sum((0, 1, 2)), casting="unsafe")
