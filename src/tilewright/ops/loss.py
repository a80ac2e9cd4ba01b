"""Losses. Each takes reduction="mean" | "sum" | "none"; a gradient is scaled by the one that comes in."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import mode
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Spec, spec
from tilewright.dtypes import int64
from tilewright.errors import ArgumentError, AutogradError, ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.movement import reshape
from tilewright.ops.pointwise import abs, exp, greater, less, log, neg, softplus, square, where
from tilewright.ops.reduce import mean, sum
from tilewright.ops.softmax import SOFTMAX_GRAD, log_softmax
from tilewright.tensor import Tensor, ones_like, zeros, zeros_like

_REDUCTIONS = ("mean", "sum", "none")


def _check_reduction(name: str, reduction: str, more: tuple[str, ...] = ()) -> None:
    if reduction not in _REDUCTIONS + more:
        raise ArgumentError(f"{name}: reduction {reduction!r} must be one of {', '.join(_REDUCTIONS + more)}")


def _reduce(name: str, loss: Tensor, reduction: str) -> Tensor:
    _check_reduction(name, reduction)
    return mean(loss) if reduction == "mean" else sum(loss) if reduction == "sum" else loss


def _alike(name: str, x: Tensor, target: Tensor) -> None:
    need_tensor(name, input=x, target=target)
    if x.spec.shape != target.spec.shape:
        raise ShapeError(f"{name}: input {x.shape} and target {target.shape} must have one shape; expand or reshape one")


# -- cross entropy -----------------------------------------------------------------------------------------------------


class CrossEntropyAttrs(NamedTuple):
    ignore_index: int = -100
    smoothing: float = 0.0
    reduction: str = "mean"


def _infer_loss(name: str, a: CrossEntropyAttrs, x: Spec, target: Spec, weight: Spec | None) -> Spec:
    """The loss's spec, after checking its operands against each other."""
    if x.ndim < 2 or not x.dtype.is_floating:
        raise ShapeError(f"{name}: input {x.shape} of {x.dtype.name} must be (N, classes, ...) of a floating dtype")
    rows = (x.shape[0], *x.shape[2:])
    soft = target.dtype.is_floating and name != "nll_loss"
    if target.shape != (x.shape if soft else rows) or (target.dtype is not x.dtype if soft else target.dtype is not int64):
        also = "" if name == "nll_loss" else f" or {x.shape} probabilities"
        raise ShapeError(f"{name}: target {target.shape} of {target.dtype.name} must be {rows} class indices{also} for input {x.shape}")
    if weight is not None and (weight.shape != x.shape[1:2] or weight.dtype is not x.dtype):
        raise ShapeError(f"{name}: weight {weight.shape} of {weight.dtype.name} must be ({x.shape[1]},) of {x.dtype.name}, one per class")
    return spec(rows if a.reduction == "none" else (), x.dtype)


def _rows(x: np.ndarray) -> np.ndarray:
    """(N, classes, ...) as (rows, classes)."""
    return np.moveaxis(x, 1, -1).reshape(prod(x.shape) // x.shape[1] if x.shape[1] else 0, x.shape[1])


def _wanted(a: CrossEntropyAttrs, shape: tuple[int, ...], target: Any, weight: Any) -> tuple[np.ndarray, float]:
    """The weighted distribution (rows, classes) that each row should have, and what the mean divides by (inf for 0)."""
    classes = shape[1]
    w = np.ones(classes) if weight is None else weight
    if target.dtype.kind == "f":
        t = _rows(target)
        return ((1 - a.smoothing) * t + a.smoothing / max(classes, 1)) * w, float(len(t)) or np.inf
    t = target.reshape(-1)
    wanted = np.zeros((len(t), classes))
    total = 0.0
    for row, k in enumerate(t):
        if k != a.ignore_index:
            wanted[row] = a.smoothing / classes * w
            wanted[row, k] += (1 - a.smoothing) * w[k]
            total += float(w[k])
    return wanted, total or np.inf


def _reduced(a: CrossEntropyAttrs, losses: np.ndarray, total: float, shape: tuple[int, ...]) -> Any:
    if a.reduction == "none":
        return losses.reshape(shape[0], *shape[2:])
    return losses.sum() / (total if a.reduction == "mean" else 1)


def _ce_reference(a: CrossEntropyAttrs, x: Any, target: Any, weight: Any = None) -> Any:
    z = _rows(x)
    shifted = z - z.max(1, keepdims=True, initial=-np.inf)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    wanted, total = _wanted(a, x.shape, target, weight)
    losses = -np.where(wanted != 0, wanted * logp, 0).sum(1)
    back = np.moveaxis(p.reshape(x.shape[0], *x.shape[2:], x.shape[1]), -1, 1)
    return _reduced(a, losses, total, x.shape), back


def _ce_vjp(node: Any, g: Tensor | None, gp: Tensor | None) -> Any:
    if not node.needs[0]:
        return None, None, None
    _, target, weight = node.inputs
    p = node.outputs[1]
    dx = None if g is None else call(CE_GRAD, (g.to(layout=CONTIGUOUS), p, target, weight), node.attrs)
    if gp is not None:  # only when differentiating a second time
        through = call(SOFTMAX_GRAD, (gp.to(layout=p.layout), p), 1)
        dx = through if dx is None else dx + through
    return dx, None, None


def _ce_grad_infer(a: CrossEntropyAttrs, g: Spec, p: Spec, target: Spec, weight: Spec | None) -> Spec:
    wanted = _infer_loss("cross_entropy_grad", a, p, target, weight)
    if g is not wanted:
        raise ShapeError(f"cross_entropy_grad: gradient {g} must be {wanted}")
    return p


def _ce_grad_reference(a: CrossEntropyAttrs, g: Any, p: Any, target: Any, weight: Any = None) -> Any:
    wanted, total = _wanted(a, p.shape, target, weight)
    scale = g.reshape(-1, 1) / (total if a.reduction == "mean" else 1)
    most = wanted.sum(1, keepdims=True)
    d = scale * (np.where(most != 0, _rows(p) * most, 0) - wanted)  # an ignored row has no gradient, whatever it holds
    return np.moveaxis(d.reshape(p.shape[0], *p.shape[2:], p.shape[1]), -1, 1)


def _ce_grad_vjp(node: Any, v: Tensor) -> Any:
    """The op is linear in g, and affine in p."""
    g, p, target, weight = node.inputs
    dg = dp = None
    if node.needs[0]:
        dg = sum(v * call(CE_GRAD, (ones_like(g), p, target, weight), node.attrs), 1 if node.attrs.reduction == "none" else None)
    if node.needs[1]:
        v = v.to(layout=node.specs[1].layout)
        nothing = call(CE_GRAD, (g, zeros_like(v), target, weight), node.attrs)
        dp = call(CE_GRAD, (g, v, target, weight), node.attrs) - nothing
    return dg, dp, None, None


def _ce_samples(kind: str) -> Any:
    """kind: "loss", "grad" (with g and p in front of the target) or "nll" (no probabilities as target)."""

    def operands(shape: tuple[int, ...], a: CrossEntropyAttrs, weight: bool, soft: bool, layout: str = "contiguous") -> Sample:
        rows, classes = (shape[0], *shape[2:]), shape[1]
        x = Arg(shape, layout=layout, fill="uniform", low=0.0, high=1.0) if kind == "grad" else Arg(shape, layout=layout)
        target = Arg(shape, fill="uniform", low=0.0, high=0.5) if soft else Arg(rows, "int64", fill="int", low=0, high=max(classes, 2))
        rest = (x, target, Arg((classes,), fill="positive") if weight else None)
        g = Arg(rows if a.reduction == "none" else ())
        return Sample((g, *rest) if kind == "grad" else rest, a)

    def samples() -> list[Sample]:
        smooth = (0.0,) if kind == "nll" else (0.0, 0.1)
        soft = (False,) if kind == "nll" else (False, True)
        out = [
            operands(shape, CrossEntropyAttrs(ignore, s, reduction), w, t)
            for shape in ((4, 5), (3, 2), (2, 3, 4))
            for ignore in (-100, 1)
            for s in smooth
            for reduction in _REDUCTIONS
            for w in (False, True)
            for t in soft
        ]
        out += [operands((2, 3, 2, 4), CrossEntropyAttrs(), True, t, CHANNELS_LAST) for t in soft]
        out += [operands((0, 3), CrossEntropyAttrs(reduction=r), False, t) for r in _REDUCTIONS for t in soft]
        return [*out, operands((33, 130), CrossEntropyAttrs(), False, False)]

    return samples


def _ce_errors() -> list[ErrorSample]:
    from tilewright.tensor import tensor

    return [
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 3])),
            ArgumentError,
            "cross_entropy: target 3 is outside the classes 0 to 2 and is not ignore_index -100",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, -1])),
            ArgumentError,
            "cross_entropy: target -1 is outside the classes 0 to 2 and is not ignore_index -100",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 1, 2])),
            ShapeError,
            "cross_entropy: target (3,) of int64 must be (2,) class indices or (2, 3) probabilities for input (2, 3)",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 1]), zeros(2)),
            ShapeError,
            "cross_entropy: weight (2,) of float32 must be (3,) of float32, one per class",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 1]), reduction="avg"),
            ArgumentError,
            "cross_entropy: reduction 'avg' must be one of mean, sum, none",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 1]), label_smoothing=2),
            ArgumentError,
            "cross_entropy: label_smoothing 2 must lie in 0 to 1",
        ),
    ]


def _nll_reference(a: CrossEntropyAttrs, x: Any, target: Any, weight: Any = None) -> Any:
    wanted, total = _wanted(a, x.shape, target, weight)
    return _reduced(a, -np.where(wanted != 0, wanted * _rows(x), 0).sum(1), total, x.shape)


def _nll_vjp(node: Any, g: Tensor) -> Any:
    if not node.needs[0]:
        return None, None, None
    _, target, weight = node.inputs
    x = node.specs[0]
    nothing = zeros(x.shape, dtype=x.dtype, device=g.device, layout=x.layout)
    return call(CE_GRAD, (g.to(layout=CONTIGUOUS), nothing, target, weight), node.attrs), None, None


def _nll_errors() -> list[ErrorSample]:
    from tilewright.tensor import tensor

    return [
        ErrorSample(
            lambda: nll_loss(zeros(2, 3), tensor([0, 3])),
            ArgumentError,
            "nll_loss: target 3 is outside the classes 0 to 2 and is not ignore_index -100",
        ),
        ErrorSample(
            lambda: nll_loss(zeros(2, 3), zeros(2, 3)),
            ShapeError,
            "nll_loss: target (2, 3) of float32 must be (2,) class indices for input (2, 3)",
        ),
    ]


def _classes(a: CrossEntropyAttrs, x: Spec, *_: Any) -> int:
    return max(x.shape[1], 1) * (1 if a.reduction == "none" else max(x.shape[0], 1))


CROSS_ENTROPY = Op(
    "cross_entropy",
    lambda a, x, target, weight: (_infer_loss("cross_entropy", a, x, target, weight), x),
    _ce_reference,
    _ce_vjp,
    _ce_samples("loss"),
    _ce_errors,
    terms=_classes,
    saves=(1, 2),
    saves_outputs=True,
)
CE_GRAD = Op(
    "cross_entropy_grad",
    _ce_grad_infer,
    _ce_grad_reference,
    _ce_grad_vjp,
    _ce_samples("grad"),
    terms=lambda a, g, p, target, weight: _classes(a, p),
)
NLL = Op(
    "nll_loss",
    lambda a, x, target, weight: _infer_loss("nll_loss", a, x, target, weight),
    _nll_reference,
    _nll_vjp,
    _ce_samples("nll"),
    _nll_errors,
    terms=_classes,
    saves=(1, 2),
)


def _classified(name: str, x: Tensor, target: Tensor, weight: Tensor | None, attrs: CrossEntropyAttrs) -> tuple[Tensor, Tensor | None]:
    """Target and class weights of the types that the ops take, after the checks that only the caller's side can make."""
    need_tensor(name, input=x, target=target)
    _check_reduction(name, attrs.reduction)
    if target.spec.dtype is not int64:
        target = target.to(dtype=x.dtype if target.dtype.is_floating else int64)
    if weight is not None:
        need_tensor(name, weight=weight)
        if weight.requires_grad and mode.enabled:
            raise AutogradError(f"{name}: the class weights have no gradient; pass weight.detach()")
        weight = weight.to(dtype=x.dtype)
    return target, weight


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """-log softmax(logits) at the target class.

    logits: (N, C) or (N, C, d1, ...). target: integer classes (N, d1, ...), of which ignore_index counts for nothing,
    or probabilities of logits' shape. weight: (C,) per class. Returns a 0-d tensor, or (N, d1, ...) unreduced.

    The mean divides by the weights of the targets that count (with probabilities: by the number of rows). Where every
    target is ignored, or there are none, the loss is 0 with zero gradients (PyTorch gives NaN). label_smoothing mixes
    in that share of the uniform distribution (Szegedy et al., 2016).

    Raises ShapeError when operands do not fit, ArgumentError for a target outside the classes, AutogradError for class
    weights that require a gradient.
    """
    attrs = CrossEntropyAttrs(int(ignore_index), float(label_smoothing), reduction)
    target, weight = _classified("cross_entropy", logits, target, weight, attrs)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing {label_smoothing} must lie in 0 to 1")
    if target.requires_grad and mode.enabled:
        return _with_target_gradient(logits, target, weight, attrs)
    return call(CROSS_ENTROPY, (logits, target, weight), attrs)[0]


def _with_target_gradient(logits: Tensor, target: Tensor, weight: Tensor | None, a: CrossEntropyAttrs) -> Tensor:
    """Cross entropy with probabilities that are themselves computed (distillation), from simpler ops."""
    _infer_loss("cross_entropy", a, logits.spec, target.spec, None if weight is None else weight.spec)
    c = logits.shape[1]
    losses = -log_softmax(logits, 1)
    if a.smoothing:
        target = target * (1.0 - a.smoothing) + a.smoothing / c
    if weight is not None:
        target = target * reshape(weight, (1, c, *[1] * (logits.ndim - 2)))
    return _reduce("cross_entropy", sum(target * losses, 1), a.reduction)


def nll_loss(logp: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Minus the log-probability (N, C, d1, ...) at the target class (N, d1, ...).

    Weights, ignored targets, the mean and errors as in `cross_entropy`.
    """
    attrs = CrossEntropyAttrs(int(ignore_index), 0.0, reduction)
    target, weight = _classified("nll_loss", logp, target, weight, attrs)
    return call(NLL, (logp, target, weight), attrs)


# -- others ------------------------------------------------------------------------------------------------------------


def bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, pos_weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """Binary cross entropy of sigmoid(x) with a target in [0, 1], without overflow; the gradient at x = 0 is 1/2 - target.

    weight multiplies each element's loss and pos_weight the part of the target 1; both broadcast. Raises ShapeError.
    """
    _alike("bce_with_logits", x, target)
    _check_reduction("bce_with_logits", reduction)
    positive = target if pos_weight is None else target * pos_weight
    # Each softplus keeps its full relative precision where its logit is large, which x - x * target would not.
    loss = positive * softplus(neg(x)) + (1.0 - target) * softplus(x)
    return _reduce("bce_with_logits", loss if weight is None else loss * weight, reduction)


def mse_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """(x - target)^2. Raises ShapeError unless the shapes are equal."""
    _alike("mse_loss", x, target)
    return _reduce("mse_loss", square(x - target), reduction)


def l1_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """|x - target|, with gradient 0 where they are equal. Raises ShapeError unless the shapes are equal."""
    _alike("l1_loss", x, target)
    return _reduce("l1_loss", abs(x - target), reduction)


def smooth_l1_loss(x: Tensor, target: Tensor, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, with d = x - target (Girshick, 2015). beta 0 is `l1_loss`.

    Raises ShapeError unless the shapes are equal, ArgumentError for a negative beta.
    """
    if not beta >= 0:
        raise ArgumentError(f"smooth_l1_loss: beta {beta} must be 0 or more")
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    _alike("smooth_l1_loss", x, target)
    d = abs(x - target)
    return _reduce("smooth_l1_loss", where(less(d, float(beta)), square(d) * (0.5 / beta), d - 0.5 * beta), reduction)


def huber_loss(x: Tensor, target: Tensor, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), with d = x - target (Huber, 1964).

    Raises ShapeError unless the shapes are equal, ArgumentError unless delta is positive.
    """
    if not delta > 0:
        raise ArgumentError(f"huber_loss: delta {delta} must be positive")
    return smooth_l1_loss(x, target, beta=delta, reduction=reduction) * float(delta)


def kl_div(logp: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """target * (log target - logp), 0 where the target is 0; with log_target, target is given as its logarithm.

    reduction "batchmean" divides the sum by the first axis, which is the divergence's own mean; "mean" divides by the
    number of elements. Raises ShapeError unless the shapes are equal.
    """
    _alike("kl_div", logp, target)
    _check_reduction("kl_div", reduction, ("batchmean",))
    if log_target:
        loss = exp(target) * (target - logp)
    else:
        positive = greater(target, 0.0)
        loss = where(positive, target * (log(where(positive, target, 1.0)) - logp), 0.0)
    if reduction == "batchmean":
        return sum(loss) * (1.0 / max(logp.shape[0], 1))
    return _reduce("kl_div", loss, reduction)
