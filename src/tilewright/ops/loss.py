"""Losses. Each takes reduction="mean" | "sum" | "none"."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import Spec, spec
from tilewright.dtypes import int64
from tilewright.errors import ArgumentError, AutogradError, ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.movement import expand, gather, permute, reshape
from tilewright.ops.pointwise import abs, div, exp, less, log, mul, neg, softplus, where
from tilewright.ops.reduce import mean, sum
from tilewright.ops.softmax import log_softmax, softmax
from tilewright.tensor import Tensor, ones


def _reduce(name: str, loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return mean(loss)
    if reduction == "sum":
        return sum(loss)
    if reduction == "none":
        return loss
    raise ArgumentError(f"{name}: reduction {reduction!r} must be 'mean', 'sum' or 'none'")


def _alike(name: str, x: Tensor, target: Tensor) -> None:
    need_tensor(name, input=x, target=target)
    if x.shape != target.shape:
        raise ShapeError(f"{name}: input {x.shape} and target {target.shape} must have one shape")


# -- cross entropy -----------------------------------------------------------------------------------------------------


class CrossEntropyAttrs(NamedTuple):
    ignore_index: int
    smoothing: float


def _ce_infer(a: CrossEntropyAttrs, logits: Spec, target: Spec, weight: Spec | None) -> Any:
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ShapeError(f"cross_entropy: logits {logits.shape} must be (N, classes) and target {target.shape} ({logits.shape[0]},)")
    if weight is not None and weight.shape != logits.shape[1:]:
        raise ShapeError(f"cross_entropy: weight {weight.shape} must be ({logits.shape[1]},), one per class")
    rows = spec(target.shape, logits.dtype)
    return rows, rows


def _ce_parts(a: CrossEntropyAttrs, logits: Any, target: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Log-probabilities, the wanted weight of each class in each row, and the weight of the row's own class."""
    classes = logits.shape[1]
    shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
    logp = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    w = np.ones(classes, logits.dtype) if weight is None else weight
    kept = target != a.ignore_index
    safe = np.where(kept, target, 0)
    own = np.where(kept, w[safe], 0) if classes else np.zeros(len(target))
    wanted = np.where(kept, a.smoothing / max(classes, 1), 0)[:, None] * w
    wanted[np.arange(len(target)), safe] += (1 - a.smoothing) * own
    return logp, wanted, own


def _ce_reference(a: CrossEntropyAttrs, logits: Any, target: Any, weight: Any = None) -> Any:
    logp, wanted, own = _ce_parts(a, logits, target, weight)
    return -np.where(wanted != 0, wanted * logp, 0).sum(1), own


def _ce_vjp(node: Any, g: Tensor | None, _: Any) -> Any:
    if g is None:
        return None, None, None
    logits, target, weight = node.inputs
    return call(CE_GRAD, (g, logits, target, weight), node.attrs) if node.needs[0] else None, None, None


def _ce_grad_reference(a: CrossEntropyAttrs, g: Any, logits: Any, target: Any, weight: Any = None) -> Any:
    logp, wanted, _ = _ce_parts(a, logits, target, weight)
    return g[:, None] * (np.exp(logp) * wanted.sum(1, keepdims=True) - wanted)


def _ce_grad_vjp(node: Any, v: Tensor) -> Any:
    g, logits, target, weight = node.inputs
    a = node.attrs
    dg = dz = None
    if node.needs[0]:
        one = ones(g.shape, dtype=g.dtype, device=g.device)
        dg = sum(v * call(CE_GRAD, (one, logits, target, weight), a), 1)
    if node.needs[1]:
        own = call(CROSS_ENTROPY, (logits.detach(), target, weight), a)[1]
        whole = sum(weight).item() if weight is not None else float(logits.shape[1])
        kept = (target != a.ignore_index).to(dtype=g.dtype)
        total = own * (1.0 - a.smoothing) + kept * (a.smoothing * whole / logits.shape[1])
        p = softmax(logits, 1)
        pv = p * v
        dz = (pv - p * sum(pv, 1, keepdims=True)) * reshape(g * total, (-1, 1))
    return dg, dz, None, None


def _rows(n: int, c: int, weight: bool) -> tuple[Any, ...]:
    return Arg((n, c)), Arg((n,), "int64", fill="int", low=0, high=max(c, 2)), Arg((c,), fill="positive") if weight else None


def _ce_samples(grad: bool) -> Any:
    def samples() -> list[Sample]:
        out = []
        for n, c in ((4, 5), (1, 2), (0, 3), (3, 10)):
            for a in (CrossEntropyAttrs(-100, 0.0), CrossEntropyAttrs(1, 0.0), CrossEntropyAttrs(-100, 0.1)):
                for weight in (False, True):
                    rows = _rows(n, c, weight)
                    out.append(Sample((Arg((n,)), *rows) if grad else rows, a))
        return out

    return samples


def _ce_errors() -> list[ErrorSample]:
    from tilewright.tensor import tensor, zeros

    return [
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 3])),
            ArgumentError,
            "cross_entropy: target 3 is outside the classes 0 to 2 and is not ignore_index -100",
        ),
        ErrorSample(
            lambda: cross_entropy(zeros(2, 3), tensor([0, 1, 2])),
            ShapeError,
            "cross_entropy: target (3,) must be (2,) class indices or (2, 3) probabilities for logits (2, 3)",
        ),
    ]


CROSS_ENTROPY = Op(
    "cross_entropy",
    _ce_infer,
    _ce_reference,
    _ce_vjp,
    _ce_samples(False),
    _ce_errors,
    terms=lambda a, x, t, w: max(x.shape[1], 1),
)
CE_GRAD = Op(
    "cross_entropy_grad",
    lambda a, g, logits, target, weight: logits,
    _ce_grad_reference,
    _ce_grad_vjp,
    _ce_samples(True),
    terms=lambda a, g, x, t, w: max(x.shape[1], 1),
)


def _counted_vjp(node: Any, g: Tensor) -> Any:
    total = sum(node.inputs[1])
    share = div(g, where(total == 0.0, 1.0, total))
    return expand(share, node.specs[0].shape) if node.needs[0] else None, None


def _counted_reference(attrs: Any, losses: np.ndarray, counts: np.ndarray) -> Any:
    return losses.sum() / (counts.sum() or 1.0)


COUNTED_MEAN = Op(
    "counted_mean",
    lambda attrs, losses, counts: spec((), losses.dtype),
    _counted_reference,
    _counted_vjp,
    lambda: [Sample((Arg((n,)), Arg((n,), fill="positive"))) for n in (1, 5, 300)] + [Sample((Arg((0,)), Arg((0,))))],
    terms=lambda attrs, losses, counts: max(losses.size, 1),
    saves=(1,),
)


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """-log softmax(logits) at the target class.

    logits: (N, C) or (N, C, d1, ...). target: class indices (N, d1, ...) or probabilities of logits' shape. weight:
    (C,) per class. The mean divides by the weights of the targets counted; where every target is ignored the loss is
    0 with zero gradients (PyTorch gives NaN). label_smoothing: Szegedy et al., 2016.
    """
    need_tensor("cross_entropy", logits=logits, target=target)
    if weight is not None and weight.requires_grad:
        raise AutogradError("cross_entropy: the class weights have no gradient; pass weight.detach()")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing {label_smoothing} must lie in 0 to 1")
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"cross_entropy: reduction {reduction!r} must be 'mean', 'sum' or 'none'")
    if logits.ndim < 2:
        raise ShapeError(f"cross_entropy: logits {logits.shape} must be (N, classes, ...); add the batch axis")
    n, c = logits.shape[:2]
    if target.shape == logits.shape and target.dtype.is_floating:
        return _soft(logits, target, weight, label_smoothing, reduction)
    if target.shape != (n, *logits.shape[2:]) or target.dtype.is_floating:
        raise ShapeError(
            f"cross_entropy: target {target.shape} must be {(n, *logits.shape[2:])} class indices or {logits.shape} probabilities "
            f"for logits {logits.shape}"
        )
    if logits.ndim > 2:
        logits = reshape(permute(logits, (0, *range(2, logits.ndim), 1)), (target.size, c))
    rows = reshape(target.to(dtype=int64), (target.size,))
    losses, weights = call(CROSS_ENTROPY, (logits, rows, weight), CrossEntropyAttrs(int(ignore_index), float(label_smoothing)))
    if reduction == "none":
        return reshape(losses, target.shape)
    if reduction == "sum":
        return sum(losses)
    return call(COUNTED_MEAN, (losses, weights.detach()))


def _soft(logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, reduction: str) -> Tensor:
    c = logits.shape[1]
    if smoothing:
        target = target * (1.0 - smoothing) + smoothing / c
    logp = log_softmax(logits, 1)
    if weight is not None:
        logp = logp * reshape(weight, (1, c, *[1] * (logits.ndim - 2)))
    return _reduce("cross_entropy", neg(sum(target * logp, 1)), reduction)


def nll_loss(logp: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Minus the log-probability (N, C) at the target class (N,); weights and ignored targets as `cross_entropy`."""
    need_tensor("nll_loss", logp=logp, target=target)
    if logp.ndim != 2 or target.shape != logp.shape[:1]:
        raise ShapeError(f"nll_loss: log-probabilities {logp.shape} must be (N, classes) and target {target.shape} ({logp.shape[0]},)")
    kept = target != ignore_index
    safe = where(kept, target, 0)
    own = kept.to(dtype=logp.dtype)
    if weight is not None:
        from tilewright.ops.movement import take

        own = own * take(weight, safe, 0)
    losses = neg(reshape(gather(logp, 1, reshape(safe, (-1, 1))), target.shape) * own)
    if reduction != "mean":
        return _reduce("nll_loss", losses, reduction)
    total = sum(own)
    return div(sum(losses), where(total == 0.0, 1.0, total))


# -- others ------------------------------------------------------------------------------------------------------------


def bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, pos_weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """Binary cross entropy of sigmoid(x) with a target in [0, 1], without overflow; the gradient at x = 0 is 1/2 - target."""
    _alike("bce_with_logits", x, target)
    loss = softplus(x) - x * target if pos_weight is None else (1.0 - target) * x + (1.0 + (pos_weight - 1.0) * target) * softplus(neg(x))
    return _reduce("bce_with_logits", loss if weight is None else loss * weight, reduction)


def mse_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """(x - target)^2."""
    _alike("mse_loss", x, target)
    d = x - target
    return _reduce("mse_loss", d * d, reduction)


def l1_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """|x - target|."""
    _alike("l1_loss", x, target)
    return _reduce("l1_loss", abs(x - target), reduction)


def smooth_l1_loss(x: Tensor, target: Tensor, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2 (Girshick, 2015)."""
    _alike("smooth_l1_loss", x, target)
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    d = abs(x - target)
    return _reduce("smooth_l1_loss", where(less(d, float(beta)), d * d * (0.5 / beta), d - 0.5 * beta), reduction)


def huber_loss(x: Tensor, target: Tensor, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """delta times `smooth_l1_loss` with beta = delta (Huber, 1964)."""
    return smooth_l1_loss(x, target, beta=delta, reduction=reduction) * float(delta)


def kl_div(logp: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """target * (log target - logp), 0 where the target is 0; "batchmean" divides the sum by the batch."""
    _alike("kl_div", logp, target)
    if log_target:
        loss = exp(target) * (target - logp)
    else:
        positive = target > 0.0
        loss = mul(target, where(positive, log(where(positive, target, 1.0)), 0.0) - logp)
    if reduction == "batchmean":
        return sum(loss) * (1.0 / max(logp.shape[0], 1))
    return _reduce("kl_div", loss, reduction)
