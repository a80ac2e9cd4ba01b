"""Bounds on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewright.autograd import no_grad
from tilewright.dtypes import float32, float64
from tilewright.errors import ArgumentError
from tilewright.ops.pointwise import clamp
from tilewright.ops.reduce import sum as total
from tilewright.tensor import Tensor


def _square(g: Tensor) -> float:
    g = g.to(dtype=float32) if g.dtype.itemsize < 4 else g
    square = float(total(g * g).item())
    if square == math.inf and g.dtype.itemsize < 8:  # the square alone may be too large
        return _square(g.to(dtype=float64))
    return square


def clip_grad_norm_(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most `max_norm`; returns the norm before.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013). A norm that is not finite leaves
    NaN gradients, as the model has diverged. Raises ArgumentError for a negative max_norm.
    """
    if not max_norm >= 0:
        raise ArgumentError(f"clip_grad_norm_: max_norm {max_norm} must be at least 0")
    params = [params] if isinstance(params, Tensor) else params
    with_grad = [p for p in params if p.grad is not None]
    with no_grad():
        norm = math.sqrt(sum(_square(p.grad) for p in with_grad))  # type: ignore[arg-type]
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:
            for p in with_grad:
                p.grad = p.grad * scale  # type: ignore[operator]
    return norm


def clip_grad_value_(params: Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of every gradient to [-clip_value, clip_value]. Raises ArgumentError for a negative bound."""
    if not clip_value >= 0:
        raise ArgumentError(f"clip_grad_value_: clip_value {clip_value} must be at least 0")
    params = [params] if isinstance(params, Tensor) else params
    with no_grad():
        for p in params:
            if p.grad is not None:
                p.grad = clamp(p.grad, -clip_value, clip_value)
