"""Resizing of images: nearest and bilinear, and the shuffles between channels and space."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import Spec
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.movement import permute, reshape
from tilewright.tensor import Tensor

SHARED = ("weights",)


class ResizeAttrs(NamedTuple):
    mode: str  # "nearest" or "bilinear"
    size: tuple[int, int]
    align_corners: bool
    scale: tuple[float, float]  # of coordinates, input / output; 0: by the sizes


class ResizeGradAttrs(NamedTuple):
    resize: ResizeAttrs
    size: tuple[int, int]  # of the input


def weights(a: ResizeAttrs, size: tuple[int, int], axis: int) -> np.ndarray:
    """The linear map (output size, input size) along H (0) or W (1)."""
    n, out = size[axis], a.size[axis]
    at = np.arange(out, dtype=np.float64)
    ratio = a.scale[axis] or n / out
    m = np.zeros((out, n))
    if a.mode == "nearest":
        m[np.arange(out), np.minimum(np.floor(at * ratio), n - 1).astype(int)] = 1
        return m
    if a.align_corners:
        where = at * ((n - 1) / (out - 1) if out > 1 else 0.0)
    else:
        where = np.maximum((at + 0.5) * ratio - 0.5, 0.0)
    low = np.minimum(np.floor(where).astype(int), n - 1)
    high = np.minimum(low + 1, n - 1)
    part = np.minimum(where - low, 1.0)
    np.add.at(m, (np.arange(out), low), 1 - part)
    np.add.at(m, (np.arange(out), high), part)
    return m


def _infer(a: ResizeAttrs, x: Spec) -> Spec:
    if x.ndim != 4 or 0 in x.shape[2:]:
        raise ShapeError(f"resize: input {x.shape} must be (N, C, H, W) with at least one row and column")
    return x.like(shape=(*x.shape[:2], *a.size))


def _product(rows: np.ndarray, x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """rows @ x @ columns.T, where a weight of 0 takes nothing even of an infinity."""
    x = np.where(rows[:, :, None] != 0, rows[:, :, None] * x[..., None, :, :], 0).sum(-2)
    return np.where(columns != 0, columns * x[..., None, :], 0).sum(-1)


def _reference(a: ResizeAttrs, x: np.ndarray) -> np.ndarray:
    return _product(weights(a, x.shape[2:], 0), x, weights(a, x.shape[2:], 1)).astype(x.dtype)  # type: ignore[arg-type]


def _grad_reference(a: ResizeGradAttrs, g: np.ndarray) -> np.ndarray:
    return _product(weights(a.resize, a.size, 0).T, g, weights(a.resize, a.size, 1).T).astype(g.dtype)


_CASES = (
    ((2, 3, 4, 5), ResizeAttrs("nearest", (8, 10), False, (0.0, 0.0))),
    ((1, 2, 5, 4), ResizeAttrs("nearest", (3, 7), False, (0.0, 0.0))),
    ((2, 3, 4, 5), ResizeAttrs("bilinear", (8, 10), False, (0.0, 0.0))),
    ((1, 2, 5, 4), ResizeAttrs("bilinear", (3, 7), False, (0.0, 0.0))),
    ((1, 2, 5, 4), ResizeAttrs("bilinear", (9, 3), True, (0.0, 0.0))),
    ((1, 2, 4, 4), ResizeAttrs("bilinear", (1, 1), True, (0.0, 0.0))),
    ((1, 1, 5, 5), ResizeAttrs("bilinear", (7, 7), False, (1 / 1.5, 1 / 1.5))),
    ((0, 1, 2, 2), ResizeAttrs("nearest", (4, 4), False, (0.0, 0.0))),
)


def _samples() -> list[Sample]:
    return [Sample((Arg(s, layout=lay),), a) for s, a in _CASES for lay in ("contiguous", "channels_last")]


def _grad_samples() -> list[Sample]:
    return [
        Sample((Arg((*s[:2], *a.size), layout=lay),), ResizeGradAttrs(a, s[2:]))  # type: ignore[arg-type]
        for s, a in _CASES
        for lay in ("contiguous", "channels_last")
    ]


def _errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    text = "resize: give either size or scale_factor, not both and not neither"
    return [ErrorSample(lambda: resize(zeros(1, 1, 2, 2)), ArgumentError, text)]


RESIZE = Op(
    "resize2d", _infer, _reference, lambda node, g: call(RESIZE_GRAD, (g,), ResizeGradAttrs(node.attrs, node.specs[0].shape[2:])), _samples,
    _errors, saves=(),
)  # fmt: skip
RESIZE_GRAD = Op(
    "resize2d_grad",
    lambda a, g: g.like(shape=(*g.shape[:2], *a.size)),
    _grad_reference,
    lambda node, v: call(RESIZE, (v,), node.attrs.resize),
    _grad_samples,
    terms=lambda a, g: max(g.shape[2] * g.shape[3] // max(a.size[0] * a.size[1], 1), 4),
    saves=(),
)


def resize(x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """(N, C, H, W) at another height and width.

    mode: "nearest" (floor of the scaled coordinate) or "bilinear" (pixel centres at half integers, or with
    align_corners the corner pixels' centres kept in place). A scale_factor also scales the coordinates, exactly as
    given (ONNX's rule; PyTorch takes the ratio of the sizes instead along an axis that comes out as long, or for
    nearest twice as long, as before).
    """
    need_tensor("resize", x=x)
    if (size is None) == (scale_factor is None):
        raise ArgumentError("resize: give either size or scale_factor, not both and not neither")
    if mode not in ("nearest", "bilinear"):
        raise ArgumentError(f"resize: mode {mode!r} must be 'nearest' or 'bilinear'")
    scale = (0.0, 0.0)
    if size is None:
        factors = (scale_factor, scale_factor) if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
        size = tuple(int(np.floor(s * f)) for s, f in zip(x.shape[2:], factors, strict=True))
        scale = tuple(1.0 / f for f in factors)
    two = (size, size) if isinstance(size, int) else tuple(int(s) for s in size)
    if len(two) != 2 or min(two) < 1:
        raise ArgumentError(f"resize: size {two} must be one or two positive integers")
    return call(RESIZE, (x,), ResizeAttrs(mode, two, bool(align_corners), scale))  # type: ignore[arg-type]


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """(N, C * r^2, H, W) to (N, C, H * r, W * r) (Shi et al., 2016)."""
    if x.ndim != 4 or factor < 1 or x.shape[1] % factor**2:
        raise ShapeError(f"pixel_shuffle: input {x.shape} must be (N, C, H, W) with C a multiple of {factor}^2")
    n, c, h, w = x.shape
    r = factor
    y = permute(reshape(x, (n, c // r**2, r, r, h, w)), (0, 1, 4, 2, 5, 3))
    return reshape(y, (n, c // r**2, h * r, w * r))


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """The inverse of `pixel_shuffle`."""
    if x.ndim != 4 or factor < 1 or x.shape[2] % factor or x.shape[3] % factor:
        raise ShapeError(f"pixel_unshuffle: input {x.shape} must be (N, C, H, W) with H and W multiples of {factor}")
    n, c, h, w = x.shape
    r = factor
    y = permute(reshape(x, (n, c, h // r, r, w // r, r)), (0, 1, 3, 5, 2, 4))
    return reshape(y, (n, c * r * r, h // r, w // r))
