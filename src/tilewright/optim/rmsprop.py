"""RMSprop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.ops.optimizer import RMSPROP, RmspropAttrs
from tilewright.optim.optimizer import Optimizer


class RMSprop(Optimizer):
    """Tieleman and Hinton, lecture 6.5 of "Neural networks for machine learning" (2012); eps is outside the root."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0, momentum: float = 0.0
    ) -> None:  # fmt: skip
        self.states = ("square", "velocity") if momentum else ("square",)
        super().__init__(params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)

    def hyper(self, group: dict[str, Any], n: int) -> Any:
        used = len(self.states) > 1
        values = [group[k] for k in ("lr", "alpha", "eps", "weight_decay", "momentum")]
        return RMSPROP, RmspropAttrs(used), self.states if used else ("square", None), values
