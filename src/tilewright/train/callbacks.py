"""What happens beside the training loop: logs, early stopping, progress. All are optional and see the same events."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from tilewright.errors import ArgumentError

if TYPE_CHECKING:
    from tilewright.train.trainer import Trainer


class Callback:
    """Override what you need. `trainer.stop = True` ends training after the event; a state_dict is checkpointed."""

    def on_fit_start(self, trainer: Trainer) -> None: ...
    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None: ...
    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None: ...
    def on_fit_end(self, trainer: Trainer) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EarlyStopping(Callback):
    """Stop once `monitor` has failed to improve by more than `min_delta` in `patience` epochs in a row.

    `mode` is "min" or "max"; by default "max" for a name with "accuracy" in it. A figure that is NaN never improves.
    """

    def __init__(self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: str | None = None) -> None:
        if mode not in (None, "min", "max") or patience < 1:
            raise ArgumentError(f"EarlyStopping: mode {mode!r} must be 'min' or 'max' and patience {patience} at least 1")
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1.0 if (mode or ("max" if "accuracy" in monitor else "min")) == "max" else -1.0
        self.best = -math.inf
        self.waited = 0
        self.resumed = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.resumed and self.waited >= self.patience:  # the run that goes on had been stopped
            trainer.stop = True
        self.resumed = False

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        if self.monitor not in logs:
            raise ArgumentError(f"EarlyStopping: {self.monitor!r} is not among the epoch's figures {', '.join(logs)}")
        value = self.sign * logs[self.monitor]
        if value > self.best + self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
            trainer.stop = trainer.stop or self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.resumed = state["best"], state["waited"], True


def _plain(value: Any) -> Any:
    """A figure as JSON has it, which knows neither NaN nor infinity."""
    if getattr(value, "size", 0) == 1:  # a NumPy number, or a tensor of one
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonlLog(Callback):
    """One JSON object a line: every `every` steps, and every epoch; null stands for a figure that is not finite.

    OSError when training starts and the file cannot be opened; what fails later (a full disk) ends the log with a warning.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 50) -> None:
        self.path, self.every = os.fspath(path), every
        self.broken = False

    def on_fit_start(self, trainer: Trainer) -> None:
        with open(self.path, "a"):  # a path that cannot be written stops the run before it has cost anything
            self.broken = False

    def _write(self, record: dict[str, Any]) -> None:
        if self.broken:
            return
        try:
            with open(self.path, "a") as f:
                f.write(json.dumps({k: _plain(v) for k, v in record.items()}) + "\n")
        except OSError as error:  # a full disk must not cost the run
            self.broken = True
            warnings.warn(f"JsonlLog: {self.path}: could not be written ({error.strerror or error}); training goes on unlogged", stacklevel=2)

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        if self.every and trainer.step % self.every == 0:
            self._write({"event": "step", "step": trainer.step, "epoch": trainer.epoch, **logs})

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        self._write({"event": "epoch", "step": trainer.step, "epoch": trainer.epoch, **logs})


class TensorBoard(Callback):
    """The epoch's figures as TensorBoard scalars (extra `tensorboard`)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ArgumentError("TensorBoard: the package tensorboardX is missing; pip install 'tilewright[tensorboard]'") from None
        self.writer = SummaryWriter(os.fspath(folder))

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        for name, value in logs.items():
            self.writer.add_scalar(name, value, trainer.epoch)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.writer.close()


class Progress(Callback):
    """Loss, images per second and the share of time spent waiting for data: a live bar on a terminal, else plain lines."""

    def __init__(self, live: bool | None = None, every: float = 10.0) -> None:
        self.live = sys.stderr.isatty() if live is None else live
        self.every = every
        self.bar: Any = None
        self.task: Any = None
        self.last = time.monotonic()

    def on_fit_start(self, trainer: Trainer) -> None:
        self.last = time.monotonic()
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=None, note="")
            self.bar.start()

    @staticmethod
    def _note(logs: dict[str, Any]) -> str:
        return f"loss {logs['loss']:.4f}  {logs['images_per_second']:.0f} images/s  {logs['data_wait']:.0%} waiting for data"

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        if self.bar is not None:
            self.bar.update(
                self.task,
                description=f"epoch {trainer.epoch + 1}/{trainer.epochs}",
                completed=trainer.batch,
                total=trainer.batches,
                note=self._note(logs),
            )
        elif time.monotonic() - self.last > self.every:
            self.last = time.monotonic()
            total = "?" if trainer.batches is None else trainer.batches
            print(
                f"epoch {trainer.epoch + 1}/{trainer.epochs}  batch {trainer.batch}/{total}  {self._note(logs)}",
                file=sys.stderr,
                flush=True,
            )

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        shown = "  ".join(f"{k} {v:.4f}" for k, v in logs.items() if k not in ("images_per_second", "data_wait", "seconds", "epoch"))
        line = f"epoch {trainer.epoch + 1}/{trainer.epochs}  {shown}  {logs['images_per_second']:.0f} images/s  "
        line += f"{logs['data_wait']:.0%} waiting for data  {logs['seconds']:.1f} s"
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
