"""Dropout layers: active in training only."""

from __future__ import annotations

from tilewright.nn.module import Module
from tilewright.ops import random as ops
from tilewright.tensor import Tensor


class Dropout(Module):
    """`tilewright.dropout`."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout2d(Dropout):
    """`tilewright.dropout2d`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout2d(x, self.p, self.training)
