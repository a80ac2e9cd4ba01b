"""Learning-rate schedules: `step()` after each step or epoch sets every group's `lr` as a multiple of its first one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilewright.errors import ArgumentError


class Schedule:
    """Base class: `factor(t)` is the multiple of the initial rate at step t, counted from 0."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.base = [g["lr"] for g in optimizer.groups]
        self.t = 0
        self._apply()

    def factor(self, t: int) -> float:
        raise NotImplementedError

    def _apply(self) -> None:
        f = self.factor(self.t)
        for group, base in zip(self.optimizer.groups, self.base, strict=True):
            group["lr"] = base * f

    def step(self) -> None:
        self.t += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "base": list(self.base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t, self.base = state["t"], list(state["base"])
        self._apply()


class Step(Schedule):
    """Times gamma every `every` steps."""

    def __init__(self, optimizer: Any, every: int, gamma: float = 0.1) -> None:
        if every < 1:
            raise ArgumentError(f"Step: every {every} must be at least 1")
        self.every, self.gamma = every, gamma
        super().__init__(optimizer)

    def factor(self, t: int) -> float:
        return self.gamma ** (t // self.every)


class MultiStep(Schedule):
    """Times gamma at each of the milestones."""

    def __init__(self, optimizer: Any, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def factor(self, t: int) -> float:
        return self.gamma ** sum(m <= t for m in self.milestones)


class CosineAnnealing(Schedule):
    """From 1 to `floor` over `total` steps along half a cosine (Loshchilov and Hutter, 2017)."""

    def __init__(self, optimizer: Any, total: int, floor: float = 0.0) -> None:
        if not total >= 1:
            raise ArgumentError(f"CosineAnnealing: total {total} must be at least 1")
        self.total, self.floor = total, floor
        super().__init__(optimizer)

    def factor(self, t: int) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(t, self.total) / self.total))


class LinearWarmup(Schedule):
    """From `start` to 1 over `warmup` steps, then as the schedule `then`, which counts from there."""

    def __init__(self, optimizer: Any, warmup: int, then: Schedule | None = None, start: float = 0.0) -> None:
        self.warmup, self.then, self.start = warmup, then, start
        if then is not None:
            for group, base in zip(optimizer.groups, then.base, strict=True):
                group["lr"] = base
        super().__init__(optimizer)

    def factor(self, t: int) -> float:
        if t < self.warmup:
            return self.start + (1 - self.start) * (t + 1) / self.warmup
        return 1.0 if self.then is None else self.then.factor(t - self.warmup)


class OneCycle(Schedule):
    """From max_lr / `div` to `max_lr` over the first `up` share of `total_steps`, then to max_lr / `div` / `final_div` at the last.

    Both ways along a cosine. Smith and Topin, "Super-convergence" (2018). Momentum stays as it is.
    """

    def __init__(
        self, optimizer: Any, max_lr: float, total_steps: int, up: float = 0.3, div: float = 25.0, final_div: float = 1e4
    ) -> None:  # fmt: skip
        if not total_steps >= 1 or not 0 <= up <= 1 or not (div > 0 and final_div > 0):
            raise ArgumentError(
                f"OneCycle: total_steps {total_steps} must be at least 1, up {up} in 0 to 1, and div {div} and final_div {final_div} above 0"
            )
        self.peak, self.last = up * total_steps - 1, total_steps - 1
        self.first, self.final = 1 / div, 1 / div / final_div
        for group in optimizer.groups:
            group["lr"] = max_lr
        super().__init__(optimizer)

    def factor(self, t: int) -> float:
        if t < self.peak:
            return 1 + (self.first - 1) * 0.5 * (1 + math.cos(math.pi * t / self.peak))
        down = max(self.peak, 0.0)
        done = min((t - down) / (self.last - down), 1.0) if self.last > down else 1.0
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
