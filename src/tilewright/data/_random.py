"""Random streams for data: one independent Philox stream per (seed, purpose, epoch, index).

Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a stream
is a place in a 256-bit counter, so any sample's numbers are had without drawing those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import index as as_index

import numpy as np

from tilewright.errors import ArgumentError

SHUFFLE, SAMPLE, BATCH, SPLIT = range(4)


def check_count(value: object, what: str, least: int = 0) -> int:
    """`value` as an int in least .. 2^64 - 1, or an ArgumentError that calls it `what`."""
    try:
        number = as_index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, (bool, np.bool_)) or not least <= number < 2**64:
        raise ArgumentError(f"{what} is {value!r}; it must be an integer of at least {least}")
    return number


def philox(seed: int, purpose: int, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """The generator of one stream. Streams lie 2^128 blocks apart, so none can run into another."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([0, 0, index, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class BatchRandom:
    """The random numbers of one batch's transforms.

    Args:
        seed, epoch: integers of at least 0.
        indices: the N samples' places in the dataset; each has a stream of its own.
        batch: the batch's number in the epoch, for draws that concern the batch as a whole.
    """

    def __init__(self, seed: int, epoch: int, indices: Sequence[int] | np.ndarray, batch: int = 0):
        self.seed, self.epoch = check_count(seed, "seed"), check_count(epoch, "epoch")
        self.indices = [int(i) for i in indices]
        self.number = check_count(batch, "batch")

    @cached_property
    def samples(self) -> list[np.random.Generator]:
        """One generator per sample. It goes on from one transform to the next."""
        return [philox(self.seed, SAMPLE, self.epoch, i) for i in self.indices]

    @cached_property
    def batch(self) -> np.random.Generator:
        """One generator for the whole batch."""
        return philox(self.seed, BATCH, self.epoch, self.number)

    def uniform(self, count: int) -> np.ndarray:
        """(N, count) float64 in [0, 1): row i comes from sample i's stream alone."""
        out = np.empty((len(self.indices), count))
        for row, generator in zip(out, self.samples, strict=True):
            generator.random(out=row)
        return out
