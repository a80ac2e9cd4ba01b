"""Shared by gradients: undoing a broadcast."""

from __future__ import annotations

from tilewright.devices.api import Spec
from tilewright.tensor import Tensor


def unbroadcast(g: Tensor, to: Spec) -> Tensor:
    """Sum `g` over the axes along which an operand of spec `to` was broadcast, back to its shape."""
    if g.spec.shape == to.shape:
        return g
    from tilewright.ops.movement import reshape
    from tilewright.ops.reduce import sum

    extra = g.ndim - to.ndim
    axes = tuple(range(extra)) + tuple(i + extra for i, s in enumerate(to.shape) if s == 1 and g.shape[i + extra] != 1)
    return reshape(sum(g, axes, keepdims=True), to.shape)
