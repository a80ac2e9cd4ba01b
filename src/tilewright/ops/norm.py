"""Normalisation: batch (Ioffe and Szegedy, 2015), layer (Ba et al., 2016), group (Wu and He, 2018) and instance.

Variances are taken about the mean in a second pass, so a large mean does no harm.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import enable_grad, grad
from tilewright.devices.api import CHANNELS_LAST, Spec, spec
from tilewright.dtypes import bfloat16, float16, float32, uint8
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops._activation import normalise, reference
from tilewright.ops._call import call, call_inplace, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.movement import reshape
from tilewright.ops.pointwise import activate, greater, less, mul, rsqrt
from tilewright.ops.reduce import mean, sum
from tilewright.tensor import Tensor

SHARED = ("pack_mask", "unpack_mask")


FUSED = ("relu", "relu6")


class BatchNormAttrs(NamedTuple):
    eps: float
    activation: str | None  # one of FUSED


def _per_channel(v: np.ndarray, ndim: int) -> np.ndarray:
    return v.reshape(1, -1, *[1] * (ndim - 2))


def _axes(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim))


def _stat_dtype(x: Spec) -> Any:
    return float32 if x.dtype in (float16, bfloat16) else x.dtype


def _check(name: str, x: Spec, *vectors: Spec | None) -> None:
    if x.ndim < 2 or not x.dtype.is_floating:
        raise ShapeError(f"{name}: input {x.shape} of {x.dtype.name} must be (N, C, ...) of a floating dtype")
    for v in vectors:
        if v is not None and v.shape != (x.shape[1],):
            raise ShapeError(f"{name}: weight, bias and statistics must be ({x.shape[1]},) for input {x.shape}, and one is {v.shape}")


def pack_mask(positive: np.ndarray, layout: str) -> np.ndarray:
    """A bit per element in memory order, the first in the lowest bit."""
    lies = np.moveaxis(positive, 1, -1) if layout == CHANNELS_LAST and positive.ndim > 2 else positive
    return np.packbits(np.ascontiguousarray(lies).reshape(-1), bitorder="little")


def unpack_mask(mask: np.ndarray, shape: tuple[int, ...], layout: str) -> np.ndarray:
    flat = np.unpackbits(mask, count=math.prod(shape), bitorder="little").astype(bool)
    if layout == CHANNELS_LAST and len(shape) > 2:
        return np.moveaxis(flat.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
    return flat.reshape(shape)


class MaskedAttrs(NamedTuple):
    eps: float
    activation: str | None  # one of FUSED; training then also returns a bit for each element that it let pass unchanged
    layout: str  # of the input, which decides the order of the mask's bits


def _activated(a: Any, y: np.ndarray) -> np.ndarray:
    return reference(a.activation, 0.0, 6.0, y)


def _passed(a: Any, y: np.ndarray) -> np.ndarray:
    return (y > 0) & (y < 6) if a.activation == "relu6" else y > 0


def _train_infer(a: MaskedAttrs, x: Spec, w: Spec | None, b: Spec | None) -> Any:
    _check("batch_norm", x, w, b)
    stat = spec((x.shape[1],), _stat_dtype(x))
    return (x, stat, stat, spec((-(-x.size // 8),), uint8)) if a.activation else (x, stat, stat)


def _train_reference(a: MaskedAttrs, x: Any, w: Any = None, b: Any = None) -> Any:
    axes = _axes(x.ndim)
    count = x.size // x.shape[1] if x.shape[1] else 0
    m = x.sum(axes) / max(count, 1)
    v = ((x - _per_channel(m, x.ndim)) ** 2).sum(axes) / max(count, 1)
    y = (x - _per_channel(m, x.ndim)) / np.sqrt(_per_channel(v, x.ndim) + a.eps)
    y = y if w is None else y * _per_channel(w, x.ndim)
    y = y if b is None else y + _per_channel(b, x.ndim)
    if a.activation is None:
        return y, m, v
    return _activated(a, y), m, v, pack_mask(_passed(a, y), a.layout)


def _train_vjp(node: Any, g: Tensor | None, *_: Any) -> Any:
    if g is None:
        return None, None, None
    x, w, _b = node.inputs
    outs = node.outputs
    mask = outs[3] if node.attrs.activation else None
    dx, dw, db = call(BATCH_NORM_GRAD, (g.to(layout=x.layout), x, outs[1], outs[2], w, mask), node.attrs)
    need_x, need_w, need_b = node.needs
    return dx if need_x else None, dw if need_w else None, db if need_b else None


def _grad_infer(a: MaskedAttrs, g: Spec, x: Spec, m: Spec, v: Spec, w: Spec | None, mask: Spec | None) -> Any:
    vector = spec((x.shape[1],), x.dtype)
    return x, vector, vector


def _grad_reference(a: MaskedAttrs, g: Any, x: Any, m: Any, v: Any, w: Any = None, mask: Any = None) -> Any:
    nd, axes = x.ndim, _axes(x.ndim)
    count = max(x.size // max(x.shape[1], 1), 1)
    if mask is not None:
        g = np.where(unpack_mask(mask, x.shape, a.layout), g, 0)
    scale = 1 / np.sqrt(_per_channel(v, nd) + a.eps)
    xhat = (x - _per_channel(m, nd)) * scale
    db, dw = g.sum(axes), (g * xhat).sum(axes)
    dx = (g - _per_channel(db, nd) / count - xhat * _per_channel(dw, nd) / count) * scale
    return dx if w is None else dx * _per_channel(w, nd), dw, db


def _grad_vjp(node: Any, vx: Any, vw: Any, vb: Any) -> Any:
    """Second order, through the same formula in public ops; the statistics count as functions of x."""
    g, x, _, _, w, mask = node.inputs
    a = node.attrs
    with enable_grad():
        g1, x1 = g.detach().requires_grad_(), x.detach().requires_grad_()
        w1 = None if w is None else w.detach().requires_grad_()
        nd, axes = x.ndim, _axes(x.ndim)
        side = (1, -1, *[1] * (nd - 2))
        count = 1.0 / max(x.size // max(x.shape[1], 1), 1)
        upper = g1
        if mask is not None:
            from tilewright.tensor import tensor

            keep = tensor(unpack_mask(mask.numpy(), x.shape, a.layout), x.dtype, x.device, layout=x.layout)
            upper = g1 * keep
        d = x1 - sum(x1, axes, keepdims=True) * count
        scale = rsqrt(sum(d * d, axes, keepdims=True) * count + a.eps)
        xhat = d * scale
        db, dw = sum(upper, axes, keepdims=True), sum(upper * xhat, axes, keepdims=True)
        dx = (upper - db * count - xhat * dw * count) * scale
        dx = dx if w1 is None else dx * reshape(w1, side)
        total = sum(dx * vx) if vx is not None else None
        for value, seed in ((dw, vw), (db, vb)):
            if seed is not None:
                term = sum(reshape(value, (-1,)) * seed)
                total = term if total is None else total + term
        leaves = [t for t in (g1, x1, w1) if t is not None]
        found = list(grad(total, leaves, create_graph=False, allow_unused=True))  # type: ignore[arg-type]
    dg, dx_, *rest = found
    needs = node.needs
    return dg if needs[0] else None, dx_ if needs[1] else None, None, None, rest[0] if rest and needs[4] else None, None


_BN_SHAPES = ((4, 3), (2, 3, 5), (2, 3, 4, 5), (3, 16, 4, 4), (2, 32, 3, 3), (1, 2, 2, 2), (2, 16, 7, 7))


def _train_samples() -> list[Sample]:
    out = []
    for s in _BN_SHAPES:
        for lay in ("contiguous", CHANNELS_LAST) if len(s) == 4 else ("contiguous",):
            c = Arg((s[1],), fill="positive")
            for act in (None, *FUSED):
                a = MaskedAttrs(1e-5, act, lay)
                out.append(Sample((Arg(s, layout=lay), c, Arg((s[1],))), a, grad=act is None and math.prod(s) > 8))
            large = Arg((s[1],), fill="uniform", low=5, high=9)  # so that relu6 meets its upper bound
            out.append(Sample((Arg(s, layout=lay), large, Arg((s[1],))), MaskedAttrs(1e-5, "relu6", lay), grad=False))
            out.append(Sample((Arg(s, layout=lay), None, None), MaskedAttrs(1e-3, None, lay), grad=math.prod(s) > 8))
    return [*out, Sample((Arg((0, 3, 2, 2)), Arg((3,)), Arg((3,))), MaskedAttrs(1e-5, None, "contiguous"), grad=False)]


def _grad_samples() -> list[Sample]:
    out = []
    for s in _BN_SHAPES:
        for lay in ("contiguous", CHANNELS_LAST) if len(s) == 4 else ("contiguous",):
            c = (s[1],)
            for act in (None, "relu"):
                mask = Arg((-(-math.prod(s) // 8),), "uint8", fill="int", low=0, high=256) if act else None
                args = (Arg(s, layout=lay), Arg(s, layout=lay), Arg(c), Arg(c, fill="positive"), Arg(c), mask)
                out.append(Sample(args, MaskedAttrs(1e-5, act, lay), grad=False, note="second order is tested whole"))
    return out


def _count(a: Any, x: Spec, *rest: Any) -> int:
    return max(x.size // max(x.shape[1], 1), 1)


BATCH_NORM_TRAIN = Op(
    "batch_norm_train", _train_infer, _train_reference, _train_vjp, _train_samples, terms=_count, saves=(0, 1), saves_outputs=True,
    flops=lambda a, x, w, b: 7.0 * x.size,
)  # fmt: skip
BATCH_NORM_GRAD = Op(
    "batch_norm_grad", _grad_infer, _grad_reference, _grad_vjp, _grad_samples, terms=_count, flops=lambda a, x, *r: 11.0 * x.size
)  # fmt: skip


def _infer_infer(a: BatchNormAttrs, x: Spec, m: Spec, v: Spec, w: Spec | None, b: Spec | None) -> Spec:
    _check("batch_norm", x, m, v, w, b)
    return x


def _infer_reference(a: BatchNormAttrs, x: Any, m: Any, v: Any, w: Any = None, b: Any = None) -> Any:
    nd = x.ndim
    y = (x - _per_channel(m, nd)) / np.sqrt(_per_channel(v, nd) + a.eps)
    y = y if w is None else y * _per_channel(w, nd)
    y = y if b is None else y + _per_channel(b, nd)
    return _activated(a, y)


def _infer_vjp(node: Any, g: Tensor) -> Any:
    x, m, v, w, b = node.inputs
    side = (1, -1, *[1] * (x.ndim - 2))
    axes = _axes(x.ndim)
    scale = rsqrt(v + node.attrs.eps)
    centred = x - reshape(m, side)
    xhat = centred * reshape(scale, side)
    act = node.attrs.activation
    if act:
        y = xhat if w is None else xhat * reshape(w, side)
        y = y if b is None else y + reshape(b, side)
        g = mul(g, greater(y, 0.0).to(dtype=g.dtype))
        g = mul(g, less(y, 6.0).to(dtype=g.dtype)) if act == "relu6" else g
    gx = g if w is None else g * reshape(w, side)
    needs = node.needs
    return (
        gx * reshape(scale, side) if needs[0] else None,
        -sum(gx, axes) * scale if needs[1] else None,
        sum(gx * centred, axes) * (scale * scale * scale) * -0.5 if needs[2] else None,
        sum(g * xhat, axes) if needs[3] else None,
        sum(g, axes) if needs[4] else None,
    )


def _infer_samples() -> list[Sample]:
    out = []
    for s in (*_BN_SHAPES, (0, 3, 2, 2)):
        for lay in ("contiguous", CHANNELS_LAST) if len(s) == 4 else ("contiguous",):
            c = (s[1],)
            full = (Arg(s, layout=lay), Arg(c), Arg(c, fill="positive"), Arg(c), Arg(c))
            out.append(Sample(full, BatchNormAttrs(1e-5, None)))
            out += [Sample(full, BatchNormAttrs(1e-5, act), grad=False) for act in FUSED]
            out.append(Sample((*full[:3], None, None), BatchNormAttrs(1e-3, None)))
    return out


def _errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    return [
        ErrorSample(
            lambda: batch_norm(zeros(2, 3, 4, 4), zeros(4), zeros(4)),
            ShapeError,
            "batch_norm: weight, bias and statistics must be (3,) for input (2, 3, 4, 4), and one is (4,)",
        ),
        ErrorSample(
            lambda: batch_norm(zeros(1, 3, 1, 1), training=True),
            ShapeError,
            "batch_norm: training needs more than one value per channel and input (1, 3, 1, 1) has one; use a larger batch or eval mode",
        ),
    ]


BATCH_NORM = Op(
    "batch_norm_infer", _infer_infer, _infer_reference, _infer_vjp, _infer_samples, _errors, flops=lambda a, x, *r: 2.0 * x.size
)  # fmt: skip


class AverageAttrs(NamedTuple):
    momentum: float
    scale: float


RUNNING = Op(
    "running_average",
    lambda a, running, value: running,
    lambda a, running, value: (1 - a.momentum) * running + a.momentum * a.scale * value,
    None,
    lambda: [
        Sample((Arg((5,)), Arg((5,))), AverageAttrs(0.1, 1.25), grad=False),
        Sample((Arg((0,)), Arg((0,))), AverageAttrs(0.1, 1.0), grad=False),
    ],
    inplace={0: 0},
)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias for each channel of (N, C, ...), then the activation.

    In training, mean and (biased) variance are the batch's, and the running ones, where given, move to them in place
    by `momentum`, the variance unbiased (PyTorch's rule). Otherwise the running ones are used. NaN stays NaN through
    the activation.
    Raises ShapeError, DTypeError, ArgumentError (an activation that is not known).
    """
    need_tensor("batch_norm", x=x)
    fused = activation if activation in FUSED else None
    if activation is not fused:
        normalise("batch_norm", activation)  # before the running statistics move
    if not training:
        if running_mean is None or running_var is None:
            raise ArgumentError("batch_norm: without training, running_mean and running_var must be given")
        y = call(BATCH_NORM, (x, running_mean, running_var, weight, bias), BatchNormAttrs(float(eps), fused))
    else:
        count = x.size // x.shape[1] if x.ndim > 1 and x.shape[1] else 0
        if count == 1:
            raise ShapeError(
                f"batch_norm: training needs more than one value per channel and input {x.shape} has one; use a larger batch or eval mode"
            )
        for running in (running_mean, running_var):
            if running is not None and running.shape != x.shape[1:2]:
                raise ShapeError(f"batch_norm: running statistics {running.shape} must be {x.shape[1:2]} for input {x.shape}")
        outs = call(BATCH_NORM_TRAIN, (x, weight, bias), MaskedAttrs(float(eps), fused, x.spec.layout))
        y = outs[0]
        if running_mean is not None and running_var is not None and count:
            call_inplace(RUNNING, (running_mean, outs[1]), AverageAttrs(float(momentum), 1.0))
            call_inplace(RUNNING, (running_var, outs[2]), AverageAttrs(float(momentum), count / (count - 1)))
    return y if activation is None or activation is fused else activate(y, activation)


# -- over each sample --------------------------------------------------------------------------------------------------


def _rows_reference(eps: float, x: np.ndarray) -> Any:
    d = x - x.mean(1, keepdims=True) if x.size else x
    rstd = 1 / np.sqrt((d**2).mean(1) + eps) if x.size else np.zeros(len(x), x.dtype)
    return d * rstd[:, None], rstd


def _rows_vjp(node: Any, g: Tensor | None, gr: Tensor | None) -> Any:
    y, rstd = node.outputs
    r = reshape(rstd, (-1, 1))
    dx = None
    if g is not None:
        dx = (g - mean(g, 1, keepdims=True) - y * mean(g * y, 1, keepdims=True)) * r
    if gr is not None:  # d rstd / dx = -rstd^2 * y / K
        more = y * (r * r) * reshape(gr, (-1, 1)) * (-1.0 / y.shape[1])
        dx = more if dx is None else dx + more
    return dx


STANDARDIZE = Op(
    "standardize",
    lambda eps, x: (x, spec((x.shape[0],), _stat_dtype(x))),
    _rows_reference,
    _rows_vjp,
    lambda: [Sample((Arg(s),), 1e-5) for s in ((3, 7), (1, 16), (5, 64))] + [Sample((Arg((0, 4)),), 1e-5, grad=False)],
    terms=lambda eps, x: max(x.shape[1], 1),
    saves=(),
    saves_outputs=True,
)


def layer_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axes, whose sizes are `normalized_shape`."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ShapeError(f"layer_norm: input {x.shape} must end in the normalized shape {shape}")
    size = math.prod(shape)
    y = reshape(call(STANDARDIZE, (reshape(x, (x.size // size if size else 0, size)),), float(eps))[0], x.shape)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """As `layer_norm` over each sample's channels in `groups` groups; weight and bias are (C,)."""
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"group_norm: input {x.shape} must be (N, C, ...) with C a multiple of groups={groups}")
    rows = x.shape[0] * groups
    y = reshape(call(STANDARDIZE, (reshape(x, (rows, x.size // rows if rows else 0)),), float(eps))[0], x.shape).to(layout=x.layout)
    side = (1, x.shape[1], *[1] * (x.ndim - 2))
    y = y if weight is None else y * reshape(weight, side)
    return y if bias is None else y + reshape(bias, side)


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """As `layer_norm` over each sample's channel (Ulyanov et al., 2016); weight and bias are (C,)."""
    if x.ndim < 3:
        raise ShapeError(f"instance_norm: input {x.shape} must be (N, C, spatial...)")
    return group_norm(x, x.shape[1], weight, bias, eps)
