"""Batches from a dataset: shuffled under a seed, transformed, fetched ahead on background threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from tilewright.data._random import SHUFFLE, BatchRandom, check_count, philox
from tilewright.data.transforms import Transform
from tilewright.errors import ArgumentError, DataError

Batches = Iterable[Any]


class Dataset(Protocol):
    """Anything with a length and samples by number; `gather(indices)` gives a whole batch at once where it is there."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def _stack(values: list[Any], what: str) -> np.ndarray:
    arrays = [np.asarray(v) for v in values]
    first = arrays[0]
    for i, a in enumerate(arrays):
        if a.shape != first.shape:
            raise DataError(f"{what} of samples in one batch differ in shape: {first.shape} and {a.shape} (number {i}); resize them to one size")
    if first.ndim == 3 and not first.flags.c_contiguous and first.transpose(1, 2, 0).flags.c_contiguous:
        out = np.empty((len(arrays), first.shape[1], first.shape[2], first.shape[0]), first.dtype).transpose(0, 3, 1, 2)
        for i, a in enumerate(arrays):
            out[i] = a
        return out
    return np.stack(arrays)


class Loader:
    """Iterating gives one epoch of batches `(x, y)` (or `x`, for a dataset without labels) as NumPy arrays.

    Args:
        dataset: see `Dataset`. batch_size: samples a batch; the last one may be smaller, or is left out with drop_last.
        shuffle: a new order each epoch, drawn from `seed` and the epoch's number.
        transform: see `tilewright.data.transforms`; on whole batches, in the background.
        workers: threads that prepare batches (0: none, all in the caller). prefetch: batches each keeps ready.

    The batches of an epoch depend on seed, epoch and dataset alone. `set_epoch` chooses the next epoch; without it
    each iteration is the next one. `state_dict` in the middle of an epoch lets another loader go on with the batch
    after the last one taken. `wait_seconds`: time the consumer has waited for batches.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int = 32, shuffle: bool = False, seed: int = 0, drop_last: bool = False,
        transform: Transform | None = None, workers: int = 1, prefetch: int = 2,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.batch_size = check_count(batch_size, "batch_size", 1)
        self.shuffle, self.drop_last, self.transform = shuffle, drop_last, transform
        self.seed = check_count(seed, "seed")
        self.workers, self.prefetch = check_count(workers, "workers"), check_count(prefetch, "prefetch", 1)
        self.epoch = 0
        self.position = 0  # batches of this epoch already taken
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        """Batches in an epoch."""
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its start unless a state was loaded for it."""
        epoch = check_count(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position, "samples": len(self.dataset), "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that the state had seen. Raises ArgumentError for other data, batch size or seed."""
        for name, own in (("samples", len(self.dataset)), ("batch_size", self.batch_size), ("seed", self.seed)):
            if state[name] != own:
                raise ArgumentError(f"Loader.load_state_dict: the state has {name} {state[name]} and this loader {own}; they must be equal")
        self.epoch, self.position = state["epoch"], state["position"]

    def order(self, epoch: int) -> np.ndarray:
        """Sample numbers of an epoch, in order."""
        n = len(self.dataset)
        return philox(self.seed, SHUFFLE, epoch).permutation(n) if self.shuffle else np.arange(n)

    def _make(self, indices: np.ndarray, epoch: int, number: int) -> Any:
        gather = getattr(self.dataset, "gather", None)
        if gather is not None:
            batch = gather(indices)
        else:
            samples = []
            for i in indices:
                try:
                    samples.append(self.dataset[int(i)])
                except Exception as error:
                    raise DataError(f"sample {int(i)} could not be read: {error}") from error
            paired = isinstance(samples[0], tuple)
            batch = tuple(_stack([s[k] for s in samples], "x" if k == 0 else "y") for k in range(2)) if paired else _stack(samples, "x")
        if self.transform is None:
            return batch
        x, y = batch if isinstance(batch, tuple) else (batch, None)
        x, y = self.transform(x, y, BatchRandom(self.seed, epoch, indices, number))
        return x if y is None else (x, y)

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)


class _Epoch:
    """One pass. Closing it, dropping it or an error in it ends its threads."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.epoch, self.next, self.total = loader.epoch, loader.position, len(loader)
        self.order = loader.order(self.epoch)
        self.taken = self.next
        self.waiting: deque[Future[Any]] = deque()
        self.pool = ThreadPoolExecutor(loader.workers, "tilewright-loader") if loader.workers else None
        self._end = weakref.finalize(self, _shut, self.pool, self.waiting)

    def __iter__(self) -> _Epoch:
        return self

    def _indices(self, number: int) -> np.ndarray:
        size = self.loader.batch_size
        return self.order[number * size : (number + 1) * size]

    def _submit(self) -> None:
        assert self.pool is not None
        while self.next < self.total and len(self.waiting) < self.loader.workers * self.loader.prefetch:
            self.waiting.append(self.pool.submit(self.loader._make, self._indices(self.next), self.epoch, self.next))
            self.next += 1

    def __next__(self) -> Any:
        if self.taken >= self.total:
            if self._end.alive:
                self.close()
                self.loader.epoch, self.loader.position = self.epoch + 1, 0
            raise StopIteration
        if not self._end.alive:
            raise StopIteration
        start = time.perf_counter()
        try:
            if self.pool is None:
                batch = self.loader._make(self._indices(self.taken), self.epoch, self.taken)
            else:
                self._submit()
                batch = self.waiting.popleft().result()
                self._submit()
        except BaseException:
            self.close()
            raise
        self.loader.wait_seconds += time.perf_counter() - start
        self.taken += 1
        self.loader.position = self.taken
        return batch

    def close(self) -> None:
        """End the background threads; the rest of the epoch is not read."""
        self._end()


def _shut(pool: ThreadPoolExecutor | None, waiting: deque[Future[Any]]) -> None:
    for future in waiting:
        future.cancel()
    waiting.clear()
    if pool is not None:
        # Not waited for when the collector runs this in one of the pool's own threads.
        own = threading.current_thread().name.startswith("tilewright-loader")
        pool.shutdown(wait=not own, cancel_futures=True)


def as_batches(source: Any) -> Any:
    """Any iterable of (x, y) batches, checked as it goes; a callable is called for each pass."""
    if callable(source) and not hasattr(source, "__iter__"):
        source = source()
    if not hasattr(source, "__iter__"):
        raise DataError(f"data of type {type(source).__name__} is not an iterable of (x, y) batches; use Loader(dataset) or a list")
    return source
