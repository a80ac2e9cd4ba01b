"""Batches from a dataset: shuffled under a seed, transformed, and made ahead of time on threads."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tilewright.data._random import SHUFFLE, BatchRandom, check_count, philox
from tilewright.data.transforms import Transform
from tilewright.errors import ArgumentError, DataError, ShapeError, TilewrightError


@runtime_checkable
class Dataset(Protocol):
    """Anything with a length whose items are samples `(x, y)` or `x`, a plain list included.

    Where it has a method `gather(indices)`, that gives a whole batch at once.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """The batches of a dataset, one epoch per `for` loop.

    Args:
        dataset: a `Dataset`. With workers, its `__getitem__` runs on several threads at once.
        batch_size: samples per batch; the last batch of an epoch may be smaller.
        shuffle: a new order each epoch, from `seed` and the epoch's number.
        seed: of the order and of the transforms.
        drop_last: leave out the last batch if it is smaller.
        transform: called as `transform(x, y, random)` on each batch; see `tilewright.data.transforms`.
        workers: threads that make batches while the consumer computes; 0 makes each when it is asked for.
            Threads suffice, since decoding (Pillow) and array work (NumPy) release Python's lock.
        prefetch: batches each worker may be ahead, so at most workers * prefetch batches wait in memory.

    Yields:
        `(x, y)`, or `x` where samples are `x` alone. Batches and their order are the same for any number of
        workers.

    Attributes:
        epoch: the number of the running epoch, or of the next where none is running.
        wait_seconds: how long the consumer has waited for batches since the loader was made, in seconds.

    Each `for` loop begins a new epoch, also after one that was left early. `state_dict` and `load_state_dict`
    resume at the very batch that would have come next.

    Raises:
        DataError: from the loop: a sample or a transform failed (its own error is the cause), or the samples
            of a batch differ in shape.
        ArgumentError: an option outside its range.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        transform: Transform | None = None,
        workers: int = 1,
        prefetch: int = 2,
    ):
        if not isinstance(dataset, Dataset):
            raise ArgumentError(
                f"Loader: dataset is {type(dataset).__name__}, which lacks __len__ or __getitem__; "
                "pass an iterable of ready batches to the trainer as it is"
            )
        self.dataset, self.transform = dataset, transform
        self.batch_size = check_count(batch_size, "batch_size", 1)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.seed = check_count(seed, "seed")
        self.workers, self.prefetch = check_count(workers, "workers"), check_count(prefetch, "prefetch", 1)
        if self.drop_last and 0 < len(dataset) < self.batch_size:
            raise ArgumentError(
                f"Loader: drop_last leaves no batch, since batch_size {self.batch_size} exceeds "
                f"the {len(dataset)} samples; use a smaller batch or drop_last=False"
            )
        self.epoch = 0
        self.wait_seconds = 0.0
        self._position = 0  # batches handed out in this epoch
        self._running: object | None = None  # marks the latest unfinished loop

    def __len__(self) -> int:
        """Batches per epoch."""
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._running is not None:  # the last loop was left early
            self.epoch, self._position = self.epoch + 1, 0
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop run this epoch, from its start or from where a loaded state stands in it."""
        epoch = check_count(epoch, "epoch")
        if self._running is not None or epoch != self.epoch:
            self._position = 0
        self.epoch, self._running = epoch, None

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, in integers: the seed, the epoch, the batches handed out in it."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
            "samples": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next loop go on where `state` was taken.

        Raises:
            ArgumentError: the state is incomplete, or was taken with other data or options; nothing is changed.
        """
        mine = self.state_dict()
        if missing := mine.keys() - state.keys():
            raise ArgumentError(f"Loader.load_state_dict: the state lacks {sorted(missing)}")
        fixed = ("samples", "batch_size", "shuffle", "drop_last")
        for name in fixed:
            if state[name] != mine[name]:
                raise ArgumentError(f"Loader.load_state_dict: the state has {name} {state[name]} and this loader {mine[name]}; they must be equal")
        seed, epoch = check_count(state["seed"], "seed"), check_count(state["epoch"], "epoch")
        position = check_count(state["position"], "position")
        if position > len(self):
            raise ArgumentError(f"Loader.load_state_dict: position {position} lies beyond the {len(self)} batches of an epoch")
        self.seed, self.epoch, self._position, self._running = seed, epoch, position, None

    def __repr__(self) -> str:
        options = f"batch_size={self.batch_size}, shuffle={self.shuffle}, seed={self.seed}"
        return f"Loader({self.dataset!r}, {options})"


class _Plan:
    """How to make any batch of one epoch. Workers hold this, never the iterator, so that it can be freed."""

    def __init__(self, loader: Loader):
        self.dataset, self.transform, self.batch_size = loader.dataset, loader.transform, loader.batch_size
        self.seed, self.epoch = loader.seed, loader.epoch
        n = len(loader.dataset)
        self.order = philox(self.seed, SHUFFLE, self.epoch).permutation(n) if loader.shuffle else np.arange(n)
        self.stop = threading.Event()

    def check(self) -> None:
        if self.stop.is_set():
            raise DataError("the batch was given up, since its loop has ended")

    def make(self, number: int) -> Any:
        """Batch `number` of the epoch."""
        indices = self.order[number * self.batch_size : (number + 1) * self.batch_size]
        gather = getattr(self.dataset, "gather", None)
        if gather is not None:
            batch = gather(indices)
        else:
            samples = []
            for i in indices.tolist():
                self.check()
                samples.append(self._sample(i))
            batch = _collate(samples, indices)
        if self.transform is None:
            return batch
        self.check()
        x, y = batch if isinstance(batch, tuple) else (batch, None)
        try:
            x, y = self.transform(x, y, BatchRandom(self.seed, self.epoch, indices, number))
        except Exception as e:
            raise DataError(f"{self.transform} failed on batch {number} of epoch {self.epoch} (samples {_list(indices)}): {_message(e)}") from e
        return x if y is None else (x, y)

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as e:
            raise DataError(f"sample {index} could not be read: {_message(e)}") from e


def _message(e: Exception) -> str:
    return str(e) if isinstance(e, TilewrightError) else f"{type(e).__name__}: {e}"


def _list(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown}, ... {len(indices)} in all" if len(indices) > 8 else shown


def _collate(samples: list, indices: np.ndarray) -> Any:
    """Stack samples `(x, y)` or `x` to a batch; picture-like views of (H, W, C) memory stay channels-last."""
    pairs = [isinstance(s, (tuple, list)) for s in samples]
    if not any(pairs):
        return _stack(samples, indices, "")
    for i, (s, pair) in enumerate(zip(samples, pairs, strict=True)):
        if not pair or len(s) != 2:
            what = f"{len(s)} parts" if pair else "x alone"
            raise DataError(f"sample {indices[i]} has {what}; samples must all be (x, y), or all be x")
    return _stack([s[0] for s in samples], indices, "x "), _stack([s[1] for s in samples], indices, "y ")


def _stack(values: list, indices: np.ndarray, part: str) -> np.ndarray:
    arrays = [np.asarray(v) for v in values]
    first = arrays[0]
    for i, a in enumerate(arrays):
        if a.shape != first.shape:
            raise DataError(
                f"sample {indices[i]} has {part}shape {a.shape}, sample {indices[0]} has {first.shape}; "
                "a batch needs one shape: resize the pictures (ImageFolder and load_image take size=) or use batch_size=1"
            )
    dtype = np.result_type(*{a.dtype for a in arrays})
    if dtype.kind not in "iufb" and dtype.name != "bfloat16":
        raise DataError(f"sample {indices[0]} has {part}of type {dtype}, which is not a number")
    if first.ndim == 0:
        dtype = np.dtype(np.int64 if dtype.kind in "iub" else np.float32)
    if first.ndim == 3 and not first.flags.c_contiguous and first.transpose(1, 2, 0).flags.c_contiguous:
        c, h, w = first.shape
        out = np.empty((len(arrays), h, w, c), dtype).transpose(0, 3, 1, 2)
    else:
        out = np.empty((len(arrays), *first.shape), dtype)
    for i, a in enumerate(arrays):
        out[i] = a
    return out


class _Epoch:
    """One loop over a loader: keeps workers * prefetch batches in the making, and hands them out in order."""

    def __init__(self, loader: Loader):
        self._loader, self._plan = loader, _Plan(loader)
        self._token = loader._running = object()
        self._next, self._count = loader._position, len(loader)
        self._pending: deque[Future] = deque()
        self._ahead, self._closed = loader.workers * loader.prefetch, False
        self._tasks: SimpleQueue[tuple[Future, int] | None] | None = None
        if loader.workers and self._next < self._count:
            self._tasks = SimpleQueue()
            # Daemons, for a program that ends amid an epoch must not wait for batches that nobody wants.
            threads = [
                threading.Thread(target=_work, args=(self._tasks, self._plan), name=f"tilewright-loader-{i}", daemon=True)
                for i in range(loader.workers)
            ]
            # Runs when the iterator is freed, be it by `break`, an exception or the garbage collector, and at exit.
            self._finish = weakref.finalize(self, _shut, threads, self._tasks, self._plan.stop)
            for thread in threads:
                thread.start()
            self._fill()

    def _fill(self) -> None:
        assert self._tasks is not None
        while self._next < self._count and len(self._pending) < self._ahead:
            future: Future = Future()
            self._pending.append(future)
            self._tasks.put((future, self._next))
            self._next += 1

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        started = perf_counter()
        try:
            if self._pending:
                batch = self._pending.popleft().result()
                self._fill()
            elif self._tasks is None and self._next < self._count:
                batch = self._plan.make(self._next)
                self._next += 1
            else:
                if loader._running is self._token and not self._closed:
                    loader.epoch, loader._position, loader._running = loader.epoch + 1, 0, None
                self.close()
                raise StopIteration
        except BaseException:
            self.close()
            raise
        finally:
            loader.wait_seconds += perf_counter() - started
        if loader._running is self._token:
            loader._position += 1
        return batch

    def close(self) -> None:
        """End the workers; the loop is over, wherever it stood."""
        self._closed, self._next = True, self._count
        self._pending.clear()
        if self._tasks is not None:
            self._finish()


def _work(tasks: SimpleQueue[tuple[Future, int] | None], plan: _Plan) -> None:
    while (task := tasks.get()) is not None and not plan.stop.is_set():
        future, number = task
        try:
            future.set_result(plan.make(number))
        except BaseException as e:  # the consumer's to handle, whatever it is
            future.set_exception(e)
        del task, future  # a batch must not live on here while this thread waits for work


def _shut(threads: list[threading.Thread], tasks: SimpleQueue, stop: threading.Event) -> None:
    stop.set()
    for _ in threads:
        tasks.put(None)
    # The garbage collector may call this on a worker, which cannot wait for itself.
    if threading.current_thread() not in threads:
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class Batches:
    """Ready-made batches from any iterable, with what a trainer asks of a `Loader`; see `as_batches`."""

    def __init__(self, source: Iterable | Callable[[], Iterable]):
        self.source = source
        self.epoch = 0
        self.wait_seconds = 0.0
        self._position = 0
        self._running: object | None = None

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self._running is not None:
            self.epoch, self._position = self.epoch + 1, 0
        token = self._running = object()
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)  # type: ignore[attr-defined]
        return self._run(token, self._position)

    def _run(self, token: object, skip: int) -> Iterator[tuple[Any, Any]]:
        number = 0
        items = iter(self.source if isinstance(self.source, Iterable) else self.source())
        while True:
            started = perf_counter()
            try:
                item = next(items)
            except StopIteration:
                break
            finally:
                self.wait_seconds += perf_counter() - started
            number += 1
            if number <= skip:
                continue
            batch = _checked(item, number - 1)
            if self._running is token:
                self._position = number
            yield batch
        if number == 0 and items is self.source:
            raise DataError(
                f"the batches come from {type(self.source).__name__}, which can be gone through only once, "
                "and nothing is left in it; pass a list or a Loader to train for several epochs"
            )
        if self._running is token:
            self.epoch, self._position, self._running = self.epoch + 1, 0, None

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`; passed on to the source if it has a method of this name."""
        epoch = check_count(epoch, "epoch")
        if self._running is not None or epoch != self.epoch:
            self._position = 0
        self.epoch, self._running = epoch, None

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the batches handed out in it."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next loop pass over the batches handed out: exact if the source repeats itself."""
        if missing := {"epoch", "position"} - state.keys():
            raise ArgumentError(f"Batches.load_state_dict: the state lacks {sorted(missing)}")
        epoch, position = check_count(state["epoch"], "epoch"), check_count(state["position"], "position")
        self.epoch, self._position, self._running = epoch, position, None


def as_batches(source: Iterable | Callable[[], Iterable]) -> Loader | Batches:
    """Any iterable of `(x, y)` batches in the form the trainer takes.

    Args:
        source: a `Loader` (returned as it is), or an iterable of tuples or lists `(x, y)` of array-likes: a
            list, a generator (one epoch only), a function that returns one for each epoch, another library's loader.

    Returns:
        A `Loader` or `Batches`: both have `set_epoch`, `state_dict`, `load_state_dict` and `wait_seconds`.
        Lists become arrays; anything that already has a shape and a dtype is handed on untouched.

    Raises:
        ArgumentError: `source` is no iterable, or is one pair of arrays.
        DataError: from the loop: a batch is not a pair, or its parts differ in length.
    """
    if isinstance(source, (Loader, Batches)):
        return source
    if not isinstance(source, Iterable) and not callable(source):
        raise ArgumentError(f"batches come from an iterable of (x, y); got {type(source).__name__}")
    if isinstance(source, (tuple, list)) and len(source) == 2 and all(_is_array(part) for part in source):
        raise ArgumentError("got one pair of arrays where an iterable of batches is due; use Loader(ArrayDataset(x, y), batch_size)")
    return Batches(source)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _checked(item: Any, number: int) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{len(item)} parts" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
        raise DataError(f"batch {number} is {what}; a batch must be (x, y)")
    x, y = (part if _is_array(part) else _array(part, number) for part in item)
    if len(x.shape) == 0 or len(y.shape) == 0 or x.shape[0] != y.shape[0]:
        raise ShapeError(
            f"batch {number} has x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}; both need one entry per sample along axis 0"
        )
    return x, y


def _array(part: Any, number: int) -> np.ndarray:
    try:
        array = np.asarray(part)
    except ValueError as e:
        raise DataError(f"batch {number} is ragged: {e}") from e
    if array.dtype.kind not in "iufb":
        raise DataError(f"batch {number} holds {array.dtype}, which is not a number")
    if array.dtype == np.float64:  # Python's own numbers carry no intent to compute in double precision.
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array
