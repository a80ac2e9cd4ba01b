"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.ops.optimizer import ADAM, AdamAttrs
from tilewright.optim.optimizer import Optimizer


class Adam(Optimizer):
    """Kingma and Ba, "Adam: a method for stochastic optimization" (2015); weight decay is added to the gradient."""

    states = ("mean", "square")
    decoupled = False

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)

    def hyper(self, group: dict[str, Any], n: int) -> Any:
        b1, b2 = group["betas"]
        values = [group["lr"], b1, b2, group["eps"], group["weight_decay"], 1 - b1**n, 1 - b2**n]
        return ADAM, AdamAttrs(self.decoupled), self.states, values


class AdamW(Adam):
    """Adam with weight decay apart from the moments: Loshchilov and Hutter (2019)."""

    decoupled = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay)
