"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.errors import ArgumentError
from tilewright.ops.optimizer import SGD as UPDATE
from tilewright.ops.optimizer import SgdAttrs
from tilewright.optim.optimizer import Optimizer
from tilewright.tensor import Tensor


class SGD(Optimizer):
    """p -= lr * v with v = momentum * v + g + weight_decay * p; with `nesterov`, p -= lr * (g + momentum * v).

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ) -> None:  # fmt: skip
        if nesterov and momentum <= 0:
            raise ArgumentError(f"SGD: nesterov needs a momentum above 0 and it is {momentum}")
        given = params if isinstance(params, Tensor) else list(params)
        any_momentum = momentum or any(isinstance(g, dict) and g.get("momentum") for g in given)
        self.states = ("velocity",) if any_momentum else ()
        super().__init__(given, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def hyper(self, group: dict[str, Any], n: int) -> Any:
        used = bool(self.states)
        values = [group["lr"], group["momentum"], group["weight_decay"]]
        return UPDATE, SgdAttrs(used, bool(group["nesterov"])), ("velocity",) if used else (None,), values
