"""Bounds on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewright.autograd import no_grad
from tilewright.dtypes import float32
from tilewright.ops.pointwise import clamp
from tilewright.ops.reduce import sum as total
from tilewright.tensor import Tensor


def _square(g: Tensor) -> float:
    g = g.to(dtype=float32) if g.dtype.itemsize < 4 else g
    return float(total(g * g).item())


def clip_grad_norm_(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most `max_norm`; returns the norm before.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013). A norm that is not finite leaves
    NaN gradients, as the model has diverged.
    """
    with_grad = [p for p in params if p.grad is not None]
    with no_grad():
        norm = math.sqrt(sum(_square(p.grad) for p in with_grad))  # type: ignore[arg-type]
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:
            for p in with_grad:
                p.grad = p.grad * scale  # type: ignore[operator]
    return norm


def clip_grad_value_(params: Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of every gradient to [-clip_value, clip_value]."""
    with no_grad():
        for p in params:
            if p.grad is not None:
                p.grad = clamp(p.grad, -clip_value, clip_value)
