"""Random numbers: where the global stream stands. Every device draws the same numbers from it.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
number i of a draw is a function of the seed, the draw's offset and i alone.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tilewright.errors import ArgumentError


class Generator:
    """A seed and a position. Each draw takes the next counters for itself; safe across threads."""

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
            raise ArgumentError(f"seed {seed!r} must be an integer from 0 to 2^63 - 1")
        with self._lock:
            self._seed, self._offset = int(seed), 0

    def advance(self, count: int) -> np.ndarray:
        """Claim `count` numbers: int64 (seed, first counter)."""
        with self._lock:
            start = self._offset
            self._offset += -(-count // 4)
            return np.array([self._seed, start], np.int64)

    def get_state(self) -> dict[str, Any]:
        with self._lock:
            return {"seed": self._seed, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._seed, self._offset = int(state["seed"]), int(state["offset"])


default = Generator()


def manual_seed(seed: int) -> None:
    """Start the global random stream anew from `seed`."""
    default.seed(seed)


def get_state() -> dict[str, Any]:
    """Where the global stream stands."""
    return default.get_state()


def set_state(state: dict[str, Any]) -> None:
    """Go on from what `get_state` returned."""
    default.set_state(state)
