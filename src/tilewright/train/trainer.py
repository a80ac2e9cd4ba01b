"""The training loop: fit, evaluate, predict."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright import ops, random
from tilewright.autograd import no_grad
from tilewright.data.loader import as_batches
from tilewright.errors import ArgumentError, CheckpointError, DataError
from tilewright.io import check_place
from tilewright.tensor import Tensor, tensor
from tilewright.train.callbacks import Callback, Progress
from tilewright.train.checkpoint import load_checkpoint, save_checkpoint
from tilewright.train.metrics import Mean, accuracy


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `fit`; the checkpoint, where one is kept, holds the run up to the last finished step."""


@contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, which is thus done whole or not begun; a second one does not wait."""
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # where Ctrl-C does not arrive
        return
    held: list[Any] = []

    def hold(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(held) == 1:
        before(signal.SIGINT, None)


class Trainer:
    """Trains `model` with `optimizer` on batches (x, y): NumPy arrays or Tensors, y class indices or probabilities.

    loss: (outputs, y) -> a one-element Tensor, the mean over the batch. metrics: name -> (outputs, y) -> float, a mean
    over the batch, computed in evaluation and during training. schedule: an object with `step()`, called after every
    step (`schedule_every="step"`) or epoch. clip_norm: bound of the gradient's global norm. ema: an object with
    `update()`, called after every step. checkpoint: a path written at every epoch's end, every `checkpoint_every`
    steps where given, and on Ctrl-C. progress: live bar (None: on a terminal), plain lines (False) or nothing ("off").
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        metrics: dict[str, Callable[[Any, Any], float]] | None = None,
        schedule: Any = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        ema: Any = None,
        device: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        progress: bool | str | None = None,
    ) -> None:
        if schedule_every not in ("step", "epoch"):
            raise ArgumentError(f"Trainer: schedule_every {schedule_every!r} must be 'step' or 'epoch'")
        self.model, self.optimizer = model, optimizer
        self.loss = ops.cross_entropy if loss is None else loss  # type: ignore[attr-defined]
        self.metrics = {"accuracy": accuracy} if metrics is None else metrics
        self.schedule, self.schedule_every = schedule, schedule_every
        self.clip_norm, self.ema, self.device = clip_norm, ema, device
        self.callbacks = list(callbacks)
        self.shown: list[Callback] = [] if progress == "off" else [Progress(progress if isinstance(progress, bool) else None)]
        self.checkpoint = None if checkpoint is None else os.fspath(checkpoint)
        self.checkpoint_every = checkpoint_every
        self.history: list[dict[str, Any]] = []
        self.epoch = self.step = self.batch = self.epochs = 0
        self.batches: int | None = None
        self.stop = False
        self._diverged = False
        self._sums: dict[str, Mean] = {}

    # -- training ------------------------------------------------------------------------------------------------

    def fit(self, train: Iterable[Any], epochs: int, validation: Iterable[Any] | None = None, *, resume: Any = None) -> list[dict[str, Any]]:
        """Train up to `epochs` epochs in all; one dict of figures per epoch, also kept in `history`.

        resume: a checkpoint's path, or True for this trainer's own where it exists. The run then goes on bit for bit
        as if it had not stopped (give it a loader with the same seed and data). Ctrl-C saves and raises Interrupted.
        CheckpointError where no checkpoint can be written at the start; one that fails later (a full disk) is a warning.
        """
        if self.optimizer is None:
            raise ArgumentError("Trainer.fit: the trainer was made without an optimizer; pass one to Trainer(model, optimizer)")
        train = as_batches(train)
        if resume is True:
            resume = self.checkpoint if self.checkpoint is not None and os.path.exists(self.checkpoint) else None
        if resume:
            self.load(resume, train)
        if self.checkpoint is not None:
            check_place(self.checkpoint)
        self.epochs, self.stop = epochs, False
        self._emit("on_fit_start")
        try:
            while self.epoch < epochs and not self.stop:
                self._epoch(train, validation)
        except KeyboardInterrupt:
            if self.checkpoint is not None:
                self.save(self.checkpoint, train)
            saved = f"; the run is saved in {self.checkpoint}, go on with fit(..., resume=True)" if self.checkpoint else ""
            raise Interrupted(f"training was interrupted in epoch {self.epoch + 1} after step {self.step}{saved}") from None
        finally:
            self._emit("on_fit_end")
        return self.history

    def _epoch(self, train: Any, validation: Any) -> None:
        started = time.perf_counter()
        if not self._sums:
            self._sums = {name: Mean() for name in ("loss", *self.metrics)}
        try:
            self.batches = len(train)
        except TypeError:
            self.batches = None
        train.set_epoch(self.epoch)
        # Where this trainer stands counts, not the loader: an interrupt may have fallen between the two.
        train.load_state_dict({**train.state_dict(), "position": self.batch})
        self.model.train()
        waited, seen = 0.0, 0
        source = iter(train)
        try:
            while True:
                asked = time.perf_counter()
                try:
                    x, y = self._place(next(source))
                except StopIteration:
                    break
                waited += time.perf_counter() - asked
                with _whole():  # else a checkpoint could hold half a step
                    value = self._train_step(x, y)
                    self.step += 1
                    self.batch += 1
                    seen += len(x)
                    spent = time.perf_counter() - started
                    logs = {"loss": value, "images_per_second": seen / spent, "data_wait": waited / spent}
                    self._emit("on_step_end", logs)
                    if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                        self._keep(train)
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()
        if self.batch == 0:
            raise DataError("Trainer.fit: the training data gave no batch; check the dataset's length, batch size and drop_last")
        spent = time.perf_counter() - started
        figures: dict[str, Any] = {"epoch": self.epoch, **{k: m.value for k, m in self._sums.items()}}
        if validation is not None:
            figures |= {f"val_{k}": v for k, v in self.evaluate(validation).items()}
        figures |= {"images_per_second": seen / spent if spent else 0.0, "data_wait": waited / spent if spent else 0.0}
        figures["seconds"] = time.perf_counter() - started
        with _whole():
            if self.schedule is not None and self.schedule_every == "epoch":
                self.schedule.step()
            self.history.append(figures)
            self._emit("on_epoch_end", figures)
            self.epoch += 1
            self.batch = 0
            self._sums = {}
            self._keep(train)

    def _train_step(self, x: Any, y: Any) -> float:
        out = self.model(x)
        loss = self.loss(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip_norm is not None:
            from tilewright.optim import clip_grad_norm_

            clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.schedule is not None and self.schedule_every == "step":
            self.schedule.step()
        if self.ema is not None:
            self.ema.update()
        value = float(loss.item())
        if not math.isfinite(value) and not self._diverged:
            self._diverged = True
            warnings.warn(
                f"Trainer: the loss is {value} at step {self.step + 1} and the weights may be lost; lower the learning rate, set clip_norm, "
                "or look for NaN in the data",
                stacklevel=2,
            )
        if len(x):
            self._sums["loss"].add(value, len(x))
            for name, metric in self.metrics.items():
                self._sums[name].add(metric(out.detach(), y), len(x))
        return value

    def _place(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise DataError(f"Trainer: a batch must be (x, y) and is {type(batch).__name__}; wrap the data in a loader that gives pairs")
        return self._tensor(batch[0]), self._tensor(batch[1])

    def _tensor(self, value: Any) -> Tensor:
        t = value if isinstance(value, Tensor) else tensor(value, device=self.device)
        if t.dtype.name == "float64":
            t = t.to(dtype="float32")
        return t if self.device is None else t.to(device=self.device)

    def _emit(self, event: str, *args: Any) -> None:
        for callback in (*self.callbacks, *self.shown):
            getattr(callback, event)(self, *args)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Mean loss and metrics over `data`, in evaluation mode, without gradients."""
        sums = {name: Mean() for name in ("loss", *self.metrics)}
        for out, y in self._forward(data):
            sums["loss"].add(float(self.loss(out, y).item()), len(out))
            for name, metric in self.metrics.items():
                sums[name].add(metric(out, y), len(out))
        if not sums["loss"].count:
            raise DataError("Trainer.evaluate: the data gave no batch; check the dataset's length")
        return {name: mean.value for name, mean in sums.items()}

    def predict(self, data: Iterable[Any]) -> np.ndarray:
        """The model's outputs for every batch of `data` ((x, ...) or x), concatenated."""
        parts = [np.array(out.numpy()) for out, _ in self._forward(data)]
        if not parts:
            raise DataError("Trainer.predict: the data gave no batch; check the dataset's length")
        return np.concatenate(parts)

    def _forward(self, data: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        training = self.model.training
        self.model.eval()
        try:
            for batch in data:
                pair = isinstance(batch, (tuple, list))
                x = self._tensor(batch[0] if pair else batch)
                y = self._tensor(batch[1]) if pair and len(batch) > 1 else None
                with no_grad():
                    out = self.model(x)
                yield out, y
        finally:
            self.model.train(training)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], train: Any = None) -> None:
        """Write model, optimizer, schedule, random state, data position and history to one file, atomically."""
        save_checkpoint(path, self._state(train))

    def _keep(self, train: Any) -> None:
        """Write the checkpoint, where one is kept. A full disk must not cost the run: it goes on, and this is tried again."""
        if self.checkpoint is not None:
            try:
                self.save(self.checkpoint, train)
            except CheckpointError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                warnings.warn(f"after step {self.step}: {error}; training goes on, and the next checkpoint will be tried", stacklevel=2)

    def load(self, path: str | os.PathLike[str], train: Any = None) -> None:
        """Take up the state that `save` wrote. Raises CheckpointError and leaves everything as it was on a misfit."""
        state = load_checkpoint(path)
        before = self._state(train)
        before["model"] = {k: np.array(v.numpy()) for k, v in before["model"].items()}
        try:
            self._take(state, train)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._take(before, train)
            raise CheckpointError(f"{os.fspath(path)}: the checkpoint does not fit this trainer: {error}") from error

    def _named_callbacks(self) -> dict[str, Callback]:
        """By their class's name, those after the first of a class with a number."""
        named: dict[str, Callback] = {}
        for c in self.callbacks:
            name, n = type(c).__name__, 1
            while name in named:
                n += 1
                name = f"{type(c).__name__} {n}"
            named[name] = c
        return named

    def _state(self, train: Any) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "schedule": self.schedule, "ema": self.ema, "loader": train}
        return {
            "model": self.model.state_dict(),
            "random": random.get_state(),
            "callbacks": {name: held for name, c in self._named_callbacks().items() if (held := c.state_dict())},
            "epoch": self.epoch,
            "step": self.step,
            "batch": self.batch,
            "sums": {k: [m.total, m.count] for k, m in self._sums.items()},
            "history": self.history,
            **{k: p.state_dict() for k, p in parts.items() if hasattr(p, "state_dict")},
        }

    def _take(self, state: dict[str, Any], train: Any) -> None:
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        random.set_state(state["random"])
        for name, callback in self._named_callbacks().items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
        for name, part in (("schedule", self.schedule), ("ema", self.ema), ("loader", train)):
            if name in state and hasattr(part, "load_state_dict"):
                part.load_state_dict(state[name])
        self.epoch, self.step, self.batch = state["epoch"], state["step"], state["batch"]
        self._sums = {k: Mean(total, count) for k, (total, count) in state["sums"].items()}
        self.history = state["history"]
