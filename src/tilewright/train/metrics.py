"""Figures of merit over batches."""

from __future__ import annotations

from typing import Any

import numpy as np


class Mean:
    """A mean over samples, fed batch by batch. Its state is two numbers, so a checkpoint can hold it."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total = total
        self.count = count

    def add(self, value: float, count: int) -> None:
        """A batch's mean `value` over `count` samples."""
        self.total += float(value) * count
        self.count += count

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


def accuracy(logits: Any, labels: Any) -> float:
    """Share of rows of `logits` (N, classes) whose largest value is at `labels` (N,) or at the largest of (N, classes)."""
    scores, truth = np.asarray(logits), np.asarray(labels)
    if truth.ndim == scores.ndim:
        truth = truth.argmax(1)
    return float((scores.argmax(1) == truth).mean()) if len(truth) else float("nan")
