"""Convolution in NumPy: im2col and BLAS, in pieces of bounded size.

The input is laid out as a matrix of windows, a piece of the batch's rows at a time, and multiplied by the weights
(Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.devices.cpu.numpy._epilogue import epilogue

PIECE = 16 << 20  # bytes of the window matrix held at once


def _nhwc(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1)


def _work(x: np.ndarray) -> np.ndarray:
    """Half types are computed in float32."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def _padded(x: np.ndarray, padding: Any) -> np.ndarray:
    """One image batch (N, H, W, C) with zero padding (negative crops)."""
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


def _rows(oh: int, row_bytes: int) -> int:
    """Output rows whose windows fit in a piece."""
    return max(1, min(oh, PIECE // max(row_bytes, 1)))


@numpy_kernel("conv2d", variant="im2col")
def _conv2d(a: Any, out: Any, x: Any, w: Any, b: Any, residual: Any) -> None:
    f, cg, kh, kw = w.shape
    n, _, oh, ow = out.shape
    x, w = _work(_nhwc(x)), _work(w)
    y = out if out.dtype == x.dtype else np.empty_like(out, dtype=x.dtype)
    dest = _nhwc(y)
    depthwise = cg == 1 and a.groups > 1
    rows = _rows(oh, ow * kh * kw * cg * x.itemsize)
    fg = f // a.groups
    for image in range(n):
        padded = _padded(x[image : image + 1], a.padding)
        if depthwise:
            _depthwise(a, dest[image], padded[0], w, oh, ow)
            continue
        windows = _windows(padded, a, kh, kw, oh, ow)[0]
        for g in range(a.groups):
            weight = w[g * fg : (g + 1) * fg].transpose(2, 3, 1, 0).reshape(kh * kw * cg, fg)
            for r in range(0, oh, rows):
                part = windows[r : r + rows, ..., g * cg : (g + 1) * cg]
                product = part.reshape(part.shape[0] * ow, kh * kw * cg) @ weight
                dest[image, r : r + rows, :, g * fg : (g + 1) * fg] = product.reshape(part.shape[0], ow, fg)
    epilogue(y, b, residual, a.activation, a.alpha, a.beta)
    if y is not out:
        np.copyto(out, y, casting="unsafe")


def _taps(a: Any, kh: int, kw: int, oh: int, ow: int) -> Any:
    for i in range(kh):
        for j in range(kw):
            top, left = i * a.dilation[0], j * a.dilation[1]
            yield (
                i,
                j,
                slice(top, top + (oh - 1) * a.stride[0] + 1, a.stride[0]),
                slice(left, left + (ow - 1) * a.stride[1] + 1, a.stride[1]),
            )


def _depthwise(a: Any, dest: np.ndarray, padded: np.ndarray, w: np.ndarray, oh: int, ow: int) -> None:
    """One image (OH, OW, F): multiply and add, a tap of the window at a time."""
    f, _, kh, kw = w.shape
    multiplier = f // a.groups
    dest[...] = 0
    for i, j, rows, cols in _taps(a, kh, kw, oh, ow):
        part = padded[rows, cols]
        if multiplier > 1:
            part = np.repeat(part, multiplier, axis=2)
        dest += part * w[:, 0, i, j]


@numpy_kernel("conv2d_input_grad", variant="col2im")
def _input_grad(attrs: Any, out: Any, g: Any, w: Any) -> None:
    a = attrs.conv
    f, cg, kh, kw = w.shape
    n, _, oh, ow = g.shape
    t, le, b, r = a.padding
    h, wd = attrs.size
    grad, weight = _work(_nhwc(g)), _work(w)
    fg = f // a.groups
    dest = _nhwc(out)
    full = np.zeros((max(h + max(t, 0) + max(b, 0), 1), max(wd + max(le, 0) + max(r, 0), 1), out.shape[1]), grad.dtype)
    view = full[max(-t, 0) :, max(-le, 0) :]
    for image in range(n):
        full[...] = 0
        for group in range(a.groups) if cg > 1 or a.groups == 1 else ():
            part = np.ascontiguousarray(grad[image, ..., group * fg : (group + 1) * fg]).reshape(oh * ow, fg)
            for i, j, rows, cols in _taps(a, kh, kw, oh, ow):
                tap = np.ascontiguousarray(weight[group * fg : (group + 1) * fg, :, i, j])
                view[rows, cols, group * cg : (group + 1) * cg] += (part @ tap).reshape(oh, ow, cg)
        if cg == 1 and a.groups > 1:
            for i, j, rows, cols in _taps(a, kh, kw, oh, ow):
                product = grad[image] * weight[:, 0, i, j]
                view[rows, cols] += product.reshape(oh, ow, a.groups, fg).sum(-1) if fg > 1 else product
        dest[image] = full[max(t, 0) : max(t, 0) + h, max(le, 0) : max(le, 0) + wd]


@numpy_kernel("conv2d_weight_grad", variant="im2col")
def _weight_grad(attrs: Any, out: Any, x: Any, g: Any) -> None:
    a = attrs.conv
    dw, db = out if attrs.bias else (out, None)
    f, cg, kh, kw = dw.shape
    n, _, oh, ow = g.shape
    fg = f // a.groups
    images, grad = _work(_nhwc(x)), _work(_nhwc(g))
    total = np.zeros((f, kh, kw, cg), grad.dtype)
    rows = _rows(oh, ow * kh * kw * cg * grad.itemsize)
    for image in range(n):
        padded = _padded(images[image : image + 1], a.padding)
        if cg == 1 and a.groups > 1:
            for i, j, r, c in _taps(a, kh, kw, oh, ow):
                part = padded[0, r, c]
                part = np.repeat(part, fg, axis=2) if fg > 1 else part
                total[:, i, j, 0] += np.einsum("hwf,hwf->f", part, grad[image])
            continue
        windows = _windows(padded, a, kh, kw, oh, ow)[0]
        for group in range(a.groups):
            for r in range(0, oh, rows):
                part = windows[r : r + rows, ..., group * cg : (group + 1) * cg]
                part = part.reshape(part.shape[0] * ow, kh * kw * cg)
                upper = grad[image, r : r + rows, :, group * fg : (group + 1) * fg].reshape(len(part), fg)
                total[group * fg : (group + 1) * fg] += (upper.T @ part).reshape(fg, kh, kw, cg)
    np.copyto(dw, total.transpose(0, 3, 1, 2), casting="unsafe")
    if db is not None:
        np.copyto(db, grad.sum((0, 1, 2)), casting="unsafe")
