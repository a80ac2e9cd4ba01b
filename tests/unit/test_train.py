"""The trainer: learning, resuming bit for bit, interruption, early stopping, logs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tilewright as tw
from tilewright import data, models, nn, optim
from tilewright.errors import ArgumentError, CheckpointError, DataError
from tilewright.train import EarlyStopping, Interrupted, JsonlLog, Trainer
from tilewright.train.callbacks import Callback


def blobs(n=96, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    x = rng.standard_normal((n, 1, 8, 8)).astype(np.float32) * 0.3
    for i, label in enumerate(y):
        x[i, 0, label * 2 : label * 2 + 3] += 1
    return data.ArrayDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.fc(self.drop(tw.flatten(self.bn(self.conv(x), activation="relu"), 1)))


def make(tmp_path=None, seed=0, callbacks=(), **options):
    tw.manual_seed(seed)
    net = Net()
    opt = optim.AdamW(net.parameters(), lr=0.01)
    schedule = optim.CosineAnnealing(opt, 40)
    path = None if tmp_path is None else tmp_path / "run.ckpt"
    trainer = Trainer(net, opt, schedule=schedule, schedule_every="step", callbacks=callbacks, checkpoint=path, progress="off", **options)
    return trainer, data.Loader(blobs(), 16, shuffle=True, seed=3)


def state(trainer):
    return {k: v.numpy().copy() for k, v in trainer.model.state_dict().items()}


def test_it_learns_and_evaluates():
    trainer, loader = make()
    history = trainer.fit(loader, 6, data.Loader(blobs(48, 1), 16))
    assert len(history) == 6
    assert history[-1]["val_accuracy"] > 0.95
    assert history[-1]["loss"] < history[0]["loss"]
    assert trainer.evaluate(data.Loader(blobs(48, 1), 16))["accuracy"] == history[-1]["val_accuracy"]
    assert trainer.predict(data.Loader(blobs(20, 1), 16)).shape == (20, 3)


def test_resume_between_epochs_is_bit_for_bit(tmp_path):
    whole, loader = make()
    whole.fit(loader, 4)
    first, loader = make(tmp_path)
    first.fit(loader, 2)
    second, loader = make(tmp_path, seed=99)
    history = second.fit(loader, 4, resume=True)
    assert [h["epoch"] for h in history] == [0, 1, 2, 3]
    for k, v in state(whole).items():
        np.testing.assert_array_equal(state(second)[k], v)
    assert [h["loss"] for h in whole.history] == [h["loss"] for h in history]


class Interrupt(Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, trainer, logs):
        if trainer.step == self.at:
            raise KeyboardInterrupt


def test_ctrl_c_saves_and_resumes_in_mid_epoch(tmp_path):
    whole, loader = make()
    whole.fit(loader, 3)
    first, loader = make(tmp_path, callbacks=[Interrupt(9)])
    with pytest.raises(Interrupted, match=r"after step 9; the run is saved"):
        first.fit(loader, 3)
    second, loader = make(tmp_path, seed=99, callbacks=[Callback()])
    second.fit(loader, 3, resume=True)
    for k, v in state(whole).items():
        np.testing.assert_array_equal(state(second)[k], v)
    assert [h["loss"] for h in whole.history] == [h["loss"] for h in second.history]


def test_ctrl_c_then_fit_again_goes_on_in_mid_epoch(tmp_path):
    whole, loader = make()
    whole.fit(loader, 3)
    for batches in (lambda loader: loader, lambda loader: PerEpoch(loader)):
        first, loader = make(callbacks=[Interrupt(9)])
        source = batches(loader)
        with pytest.raises(Interrupted):
            first.fit(source, 3)
        first.callbacks.clear()
        first.fit(source, 3)
        for k, v in state(whole).items():
            np.testing.assert_array_equal(state(first)[k], v)


@pytest.mark.parametrize("at", [1, 9])
def test_an_interrupt_between_taking_a_batch_and_its_step_loses_no_batch(tmp_path, at):
    whole, loader = make()
    whole.fit(loader, 3)
    first, loader = make(tmp_path)
    step, calls = first._train_step, iter(range(1, 100))

    def interrupted(x, y):
        if next(calls) == at:
            raise KeyboardInterrupt
        return step(x, y)

    first._train_step = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        first.fit(loader, 3)
    second, loader = make(tmp_path, seed=99)
    second.fit(loader, 3, resume=True)
    for k, v in state(whole).items():
        np.testing.assert_array_equal(state(second)[k], v)


class PerEpoch:
    """A plain iterable that has an order for each epoch, as other libraries' loaders do."""

    def __init__(self, loader):
        self.loader = loader

    def set_epoch(self, epoch):
        self.loader.set_epoch(epoch)

    def __iter__(self):
        yield from self.loader


def test_a_damaged_checkpoint_leaves_the_model(tmp_path):
    first, loader = make(tmp_path)
    first.fit(loader, 1)
    path = tmp_path / "run.ckpt"
    path.write_bytes(path.read_bytes()[:-7])
    second, loader = make(tmp_path, seed=5)
    before = state(second)
    with pytest.raises(CheckpointError, match=r"run\.ckpt"):
        second.fit(loader, 2, resume=True)
    for k, v in state(second).items():
        np.testing.assert_array_equal(v, before[k])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    first, loader = make(tmp_path)
    first.fit(loader, 1)
    net = models.lenet(3)
    other = Trainer(net, optim.SGD(net.parameters(), lr=0.1), progress="off")
    with pytest.raises(CheckpointError, match="nothing was changed"):
        other.fit(loader, 2, resume=tmp_path / "run.ckpt")


def test_early_stopping_and_log(tmp_path):
    log = tmp_path / "log.jsonl"
    trainer, loader = make(callbacks=[EarlyStopping("loss", patience=1, min_delta=10.0), JsonlLog(log, every=2)])
    trainer.fit(loader, 9)
    assert len(trainer.history) == 2  # one best epoch, then one that does not improve
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {r["event"] for r in records} == {"step", "epoch"}
    assert all("loss" in r for r in records)


def test_any_iterable_of_batches():
    trainer, _ = make()
    batches = [(b[0], b[1]) for b in data.Loader(blobs(), 16)]
    trainer.fit(batches, 1)
    trainer.fit([(tw.tensor(x), tw.tensor(y)) for x, y in batches], 2)
    assert len(trainer.history) == 2


def test_soft_labels_clip_and_ema():
    trainer, loader = make(clip_norm=0.1)
    trainer.ema = optim.EMA(trainer.model, 0.5)
    soft = [(x, np.eye(3, dtype=np.float32)[y]) for x, y in loader]
    trainer.fit(soft, 2)
    with trainer.ema.applied():
        assert np.isfinite(trainer.evaluate(soft)["loss"])


def test_errors():
    trainer, loader = make()
    with pytest.raises(DataError, match="no batch"):
        trainer.fit([], 1)
    with pytest.raises(DataError, match="no batch"):
        trainer.evaluate([])
    with pytest.raises(DataError, match=r"a batch must be \(x, y\)"):
        trainer.fit([np.zeros(3)], 1)
    with pytest.raises(ArgumentError, match="without an optimizer"):
        Trainer(trainer.model, progress="off").fit(loader, 1)


def test_plain_progress_lines(capsys):
    trainer, loader = make()
    trainer.shown = [tw.train.callbacks.Progress(False, every=0.0)]
    trainer.fit(loader, 1)
    err = capsys.readouterr().err
    assert "images/s" in err
    assert "waiting for data" in err


def test_a_loss_that_is_not_finite_is_said_once():
    trainer, loader = make()
    broken = [(np.full_like(x, np.nan), y) for x, y in loader]
    with pytest.warns(UserWarning, match="the loss is nan at step 1") as said:
        trainer.fit(broken, 1)
    assert len(said) == 1
