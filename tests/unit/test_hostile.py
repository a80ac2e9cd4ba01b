"""Faults that hostile use once showed: each test failed before its mend."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright import data, models, nn, optim, train
from tilewright.errors import ArgumentError, AutogradError, CheckpointError, DTypeError, ShapeError

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def cli(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewright.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})


# -- memory that is shared ---------------------------------------------------------------------------------------------


def test_linear_sees_writes_to_the_array_its_weights_share() -> None:
    array, x = normal(64, 64), normal(16, 64)
    weight = tw.from_numpy(array)
    for _ in range(3):
        for _ in range(6):  # more than it takes to pack weights that stay
            y = tw.linear(tw.tensor(x), weight).numpy()
        np.testing.assert_allclose(y, x @ array.T, rtol=1e-4, atol=1e-4)
        array[...] = normal(64, 64)


def test_folded_weights_see_writes_to_shared_statistics_and_a_new_eps() -> None:
    model = models.mobilenet_small().eval()
    bn = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    variance = np.ones(bn.running_var.shape, np.float32)
    bn.running_var = tw.from_numpy(variance)
    x = tw.tensor(normal(2, 1, 28, 28))

    def apart() -> np.ndarray:
        fresh = models.mobilenet_small().eval()
        fresh.load_state_dict({k: np.array(v.numpy()) for k, v in model.state_dict().items()})
        next(m for m in fresh.modules() if isinstance(m, nn.BatchNorm2d)).eps = bn.eps
        return fresh(x).numpy()

    with tw.no_grad():
        first = model(x).numpy()
        variance[...] = 50.0
        second = model(x).numpy()
        np.testing.assert_allclose(second, apart(), rtol=1e-4, atol=1e-5)
        bn.eps = 100.0
        third = model(x).numpy()
        np.testing.assert_allclose(third, apart(), rtol=1e-4, atol=1e-5)
    assert not np.allclose(first, second)
    assert not np.allclose(second, third)


def test_from_numpy_refuses_the_other_byte_order_and_no_write_reaches_read_only_memory(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", np.zeros(4, np.float32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")  # a write to it would kill the process
    shared = tw.from_numpy(mapped)
    for write in (lambda: shared.copy_(tw.ones(4)), lambda: shared.__setitem__(0, 1.0), lambda: shared.zero_()):
        with pytest.raises(ArgumentError, match="read-only"):
            write()
    parameter = nn.Parameter(shared)
    parameter.grad = tw.ones(4)
    for kind in (optim.SGD, optim.Adam):
        kind([parameter], lr=0.1).step()  # on memory of its own
    assert parameter.tolist() != [0, 0, 0, 0]
    assert mapped.tolist() == [0, 0, 0, 0]
    with pytest.raises(ArgumentError, match="byte order"):
        tw.from_numpy(np.zeros(4, ">f4"))
    assert tw.tensor(mapped).tolist() == [0, 0, 0, 0]


def test_a_bool_is_no_integer_index() -> None:
    with pytest.raises(ArgumentError, match="bool"):
        tw.tensor(normal(2, 3))[True]


# -- values that a gradient needs --------------------------------------------------------------------------------------


def test_backward_refuses_inputs_changed_in_place() -> None:
    a, b = tw.tensor(normal(3), requires_grad=True), tw.tensor(normal(3))
    view = b.reshape(3, 1)
    for change in (lambda: b.copy_(tw.zeros(3)), lambda: b.__setitem__(0, 5.0), lambda: view.__setitem__((0, 0), 5.0)):
        y = (a * b).sum()
        change()
        with pytest.raises(AutogradError, match="changed in place"):
            y.backward()
    b.copy_(tw.tensor(np.array([1, 2, 3], np.float32)))
    (a * b).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [1, 2, 3]


def test_backward_refuses_weights_that_a_step_changed() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x = tw.tensor(normal(2, 3))
    early, late = second(first(x)).sum(), second(first(x)).sum()
    early.backward()
    optimizer.step()
    with pytest.raises(AutogradError, match="linear"):
        late.backward()
    second(first(x)).sum().backward()


def test_backward_refuses_an_output_changed_in_place() -> None:
    a = tw.tensor(normal(3), requires_grad=True)
    y = tw.exp(a)
    total = y.sum()
    y.detach().copy_(tw.zeros(3))
    with pytest.raises(AutogradError, match="exp"):
        total.backward()


def test_reading_through_dlpack_before_backward_is_allowed() -> None:
    a = tw.tensor(normal(3), requires_grad=True)
    y = tw.exp(a)
    assert np.from_dlpack(y.detach()).shape == (3,)
    y.sum().backward()
    assert a.grad is not None
    np.testing.assert_array_equal(a.grad.numpy(), y.numpy())


# -- runs that must not be lost ----------------------------------------------------------------------------------------


def test_a_log_that_fails_does_not_end_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = train.JsonlLog(tmp_path / "log.jsonl", every=1)
    model = nn.Linear(4, 2)
    trainer = train.Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[log], progress="off")
    writes = 0

    def full(*_: Any) -> str:
        nonlocal writes
        writes += 1
        if writes > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "{}"

    monkeypatch.setattr(json, "dumps", full)
    with pytest.warns(UserWarning, match="log.jsonl.*No space left"):
        trainer.fit([(normal(8, 4), np.zeros(8, np.int64))] * 4, 2)
    assert trainer.step == 8
    assert writes == 3
    trainer.callbacks[:] = [train.JsonlLog(tmp_path / "none" / "log.jsonl")]
    with pytest.raises(FileNotFoundError):
        trainer.fit([(normal(8, 4), np.zeros(8, np.int64))], 3)
    assert trainer.step == 8


def test_train_refuses_places_before_it_trains(tmp_path: Any) -> None:
    common = ("train", "--data", "digits", "--epochs", 1)
    for options, said in (
        (("--out", tmp_path), "is a folder"),
        (("--out", tmp_path / "none" / "w"), "there is no folder"),
        (("--out", tmp_path / "w", "--checkpoint", tmp_path), "is a folder"),
        (("--out", tmp_path / "w", "--resume"), "--checkpoint"),
    ):
        done = cli(*common, *options)
        assert done.returncode == 2
        assert said in done.stderr
        assert "epoch" not in done.stderr
    with pytest.raises(CheckpointError, match="there is no folder"):
        tw.io.check_place(tmp_path / "none" / "w")


def test_a_named_onednn_that_cannot_be_used_is_said_aloud(tmp_path: Any) -> None:
    code = "import tilewright as tw; print(tw.conv2d(tw.ones((1, 1, 3, 3)), tw.ones((1, 1, 3, 3))).item())"
    for value, warned in ((str(tmp_path / "none.so"), True), ("off", False)):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "TILEWRIGHT_ONEDNN": value}
        )
        assert done.stdout.strip() == "9.0"
        assert ("Going on with NumPy" in done.stderr) is warned


def test_nothing_above_warns_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = models.mobilenet_small()
        x = tw.tensor(normal(4, 1, 28, 28))
        optimizer, average = optim.Adam(model.parameters()), optim.EMA(model, 0.5)
        for _ in range(2):
            loss = tw.cross_entropy(model.train()(x), tw.tensor(np.arange(4)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update()
            with average.applied(), tw.no_grad():
                model.eval()(x)
    assert np.isfinite(loss.item())


def test_results_share_no_memory_whatever_the_sizes() -> None:
    x = tw.tensor(normal(1, 4))
    before = x.tolist()
    for one in (
        x[0], x[:], x[...], x[None], next(iter(x)), tw.unbind(x)[0], tw.narrow(x, 0, 0, 1), tw.split(x, 4)[0], tw.chunk(x, 1)[0], tw.roll(x, 4, 1),
        tw.roll(x, 0), tw.tile(x, 1),
    ):  # fmt: skip
        one.fill_(9)
        assert x.tolist() == before


def test_an_ellipsis_of_no_axes_keeps_index_arrays_apart() -> None:
    a, i = normal(1, 2, 3, 4), np.array([0, 1])
    for key in ((slice(None), i, ..., 1, -1), (0, i, ..., 1, 1), (i * 0, i, ..., slice(None), 1), (i * 0, ..., i, slice(None), 1), (..., i, 1, 1)):
        np.testing.assert_array_equal(tw.tensor(a)[key].numpy(), a[key])


def test_losses_take_gradients_in_any_layout() -> None:
    target = tw.tensor(rng.integers(0, 4, (2, 3, 5)))
    wanted = normal(2, 3, 5)
    for loss in (tw.cross_entropy, tw.nll_loss):
        found = []
        for g in (tw.tensor(wanted), tw.tensor(wanted).channels_last()):
            x = tw.tensor(np.ones((2, 4, 3, 5), np.float32), requires_grad=True)
            loss(x, target, reduction="none").backward(g)
            assert x.grad is not None
            found.append(x.grad.numpy())
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("moment", ["forward", "optimizer", "metric", "schedule", "end"])
def test_ctrl_c_leaves_no_half_step_in_the_checkpoint(tmp_path: Any, moment: str) -> None:
    x, y = normal(24, 4), np.arange(24) % 3
    pressed = 0

    def press(where: str) -> None:
        nonlocal pressed
        if where == moment:
            pressed += 1
            if pressed == 4 or where == "end":
                os.kill(os.getpid(), signal.SIGINT)

    class Net(nn.Sequential):
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            press("forward")
            return out

    class Rate(optim.Step):
        def step(self) -> None:
            super().step()
            press("schedule")

    class Adam(optim.Adam):
        def step(self) -> None:
            super().step()
            press("optimizer")

    class End(train.Callback):
        def on_epoch_end(self, trainer: Any, logs: Any) -> None:
            press("end")

    def metric(*_: Any) -> float:
        press("metric")
        return 0.0

    def run(**options: Any) -> Any:
        tw.manual_seed(0)
        model = Net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = Adam(model.parameters(), lr=0.01)
        trainer = train.Trainer(
            model, optimizer, metrics={"m": metric}, schedule=Rate(optimizer, 1, 0.9), callbacks=[End()], progress="off",
            checkpoint=tmp_path / "run", ema=optim.EMA(model, 0.5),
        )  # fmt: skip
        trainer.fit(data.Loader(data.ArrayDataset(x, y), 8, shuffle=True), 5, **options)
        return trainer

    with pytest.raises(train.Interrupted):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    moment_was, moment = moment, ""
    resumed = run(resume=True)
    os.unlink(tmp_path / "run")
    whole = run()
    assert moment_was
    assert [h["loss"] for h in resumed.history] == [h["loss"] for h in whole.history]
    for (name, a), b in zip(resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)
    for a, b in zip(resumed.ema.averages, whole.ema.averages, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def linear_trainer(kind: Any = optim.SGD, **options: Any) -> train.Trainer:
    tw.manual_seed(0)
    model = nn.Linear(4, 3)
    return train.Trainer(model, kind(model.parameters(), lr=0.1), progress="off", **options)


BATCHES = [(normal(8, 4), np.arange(8) % 3)] * 2


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_is_named(tmp_path: Any) -> None:
    first = linear_trainer(checkpoint=tmp_path / "run")
    first.fit(BATCHES, 1)
    other = linear_trainer(optim.Adam)
    before, drawn = other.model.weight.tolist(), tw.random.get_state()
    with pytest.raises(CheckpointError, match=r"run: .*another optimizer"):
        other.load(tmp_path / "run")
    assert other.model.weight.tolist() == before
    assert tw.random.get_state() == drawn
    assert other.epoch == 0


def test_callbacks_of_one_class_keep_a_state_each(tmp_path: Any) -> None:
    def make() -> list[Any]:
        return [train.EarlyStopping("loss", 9), train.EarlyStopping("accuracy", 9)]

    trainer = linear_trainer(callbacks=make())
    trainer.fit(BATCHES, 2)
    trainer.save(tmp_path / "run")
    again = linear_trainer(callbacks=make())
    again.load(tmp_path / "run")
    assert [c.state_dict() for c in again.callbacks] == [c.state_dict() for c in trainer.callbacks]


def test_a_checkpoint_holds_what_it_was_given_or_says_that_it_cannot(tmp_path: Any) -> None:
    path = tmp_path / "run"
    train.save_checkpoint(path, {"a.b": np.ones(2), "a": {"b": np.zeros(2)}})
    state = train.load_checkpoint(path)
    assert (state["a.b"].tolist(), state["a"]["b"].tolist()) == ([1, 1], [0, 0])
    state["a.b"] += 1  # a callback that counts goes on in what it was given
    for entry in ({(1, 2): 3}, {1, 2}, b"", object()):
        with pytest.raises(CheckpointError, match=r"run: was not written: state\.x"):
            train.save_checkpoint(path, {"x": entry})
    for tree in ("{}", "[" * 100_000):
        tw.io.save_safetensors(path, {}, {"format": "tilewright-checkpoint-1", "tree": tree})
        with pytest.raises(CheckpointError, match="damaged"):
            train.load_checkpoint(path)


def test_weights_files_with_a_name_twice_or_reserved_are_refused_and_links_stay(tmp_path: Any) -> None:
    path = tmp_path / "w"
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="'a' twice"):
        tw.io.load_safetensors(path)
    with pytest.raises(CheckpointError, match="was not written"):
        tw.io.save_safetensors(path, {"__metadata__": np.ones(1)})
    link = tmp_path / "link"
    link.symlink_to(path)
    tw.io.save_safetensors(link, {"a": np.ones(1)})
    assert link.is_symlink()
    assert tw.io.load_safetensors(path)[0]["a"].tolist() == [1]


def test_the_log_is_json_when_training_diverges(tmp_path: Any) -> None:
    trainer = linear_trainer(callbacks=[train.JsonlLog(tmp_path / "log", every=1)])
    with pytest.warns(UserWarning, match="loss is nan"):
        trainer.fit([(np.full((8, 4), np.nan, np.float32), np.zeros(8, np.int64))], 1)

    def refuse(name: str) -> None:
        raise ValueError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, None]


def test_optimizers_refuse_what_would_train_nothing_or_the_wrong_way() -> None:
    p = nn.Parameter(tw.ones(3))
    for make in (
        lambda: optim.SGD(p), lambda: optim.SGD([p], lr=float("nan")), lambda: optim.SGD([p], momentum=-1), lambda: optim.SGD([{"lr": 1}]),
        lambda: optim.SGD([{"params": [p]}, nn.Parameter(tw.ones(2))]), lambda: optim.Adam([p], betas=(1.0, 0.9)),
        lambda: optim.Adam([p], betas=(0.9,)),  # type: ignore
        lambda: optim.Adam([p], eps=-1), lambda: optim.RMSprop([p], alpha=2), lambda: optim.OneCycle(optim.SGD([p]), 1.0, 4, div=0),
        lambda: optim.clip_grad_norm_([p], -1.0), lambda: optim.clip_grad_value_([p], -1.0),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            make()
    optim.SGD([{"params": p}])
    p.grad = tw.ones(3)
    assert optim.clip_grad_norm_(p, 1.0) == pytest.approx(3**0.5)
    assert p.grad.numpy() == pytest.approx(3**-0.5, rel=1e-4)
    p.grad = tw.full((3,), 1e30)
    assert optim.clip_grad_norm_([p], 1.0) == pytest.approx(3**0.5 * 1e30)
    assert p.grad.numpy() == pytest.approx(3**-0.5)


def test_a_gradient_to_start_from_that_is_no_tensor_is_refused() -> None:
    a = tw.tensor([1.0, 2.0], requires_grad=True)
    start: Any
    for start in (1.0, np.ones(2, np.float32)):
        with pytest.raises(AutogradError, match="make it a Tensor of shape"):
            (a * a).backward(start)
    with pytest.raises(AutogradError, match="2 outputs and 1 grad_outputs"):
        tw.grad([a.sum(), a.sum()], [a], [None])


def test_commands_refuse_what_would_fail_late_or_oddly(tmp_path: Any) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    for arguments, said in (
        (("train", "--data", "digits", "--out", tmp_path / "w", "--checkpoint", tmp_path / "w"), "name two files"),
        (("train", "--data", f"folder:{tmp_path}", "--size", 8, "--out", tmp_path / "w"), "none can be held out"),
        (("train", "--data", "digits", "--device", "cpu:7", "--out", tmp_path / "w"), "cpu:7"),
        (("summary", "lenet", "--input", "1x1x8"), "must be sizes joined by x"),
    ):
        done = cli(*arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert "epoch" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PLANS", "abc", "TILEWRIGHT_PLANS='abc'"),
        ("PLANS", "-5", "TILEWRIGHT_PLANS='-5'"),
        ("PLANS", "", "cpu 400 False"),
        ("DEVICE", "", "cpu 400 False"),
        ("DETERMINISTIC", "off", "cpu 400 False"),
        ("DETERMINISTIC", "1", "cpu 400 True"),
    ],
)
def test_settings_in_the_environment_are_read_or_refused_by_name(name: str, value: str, said: str) -> None:
    code = "import tilewright as tw; c = tw.config; tw.ones(1); print(c.device, c.plans, c.deterministic)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TILEWRIGHT_") or k == "TILEWRIGHT_ONEDNN"}
    environment[f"TILEWRIGHT_{name}"] = value
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert said in done.stdout + done.stderr


def test_cpu_0_is_cpu() -> None:
    assert tw.device("cpu:0") is tw.device("cpu")
    assert (tw.ones(2, device="cpu:0") + tw.ones(2)).tolist() == [2, 2]


def test_a_gradient_of_another_shape_is_refused_not_read_beyond() -> None:
    p = nn.Parameter(tw.ones(1000))
    grad: Any
    for grad in (tw.ones(1), tw.ones(1001), np.ones(1000, np.float32)):
        for kind in (optim.SGD, optim.AdamW):
            p.grad = grad
            with pytest.raises(ArgumentError, match=r"\.grad of a parameter of shape \(1000,\)"):
                kind([p], lr=0.1).step()
    assert p.tolist() == [1.0] * 1000


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.RMSprop])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_model_and_its_optimizer_are_copied_together(kind: Any, duplicate: Any) -> None:
    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        tw.square(model(x)).sum().backward()
        optimizer.step()

    x, model = tw.tensor(normal(4, 3)), nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **({} if kind is optim.AdamW else {"momentum": 0.9}))
    step(model, optimizer)
    other, its = duplicate((model, optimizer))
    before = model.weight.tolist()
    step(other, its)
    assert model.weight.tolist() == before
    step(model, optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), other.weight.numpy())
    assert its.steps == optimizer.steps == 2


def test_a_run_that_stopped_early_stays_stopped_when_resumed(tmp_path: Any) -> None:
    def run() -> int:
        trainer = linear_trainer(callbacks=[train.EarlyStopping("loss", 2, min_delta=100.0)], checkpoint=tmp_path / "run")
        return len(trainer.fit(BATCHES, 9, resume=True))

    assert [run(), run(), run()] == [3, 3, 3]


def test_a_bool_has_no_square() -> None:
    for square in (tw.square, lambda x: x**2):
        with pytest.raises(DTypeError, match="bool"):
            square(tw.tensor([True]))


def test_adam_counts_the_updates_of_each_parameter(tmp_path: Any) -> None:
    """The first update of Adam is lr whatever the gradient, also where it comes late, as of a layer thawed in training."""
    sizes = (3, 4, 40_000)
    ps = [nn.Parameter(tw.zeros(n)) for n in sizes]
    optimizer = optim.Adam(ps, lr=0.1)
    for _ in range(20):
        ps[0].grad = tw.ones(3)
        optimizer.step()
    fresh = [nn.Parameter(tw.tensor(p.numpy())) for p in ps]
    again = optim.Adam(fresh, lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    for parameters, its in ((ps, optimizer), (fresh, again)):
        for p in parameters:
            p.grad = tw.full(p.shape, 7.0)
        its.step()
        for p in parameters[1:]:
            np.testing.assert_allclose(p.numpy(), -0.1, rtol=1e-5)


def test_batch_norm_and_index_add_refuse_misfits() -> None:
    with pytest.raises(ShapeError, match="running statistics"):
        tw.batch_norm(tw.tensor(normal(2, 3, 2, 2)), tw.zeros(2), tw.ones(3), training=True)
    with pytest.raises(DTypeError, match="index_add"):
        tw.index_add(tw.ones((2, 2)), 0, tw.zeros(1), tw.ones((1, 2)))


def test_a_checkpoint_that_fails_does_not_end_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    batches = [(normal(8, 4), np.zeros(8, np.int64))] * 4
    trainer = train.Trainer(model, optim.SGD(model.parameters(), lr=0.1), checkpoint=tmp_path / "run.ckpt", progress="off")
    trainer.fit(batches, 1)
    before = (tmp_path / "run.ckpt").read_bytes()
    real = os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"after step 8: .*run\.ckpt.*No space left.*training goes on"):
        trainer.fit(batches, 2)
    assert (tmp_path / "run.ckpt").read_bytes() == before
    monkeypatch.setattr(os, "fsync", real)
    trainer.fit(batches, 3)
    assert (tmp_path / "run.ckpt").read_bytes() != before
    astray = train.Trainer(model, optim.SGD(model.parameters(), lr=0.1), checkpoint=tmp_path / "none" / "run.ckpt", progress="off")
    with pytest.raises(CheckpointError, match="there is no folder"):
        astray.fit(batches, 1)
    assert astray.step == 0
