"""Exponential moving average of weights (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright.errors import ArgumentError, CheckpointError
from tilewright.ops._call import call_inplace
from tilewright.ops.norm import RUNNING, AverageAttrs
from tilewright.tensor import Tensor, tensor


class EMA:
    """average = decay * average + (1 - decay) * weight after each `update()`; `applied()` swaps the averages in."""

    def __init__(self, model: Any, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ArgumentError(f"EMA: decay {decay} must lie in 0 up to but without 1")
        self.decay = decay
        self.params: list[Tensor] = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.params]

    def update(self) -> None:
        for average, p in zip(self.averages, self.params, strict=True):
            call_inplace(RUNNING, (average, p.detach()), AverageAttrs(1.0 - self.decay, 1.0))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model's weights are the averages inside the block."""
        held = [np.array(p.numpy()) for p in self.params]
        try:
            for p, average in zip(self.params, self.averages, strict=True):
                p.copy_(average)
            yield
        finally:
            for p, value in zip(self.params, held, strict=True):
                p.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [np.array(a.numpy()) for a in self.averages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave. Raises CheckpointError, and changes nothing, when the shapes differ."""
        if [tuple(v.shape) for v in state["averages"]] != [a.shape for a in self.averages]:
            raise CheckpointError("EMA.load_state_dict: the averages are of another model; nothing was changed")
        for average, value in zip(self.averages, state["averages"], strict=True):
            average.copy_(tensor(value))
