"""Convolution in two dimensions, its two gradients, and what is built of them: 1-D and transposed convolution.

Symbols, as in Dumoulin and Visin, "A guide to convolution arithmetic for deep learning" (2016): input (N, C, H, W),
weight (F, C/groups, kh, kw), output (N, F, OH, OW) with

    OH = floor((H + top + bottom - dilation_h * (kh - 1) - 1) / stride_h) + 1

A negative padding crops. Activations and weights are channels-last in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import mode
from tilewright.devices.api import CHANNELS_LAST, Spec, spec
from tilewright.dtypes import promote
from tilewright.errors import ArgumentError, DTypeError, ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample, wide
from tilewright.tensor import Tensor

SHARED = ("out_size", "pair", "same_padding")


class Conv2dAttrs(NamedTuple):
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: str | None = None  # applied after bias and residual
    alpha: float = 0.0
    beta: float = 0.0

    @property
    def plain(self) -> Conv2dAttrs:
        return self if self.activation is None else self._replace(activation=None, alpha=0.0, beta=0.0)


class InputGradAttrs(NamedTuple):
    conv: Conv2dAttrs
    size: tuple[int, int]  # H, W of the input


class WeightGradAttrs(NamedTuple):
    conv: Conv2dAttrs
    kernel: tuple[int, int]  # kh, kw
    bias: bool  # also return the gradient of the bias


MAX_EXTENT = 2**31 - 1


def out_size(size: int, kernel: int, stride: int, before: int, after: int, dilation: int) -> int:
    """Output size along one axis (the formula above); 0 or less when the window does not fit."""
    return (size + before + after - dilation * (kernel - 1) - 1) // stride + 1


def _check(name: str, a: Conv2dAttrs, x: Sequence[int], w: Sequence[int]) -> tuple[int, int]:
    """Output height and width of a convolution with input shape `x` and weight shape `w`."""
    if len(x) != 4 or len(w) != 4:
        raise ShapeError(f"{name}: input {tuple(x)} and weight {tuple(w)} must both have 4 axes (N,C,H,W) and (F,C/groups,kh,kw)")
    if w[1] * a.groups != x[1] or w[0] % a.groups:
        raise ShapeError(
            f"{name}: input {tuple(x)} has {x[1]} channels and weight {tuple(w)} with groups={a.groups} takes {w[1] * a.groups}, "
            f"giving {w[0]}; the channels must match and groups must divide both"
        )
    if w[2] < 1 or w[3] < 1:
        raise ShapeError(f"{name}: weight {tuple(w)} has an empty window; kh and kw must be at least 1")
    top, left, bottom, right = a.padding
    oh = out_size(x[2], w[2], a.stride[0], top, bottom, a.dilation[0])
    ow = out_size(x[3], w[3], a.stride[1], left, right, a.dilation[1])
    if oh < 1 or ow < 1:
        raise ShapeError(
            f"{name}: the window of {w[2]}x{w[3]} with dilation {a.dilation} spans {a.dilation[0] * (w[2] - 1) + 1}x"
            f"{a.dilation[1] * (w[3] - 1) + 1} and the padded input is {x[2] + top + bottom}x{x[3] + left + right}; "
            "pad more or use a smaller window"
        )
    return oh, ow


def _dtype(name: str, *specs: Spec | None) -> Any:
    present = [s for s in specs if s is not None]
    first = present[0].dtype
    if any(s.dtype is not first for s in present) or not first.is_floating:
        raise DTypeError(f"{name}: operands are {', '.join(s.dtype.name for s in present)}; all must be one floating dtype, convert with .to(dtype=)")
    return first


# -- forward -----------------------------------------------------------------------------------------------------------


def _infer(a: Conv2dAttrs, x: Spec, w: Spec, b: Spec | None, residual: Spec | None) -> Spec:
    dtype = _dtype("conv2d", x, w, b, residual)
    oh, ow = _check("conv2d", a, x.shape, w.shape)
    if b is not None and b.shape != (w.shape[0],):
        raise ShapeError(f"conv2d: bias {b.shape} must be ({w.shape[0]},), one value per output channel of weight {w.shape}")
    shape = (x.shape[0], w.shape[0], oh, ow)
    if residual is not None and residual.shape != shape:
        raise ShapeError(f"conv2d: residual {residual.shape} must have the output's shape {shape}")
    return spec(shape, dtype, CHANNELS_LAST)


def _pad(x: np.ndarray, padding: Sequence[int]) -> np.ndarray:
    """Zero padding of the two last axes; negative padding crops."""
    t, le, b, r = padding
    x = np.pad(x, [(0, 0), (0, 0), (max(t, 0), max(b, 0)), (max(le, 0), max(r, 0))])
    return x[:, :, max(-t, 0) : x.shape[2] - max(-b, 0), max(-le, 0) : x.shape[3] - max(-r, 0)]


def _taps(a: Conv2dAttrs, kh: int, kw: int, oh: int, ow: int) -> Any:
    """For each tap of the window: its place, and the slices of the padded input that it meets."""
    for i in range(kh):
        for j in range(kw):
            top, left = i * a.dilation[0], j * a.dilation[1]
            yield (
                i,
                j,
                slice(top, top + (oh - 1) * a.stride[0] + 1, a.stride[0]),
                slice(left, left + (ow - 1) * a.stride[1] + 1, a.stride[1]),
            )


def _groups(x: np.ndarray, groups: int) -> np.ndarray:
    """(N, G*C, H, W) as (N, G, C, H, W)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _reference(a: Conv2dAttrs, x: Any, w: Any, b: Any = None, residual: Any = None) -> np.ndarray:
    f, _, kh, kw = w.shape
    oh, ow = _check("conv2d", a, x.shape, w.shape)
    padded = _groups(_pad(x, a.padding), a.groups)
    weight = w.reshape(a.groups, f // a.groups, *w.shape[1:])
    y = np.zeros((x.shape[0], a.groups, f // a.groups, oh, ow), x.dtype)
    for i, j, rows, cols in _taps(a, kh, kw, oh, ow):
        y += np.einsum("ngchw,gfc->ngfhw", padded[..., rows, cols], weight[..., i, j])
    y = y.reshape(x.shape[0], f, oh, ow)
    if b is not None:
        y = y + b[:, None, None]
    if residual is not None:
        y = y + residual
    return _activation.reference(a.activation, a.alpha, a.beta, y)


def _met(a: Conv2dAttrs, axis: int, taps: int, at: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The taps through which output `at` meets the input (not the padding) along an axis, and where they meet it."""
    places = at * a.stride[axis] - a.padding[axis] + np.arange(taps) * a.dilation[axis]
    inside = np.flatnonzero((places >= 0) & (places < size))
    return inside, places[inside]


def _reference_at(a: Conv2dAttrs, inputs: Sequence[Any], output: int, positions: np.ndarray) -> np.ndarray:
    x, w, b, residual = inputs
    f, cg, kh, kw = w.shape
    y = np.empty(len(positions))
    for p, (n, k, i, j) in enumerate(positions.tolist()):
        (u, rows), (v, cols) = _met(a, 0, kh, i, x.shape[2]), _met(a, 1, kw, j, x.shape[3])
        c = k // (f // a.groups) * cg
        y[p] = np.sum(wide(x[n, c : c + cg][:, rows[:, None], cols]) * wide(w[k][:, u[:, None], v]))
    if b is not None:
        y += wide(b)[positions[:, 1]]
    if residual is not None:
        y += wide(residual[tuple(positions.T)])
    return _activation.reference(a.activation, a.alpha, a.beta, y)


def _vjp(node: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, _, _ = node.inputs
    a = node.attrs
    if a.activation is not None:
        from tilewright.ops.pointwise import activation_grad

        g = activation_grad(a.activation, g, node.outputs[0])
    g = g.to(layout=CHANNELS_LAST)
    a = a.plain
    need_x, need_w, need_b, need_r = node.needs
    dx = call(INPUT_GRAD, (g, w), InputGradAttrs(a, node.specs[0].shape[2:])) if need_x else None
    dw = db = None
    if need_w:
        dw = call(WEIGHT_GRAD, (x, g), WeightGradAttrs(a, node.specs[1].shape[2:], need_b))
        dw, db = dw if need_b else (dw, None)
    elif need_b:
        from tilewright.ops.reduce import sum

        db = sum(g, (0, 2, 3))
    return dx, dw, db, g if need_r else None


# -- gradient of the input ---------------------------------------------------------------------------------------------


def _input_grad_infer(a: InputGradAttrs, g: Spec, w: Spec) -> Spec:
    dtype = _dtype("conv2d_input_grad", g, w)
    shape = (g.shape[0], w.shape[1] * a.conv.groups, *a.size)
    oh, ow = _check("conv2d_input_grad", a.conv, shape, w.shape)
    if g.shape[1:] != (w.shape[0], oh, ow):
        raise ShapeError(f"conv2d_input_grad: the gradient {g.shape} must be (N,{w.shape[0]},{oh},{ow}) for an input of {shape} and weight {w.shape}")
    return spec(shape, dtype, CHANNELS_LAST)


def _input_grad_reference(a: InputGradAttrs, g: Any, w: Any) -> np.ndarray:
    c = a.conv
    f, _, kh, kw = w.shape
    n, _, oh, ow = g.shape
    t, le, b, r = c.padding
    weight = w.reshape(c.groups, f // c.groups, *w.shape[1:])
    padded = np.zeros((n, c.groups, w.shape[1], a.size[0] + t + b, a.size[1] + le + r), g.dtype)
    for i, j, rows, cols in _taps(c, kh, kw, oh, ow):
        padded[..., rows, cols] += np.einsum("ngfhw,gfc->ngchw", _groups(g, c.groups), weight[..., i, j])
    padded = padded.reshape(n, c.groups * w.shape[1], *padded.shape[3:])
    return _pad(padded, (-t, -le, -b, -r))


def _meeting(c: Conv2dAttrs, axis: int, taps: int, at: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The taps through which input `at` meets an output along an axis, and which outputs those are."""
    outputs, rest = np.divmod(at + c.padding[axis] - np.arange(taps) * c.dilation[axis], c.stride[axis])
    inside = np.flatnonzero((rest == 0) & (outputs >= 0) & (outputs < size))
    return inside, outputs[inside]


def _input_grad_at(a: InputGradAttrs, inputs: Sequence[Any], output: int, positions: np.ndarray) -> np.ndarray:
    g, w = inputs
    c = a.conv
    f, cg, kh, kw = w.shape
    fg = f // c.groups
    dx = np.empty(len(positions))
    for p, (n, k, i, j) in enumerate(positions.tolist()):
        (u, rows), (v, cols) = _meeting(c, 0, kh, i, g.shape[2]), _meeting(c, 1, kw, j, g.shape[3])
        group, channel = divmod(k, cg)
        part = slice(group * fg, (group + 1) * fg)
        dx[p] = np.sum(wide(g[n, part][:, rows[:, None], cols]) * wide(w[part, channel][:, u[:, None], v]))
    return dx


def _input_grad_vjp(node: Any, v: Tensor) -> tuple[Tensor | None, ...]:
    g, w = node.inputs
    c = node.attrs.conv
    v = v.to(layout=CHANNELS_LAST)
    dg = call(CONV2D, (v, w, None, None), c) if node.needs[0] else None
    dw = call(WEIGHT_GRAD, (v, g), WeightGradAttrs(c, node.specs[1].shape[2:], False)) if node.needs[1] else None
    return dg, dw


# -- gradient of the weight --------------------------------------------------------------------------------------------


def _weight_grad_infer(a: WeightGradAttrs, x: Spec, g: Spec) -> Any:
    dtype = _dtype("conv2d_weight_grad", x, g)
    if x.ndim != 4 or g.ndim != 4 or x.shape[1] % a.conv.groups or g.shape[1] % a.conv.groups:
        raise ShapeError(f"conv2d_weight_grad: input {x.shape} and gradient {g.shape} must have 4 axes that groups={a.conv.groups} divides")
    shape = (g.shape[1], x.shape[1] // a.conv.groups, *a.kernel)
    oh, ow = _check("conv2d_weight_grad", a.conv, x.shape, shape)
    if (x.shape[0], oh, ow) != (g.shape[0], *g.shape[2:]):
        raise ShapeError(f"conv2d_weight_grad: the gradient {g.shape} must be ({x.shape[0]},F,{oh},{ow}) for an input of {x.shape}")
    dw = spec(shape, dtype, CHANNELS_LAST)
    return (dw, spec((shape[0],), dtype)) if a.bias else dw


def _weight_grad_reference(a: WeightGradAttrs, x: Any, g: Any) -> Any:
    c = a.conv
    f, oh, ow = g.shape[1:]
    padded = _groups(_pad(x, c.padding), c.groups)
    dw = np.zeros((c.groups, f // c.groups, x.shape[1] // c.groups, *a.kernel), x.dtype)
    for i, j, rows, cols in _taps(c, *a.kernel, oh, ow):
        dw[..., i, j] = np.einsum("ngchw,ngfhw->gfc", padded[..., rows, cols], _groups(g, c.groups))
    dw = dw.reshape(f, x.shape[1] // c.groups, *a.kernel)
    return (dw, g.sum((0, 2, 3))) if a.bias else dw


def _span(c: Conv2dAttrs, axis: int, tap: int, size: int, outputs: int) -> tuple[slice, slice]:
    """Along an axis: the inputs that a tap meets outside the padding, and the outputs that it meets them for."""
    start = tap * c.dilation[axis] - c.padding[axis]
    stride = c.stride[axis]
    low = max(0, -(start // stride))
    high = max(min(outputs, (size - 1 - start) // stride + 1), low)
    first = start + low * stride
    return slice(first, first + (high - low - 1) * stride + 1 if high > low else first, stride), slice(low, high)


def _weight_grad_at(a: WeightGradAttrs, inputs: Sequence[Any], output: int, positions: np.ndarray) -> np.ndarray:
    x, g = inputs
    if output == 1:
        return np.array([wide(g[:, k]).sum() for (k,) in positions.tolist()], np.float64)
    c = a.conv
    cg, fg = x.shape[1] // c.groups, g.shape[1] // c.groups
    dw = np.empty(len(positions))
    last, plane = -1, np.empty(0)
    for p, (k, channel, i, j) in enumerate(positions.tolist()):
        if k != last:  # a strided read of all of g: neighbours in `positions` share it
            last, plane = k, wide(np.ascontiguousarray(g[:, k]))
        (rows, up), (cols, across) = (_span(c, axis, t, x.shape[2 + axis], g.shape[2 + axis]) for axis, t in ((0, i), (1, j)))
        dw[p] = np.sum(wide(x[:, k // fg * cg + channel, rows, cols]) * plane[:, up, across])
    return dw


def _weight_grad_vjp(node: Any, v: Tensor | None, vb: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, g = node.inputs
    c = node.attrs.conv
    dx = dg = None
    if v is not None:
        v = v.to(layout=CHANNELS_LAST)
        if node.needs[0]:
            dx = call(INPUT_GRAD, (g, v), InputGradAttrs(c, node.specs[0].shape[2:]))
        if node.needs[1]:
            dg = call(CONV2D, (x, v, vb, None), c)
    elif vb is not None and node.needs[1]:
        from tilewright.ops.movement import expand, reshape

        dg = expand(reshape(vb, (1, vb.shape[0], 1, 1)), node.specs[1].shape).to(layout=CHANNELS_LAST)
    return dx, dg


# -- samples -----------------------------------------------------------------------------------------------------------

_CASES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], Conv2dAttrs], ...] = (
    ("3x3 same", (2, 3, 7, 6), (4, 3, 3, 3), Conv2dAttrs(padding=(1, 1, 1, 1))),
    ("pointwise", (2, 8, 5, 5), (16, 8, 1, 1), Conv2dAttrs()),
    ("pointwise strided", (2, 8, 6, 7), (4, 8, 1, 1), Conv2dAttrs(stride=(2, 2))),
    ("pointwise cropped", (1, 4, 6, 6), (8, 4, 1, 1), Conv2dAttrs((2, 2), (0, 0, -1, -1))),
    ("stem 7x7 stride 2", (1, 3, 17, 15), (8, 3, 7, 7), Conv2dAttrs((2, 2), (3, 3, 2, 2))),
    ("8x8 stride 4", (1, 4, 20, 20), (16, 4, 8, 8), Conv2dAttrs((4, 4))),
    ("last columns outside every window", (1, 9, 32, 32), (3, 9, 5, 5), Conv2dAttrs((3, 3), (1, 1, 1, 1))),
    ("asymmetric everything", (2, 4, 9, 11), (6, 4, 2, 3), Conv2dAttrs((2, 1), (0, 2, 1, 3), (1, 2))),
    ("padding wider than the window", (2, 2, 5, 4), (3, 2, 3, 3), Conv2dAttrs(padding=(4, 4, 4, 4))),
    ("dilated", (1, 3, 9, 9), (4, 3, 3, 3), Conv2dAttrs(padding=(2, 2, 2, 2), dilation=(2, 2))),
    ("grouped", (2, 6, 6, 5), (8, 3, 3, 3), Conv2dAttrs(padding=(1, 1, 1, 1), groups=2)),
    ("depthwise", (2, 8, 6, 6), (8, 1, 3, 3), Conv2dAttrs(padding=(1, 1, 1, 1), groups=8)),
    (
        "depthwise 24 channels stride 2",
        (1, 24, 6, 6),
        (24, 1, 3, 3),
        Conv2dAttrs((2, 2), (1, 1, 1, 1), groups=24),
    ),
    (
        "depthwise dilated",
        (1, 8, 9, 9),
        (8, 1, 3, 3),
        Conv2dAttrs(padding=(2, 2, 2, 2), dilation=(2, 2), groups=8),
    ),
    ("depthwise 5x5 multiplier 3", (1, 4, 8, 8), (12, 1, 5, 5), Conv2dAttrs((2, 2), (2, 2, 2, 2), groups=4)),
    ("one element", (1, 1, 1, 1), (1, 1, 1, 1), Conv2dAttrs()),
    ("one row (1-D)", (2, 3, 1, 9), (4, 3, 1, 3), Conv2dAttrs(padding=(0, 1, 0, 1))),
    ("empty batch", (0, 3, 8, 8), (4, 3, 3, 3), Conv2dAttrs()),
    ("no input channels", (1, 0, 4, 4), (3, 0, 2, 2), Conv2dAttrs()),
    ("no output channels", (1, 3, 4, 4), (0, 3, 2, 2), Conv2dAttrs()),
)


def _cl(shape: tuple[int, ...], dtype: str = "float32") -> Arg:
    return Arg(shape, dtype, CHANNELS_LAST)


def _samples() -> list[Sample]:
    out = []
    for note, x, w, a in _CASES:
        out.append(Sample((_cl(x), _cl(w), None, None), a, note=note))
        out.append(Sample((_cl(x), _cl(w), Arg((w[0],)), None), a, note=note + ", bias"))
    x, w, a = (2, 4, 6, 6), (8, 4, 3, 3), Conv2dAttrs(padding=(1, 1, 1, 1))
    for name, (alpha, beta) in _activation.DEFAULTS.items():
        fused = a._replace(activation=name, alpha=alpha, beta=beta)
        smooth = name in ("tanh", "sigmoid")
        out.append(Sample((_cl(x), _cl(w), Arg((8,)), None), fused, grad=smooth, note=f"fused {name}"))
        out.append(
            Sample(
                (_cl(x), _cl(w), Arg((8,)), _cl((2, 8, 6, 6))),
                fused,
                grad=smooth,
                note=f"residual, fused {name}",
            )
        )
    out.append(Sample((_cl(x), _cl(w), None, _cl((2, 8, 6, 6))), a, note="residual"))
    dw = Conv2dAttrs(padding=(1, 1, 1, 1), groups=8, activation="relu6", beta=6.0)
    out.append(
        Sample(
            (_cl((2, 8, 6, 6)), _cl((8, 1, 3, 3)), Arg((8,)), None),
            dw,
            grad=False,
            note="depthwise, fused relu6",
        )
    )
    for dtype in ("float64", "float16", "bfloat16"):
        out.append(Sample((_cl(x, dtype), _cl(w, dtype), Arg((8,), dtype), None), a, grad=False, note=dtype))
    return out


def _gradient_samples(weight: bool) -> list[Sample]:
    out = []
    for note, x, w, a in _CASES:
        oh, ow = _check("sample", a, x, w)
        g = _cl((x[0], w[0], oh, ow))
        if weight:
            out.append(Sample((_cl(x), g), WeightGradAttrs(a, w[2:], False), note=note))  # type: ignore[arg-type]
            out.append(Sample((_cl(x), g), WeightGradAttrs(a, w[2:], True), note=note + ", bias"))  # type: ignore[arg-type]
        else:
            out.append(Sample((g, _cl(w)), InputGradAttrs(a, x[2:]), note=note))  # type: ignore[arg-type]
    return out


def _errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    return [
        ErrorSample(
            lambda: conv2d(zeros(1, 3, 8, 8), zeros(4, 2, 3, 3)),
            ShapeError,
            "conv2d: input (1, 3, 8, 8) has 3 channels and weight (4, 2, 3, 3) with groups=1 takes 2, giving 4; "
            "the channels must match and groups must divide both",
        ),
        ErrorSample(
            lambda: conv2d(zeros(1, 3, 4, 4), zeros(4, 3, 5, 5)),
            ShapeError,
            "conv2d: the window of 5x5 with dilation (1, 1) spans 5x5 and the padded input is 4x4; pad more or use a smaller window",
        ),
        ErrorSample(
            lambda: conv2d(zeros(1, 3, 4, 4), zeros(4, 3, 3, 3), stride=0),
            ArgumentError,
            "conv2d: stride 0 must be one or two integers from 1 to 2147483647",
        ),
        ErrorSample(
            lambda: conv1d(zeros(1, 1, 9), zeros(1, 1, 9), dilation=2**31, padding="same"),
            ArgumentError,
            "conv1d: dilation 2147483648 must be one or two integers from 1 to 2147483647",
        ),
        ErrorSample(
            lambda: conv2d(zeros(1, 3, 8, 8), zeros(4, 3, 3, 3), activation="swoosh"),
            ArgumentError,
            f"conv2d: activation 'swoosh' is not known; use None or one of {', '.join(_activation.DEFAULTS)}",
        ),
        ErrorSample(
            lambda: conv2d(zeros(1, 3, 8, 8), zeros(4, 3, 3, 3), zeros(3)),
            ShapeError,
            "conv2d: bias (3,) must be (4,), one value per output channel of weight (4, 3, 3, 3)",
        ),
    ]


def _flops(a: Conv2dAttrs, x: Spec, w: Spec, b: Spec | None, residual: Spec | None) -> float:
    oh, ow = _check("conv2d", a, x.shape, w.shape)
    return 2.0 * x.shape[0] * oh * ow * w.size


CONV2D = Op(
    "conv2d",
    _infer,
    _reference,
    _vjp,
    _samples,
    _errors,
    _flops,
    terms=lambda a, x, w, b, r: max(w.size // max(w.shape[0], 1), 1),
    reference_at=_reference_at,
    saves=(0, 1),
    saves_outputs=True,
)
INPUT_GRAD = Op(
    "conv2d_input_grad",
    _input_grad_infer,
    _input_grad_reference,
    _input_grad_vjp,
    lambda: _gradient_samples(False),
    flops=lambda a, g, w: 2.0 * g.shape[0] * g.shape[2] * g.shape[3] * w.size,
    terms=lambda a, g, w: max(w.size // max(w.shape[1] * a.conv.groups, 1), 1),
    reference_at=_input_grad_at,
)
WEIGHT_GRAD = Op(
    "conv2d_weight_grad",
    _weight_grad_infer,
    _weight_grad_reference,
    _weight_grad_vjp,
    lambda: _gradient_samples(True),
    flops=lambda a, x, g: 2.0 * g.size * (x.shape[1] // a.conv.groups) * a.kernel[0] * a.kernel[1],
    terms=lambda a, x, g: max(g.shape[0] * g.shape[2] * g.shape[3], 1),
    reference_at=_weight_grad_at,
)


# -- public ------------------------------------------------------------------------------------------------------------


def pair(name: str, what: str, value: Any, low: int = 1) -> tuple[int, int]:
    """One or two integers as two, each from `low` to 2^31-1."""
    two = (value, value) if isinstance(value, (int, np.integer)) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(two) != 2 or any(not isinstance(v, (int, np.integer)) or not low <= v <= MAX_EXTENT for v in two):
        raise ArgumentError(f"{name}: {what} {value} must be one or two integers from {low} to {MAX_EXTENT}")
    return int(two[0]), int(two[1])


def same_padding(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Total padding that makes the output ceil(size / stride) long."""
    return max((-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)


def _padding(name: str, value: Any, x: tuple[int, ...], w: tuple[int, ...], stride: Any, dilation: Any) -> tuple[int, int, int, int]:
    if isinstance(value, str):
        if value == "valid":
            return 0, 0, 0, 0
        if value not in ("same", "same_lower"):
            raise ArgumentError(f"{name}: padding {value!r} must be 'same', 'same_lower', 'valid' or integers")
        total = [same_padding(x[2 + i], w[2 + i], stride[i], dilation[i]) for i in (0, 1)]
        less = [t // 2 for t in total]
        more = [t - s for t, s in zip(total, less, strict=True)]
        before, after = (less, more) if value == "same" else (more, less)
        return before[0], before[1], after[0], after[1]
    if isinstance(value, (int, np.integer)):
        value = (value,) * 4
    sizes = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(sizes) == 2:
        sizes = (sizes[0], sizes[1], sizes[0], sizes[1])
    if len(sizes) != 4 or any(not isinstance(v, (int, np.integer)) or abs(v) > MAX_EXTENT for v in sizes):
        raise ArgumentError(f"{name}: padding {value} must be an integer, (height, width) or (top, left, bottom, right), each within 2147483647")
    return int(sizes[0]), int(sizes[1]), int(sizes[2]), int(sizes[3])


@lru_cache(maxsize=4096)
def _attrs(
    name: str,
    x: Any,
    w: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    activation: Any,
    alpha: Any,
    beta: Any,
) -> Conv2dAttrs:
    if len(x) != 4 or len(w) != 4:
        raise ShapeError(f"{name}: input {x} and weight {w} must both have 4 axes (N,C,H,W) and (F,C/groups,kh,kw)")
    stride, dilation = pair(name, "stride", stride), pair(name, "dilation", dilation)
    if not isinstance(groups, (int, np.integer)) or groups < 1:
        raise ArgumentError(f"{name}: groups {groups} must be a positive integer")
    act = _activation.normalise(name, activation, alpha, beta)
    return Conv2dAttrs(stride, _padding(name, padding, x, w, stride, dilation), dilation, int(groups), *act)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> Tensor:
    """Convolution (cross-correlation, as in every deep-learning library) in two dimensions.

    x: (N, C, H, W); weight: (F, C/groups, kh, kw); bias: (F,) or None; residual: the output's shape or None, added
    before the activation. Returns (N, F, OH, OW), channels-last, of the operands' one floating dtype.

    stride, dilation: one or two integers. padding: an integer, (height, width), (top, left, bottom, right) - negative
    values crop - or "valid", "same" (the odd row goes to the bottom and right) or "same_lower"; with a stride, "same"
    gives ceil(size / stride). activation: a name in `tilewright.ops._activation`; alpha and beta are its parameters.
    NaN goes through the convolution and every fused activation but relu6 and hard_sigmoid, where a kernel may give 0 or 1.
    Where the convolution itself overflows, a kernel may give NaN for relu(-inf), gelu(-inf) and gelu(inf).

    Raises ShapeError, DTypeError or ArgumentError.
    """
    need_tensor("conv2d", x=x, weight=weight)
    attrs = _attrs(
        "conv2d",
        x.spec.shape,
        weight.spec.shape,
        _hashable(stride),
        _hashable(padding),
        _hashable(dilation),
        groups,
        activation,
        alpha,
        beta,
    )
    if x.spec.dtype is not weight.spec.dtype:
        wide = promote(x.spec.dtype, weight.spec.dtype)
        x, weight = x.to(dtype=wide), weight.to(dtype=wide)
    if x.spec.layout != CHANNELS_LAST:
        x = x.to(layout=CHANNELS_LAST)
    if weight.spec.layout != CHANNELS_LAST:
        weight = weight.to(layout=CHANNELS_LAST)
    if residual is not None and residual.spec.layout != CHANNELS_LAST and residual.ndim == 4:
        residual = residual.to(layout=CHANNELS_LAST)
    if (
        attrs.activation is not None
        and attrs.activation not in _activation.FROM_OUTPUT
        and mode.enabled
        and any(t is not None and t.requires_grad for t in (x, weight, bias, residual))
    ):
        from tilewright.ops.pointwise import activate

        return activate(call(CONV2D, (x, weight, bias, residual), attrs.plain), attrs.activation, attrs.alpha, attrs.beta)
    return call(CONV2D, (x, weight, bias, residual), attrs)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> Tensor:
    """Convolution in one dimension: x (N, C, L), weight (F, C/groups, k), bias (F,). Returns (N, F, OL).

    padding: an integer, (before, after), "valid", "same" or "same_lower"; the rest as `conv2d`.
    """
    from tilewright.ops.movement import reshape

    need_tensor("conv1d", x=x, weight=weight)
    if x.ndim != 3 or weight.ndim != 3:
        raise ShapeError(f"conv1d: input {x.shape} and weight {weight.shape} must both have 3 axes (N,C,L) and (F,C/groups,k)")

    def wide(what: str, value: Any, fill: int) -> tuple[int, int]:
        value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        if isinstance(value, (int, np.integer)):
            pair("conv1d", what, value)
            return fill, int(value)
        raise ArgumentError(f"conv1d: {what} {value} must be one integer")

    if not isinstance(padding, str):
        sides = (padding, padding) if isinstance(padding, (int, np.integer)) else tuple(padding)
        if len(sides) == 1:
            sides *= 2
        padding = (0, sides[0], 0, sides[1])
    stride, dilation = wide("stride", stride, 1), wide("dilation", dilation, 1)
    n, c, length = x.shape
    f, cg, k = weight.shape
    attrs = _attrs("conv1d", (n, c, 1, length), (f, cg, 1, k), stride, padding, dilation, groups, activation, alpha, beta)
    y = conv2d(
        reshape(x.channels_last(), (n, c, 1, length)),
        reshape(weight.channels_last(), (f, cg, 1, k)),
        bias,
        attrs.stride,
        attrs.padding,
        attrs.dilation,
        groups,
        activation=activation,
        alpha=alpha,
        beta=beta,
    )
    return reshape(y, (n, f, y.shape[3]))


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    output_size: tuple[int, int] | None = None,
    activation: str | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> Tensor:
    """Transposed convolution: the gradient of `conv2d` with respect to its input, as a layer of its own.

    x: (N, C, H, W); weight: (C, F/groups, kh, kw); bias: (F,). Returns (N, F, OH, OW), channels-last, with
    OH = (H - 1) * stride - top - bottom + dilation * (kh - 1) + 1 + output_padding, or `output_size`.
    Raises ShapeError, DTypeError or ArgumentError.
    """
    name = "conv_transpose2d"
    need_tensor(name, x=x, weight=weight)
    if x.ndim != 4 or weight.ndim != 4:
        raise ShapeError(f"{name}: input {x.shape} and weight {weight.shape} must both have 4 axes (N,C,H,W) and (C,F/groups,kh,kw)")
    if not isinstance(groups, (int, np.integer)) or groups < 1:
        raise ArgumentError(f"{name}: groups {groups} must be a positive integer")
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ShapeError(
            f"{name}: input {x.shape} has {x.shape[1]} channels and weight {weight.shape} takes {weight.shape[0]} in {groups} groups; "
            "the channels must match and groups must divide them"
        )
    stride, dilation, extra = (
        pair(name, "stride", stride),
        pair(name, "dilation", dilation),
        pair(name, "output_padding", output_padding, 0),
    )
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        # The forward convolution's "same" padding maps size*stride to size, so that is the size to return to.
        grown = tuple(s * t for s, t in zip(x.shape[2:], stride, strict=True))
        pads = _padding(name, padding, (*x.shape[:2], *grown), weight.shape, stride, dilation)
        if padding != "valid" and output_size is None:
            output_size = grown  # type: ignore[assignment]
    else:
        pads = _padding(name, padding, x.shape, weight.shape, stride, dilation)
    for axis in (0, 1):
        if extra[axis] >= max(stride[axis], dilation[axis]):
            raise ArgumentError(
                f"{name}: output_padding {extra} must be smaller than stride {stride} or dilation {dilation}; it picks among the sizes "
                "that a strided convolution maps to one"
            )
    size = tuple((x.shape[2 + i] - 1) * stride[i] - pads[i] - pads[2 + i] + dilation[i] * (kernel[i] - 1) + 1 + extra[i] for i in (0, 1))
    if output_size is not None:
        size = tuple(int(s) for s in output_size)
    if min(size) < 1:
        raise ShapeError(f"{name}: padding {pads} leaves an output of {size} for input {x.shape} and weight {weight.shape}; pad less")
    # Where the padding after does not lead back to the input's size, take the one that does; a negative one crops.
    after = []
    for i in (0, 1):
        span = dilation[i] * (kernel[i] - 1) + 1
        fits = out_size(size[i], kernel[i], stride[i], pads[i], pads[2 + i], dilation[i]) == x.shape[2 + i]
        after.append(pads[2 + i] if fits else (x.shape[2 + i] - 1) * stride[i] + span - size[i] - pads[i])
    forward = Conv2dAttrs(stride, (pads[0], pads[1], after[0], after[1]), dilation, int(groups))
    act = _activation.normalise(name, activation, alpha, beta)
    if x.spec.dtype is not weight.spec.dtype:
        wide = promote(x.spec.dtype, weight.spec.dtype)
        x, weight = x.to(dtype=wide), weight.to(dtype=wide)
    y = call(INPUT_GRAD, (x.channels_last(), weight.channels_last()), InputGradAttrs(forward, size))  # type: ignore[arg-type]
    if bias is not None:
        from tilewright.ops.movement import reshape

        if bias.shape != (y.shape[1],):
            raise ShapeError(f"{name}: bias {bias.shape} must be ({y.shape[1]},), one value per output channel")
        y = y + reshape(bias, (1, y.shape[1], 1, 1))
    kind, a, b = act
    if kind is not None:
        from tilewright.ops.pointwise import activate

        y = activate(y, kind, a, b)
    return y


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    groups: int = 1,
    dilation: int = 1,
) -> Tensor:
    """Transposed convolution in one dimension: x (N, C, L), weight (C, F/groups, k). Returns (N, F, OL)."""
    from tilewright.ops.movement import reshape

    if x.ndim != 3 or weight.ndim != 3:
        raise ShapeError(f"conv_transpose1d: input {x.shape} and weight {weight.shape} must both have 3 axes")
    y = conv_transpose2d(
        reshape(x.channels_last(), (x.shape[0], x.shape[1], 1, x.shape[2])),
        reshape(weight.channels_last(), (weight.shape[0], weight.shape[1], 1, weight.shape[2])),
        bias,
        (1, stride),
        (0, padding),
        (0, output_padding),
        groups,
        (1, dilation),
    )
    return reshape(y, (y.shape[0], y.shape[1], y.shape[3]))
