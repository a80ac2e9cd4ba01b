"""The choice of a kernel: policies, what is kept, planted rivals, launches that fail, and lock files."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright import devices
from tilewright.devices import api
from tilewright.devices.api import Kernel, Problem, Unusable, spec
from tilewright.errors import ArgumentError, KernelError
from tilewright.ops._op import OPS
from tilewright.tune import select, worker
from tilewright.tune.load import Load
from tilewright.tune.lock import Choice, Lock
from tilewright.tune.store import Store, problem_text

CPU = devices.get("cpu")
settings = importlib.import_module("tilewright.config")
config = settings.config
OP = OPS["exp"]
ATTRS = OP.samples()[0].attrs


class Rival(Kernel):
    """exp in NumPy, in a way that the test says."""

    device = "cpu"
    op = "exp"

    def __init__(self, name: str, run: Any, rank: int = 50) -> None:
        self.id, self.run, self.rank = f"cpu.exp.{name}", run, rank
        self.launches = 0

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return [] if problem.inputs[0].dtype.name == "float32" else ["float32 alone"]

    def prepare(self, problem: Problem, config: Any, device: Any) -> Any:
        def launch(inputs: Any, outputs: Any) -> None:
            self.launches += 1
            self.run(problem, inputs[0].array(problem.inputs[0]), outputs[0].array(problem.outputs[0]))

        return launch


def right(problem, x, y):
    np.exp(x, out=y)


def slow(problem, x, y):
    time.sleep(0.003)
    np.exp(x, out=y)


def wrong(problem, x, y):
    y[...] = -np.exp(x)


def raises(problem, x, y):
    raise RuntimeError("no such luck")


@pytest.fixture
def rivals(monkeypatch, tmp_path):
    """Plant kernels beside exp's own, each test in a store of its own."""
    own = Store(tmp_path / "t.sqlite3")
    monkeypatch.setattr(select, "store", lambda: own)
    monkeypatch.setattr(config, "tune", "auto")
    monkeypatch.setattr(select, "_spent", 0.0)
    monkeypatch.setattr(select, "_seen", set())
    monkeypatch.setattr(select, "_unkept", {})
    monkeypatch.setattr(Load, "others", lambda self: 0.0)
    CPU.plans.clear()

    def plant(*kernels: Rival) -> None:
        for k in kernels:
            monkeypatch.setitem(api._kernels, ("cpu", "exp"), sorted([*api._kernels["cpu", "exp"], k], key=lambda k: k.rank))

    yield plant
    CPU.plans.clear()
    own.close()


def problem(n: int = 5000) -> Problem:
    x = spec((n,), "float32")
    return Problem("exp", ATTRS, (x,), (x,))


def test_the_faster_of_two_right_ones_wins_and_is_kept(rivals):
    rivals(Rival("slow", slow, 1))
    first = select.choose(problem(), CPU, OP)
    assert first.kernel.id == "cpu.exp.numpy"
    trials = select.store().trials(select.key_of(problem(), CPU))
    assert {t.kernel: t.status for t in trials} == {"cpu.exp.slow": "ok", "cpu.exp.numpy": "ok"}
    CPU.plans.clear()
    counted = []
    original, select.measure = select.measure, lambda *a, **k: counted.append(a)
    try:
        assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"
    finally:
        select.measure = original
    assert counted == []


def test_what_is_timed_on_a_busy_machine_counts_for_the_process_alone(rivals, monkeypatch, capfd):
    rivals(Rival("slow", slow, 1))
    monkeypatch.setattr(Load, "others", lambda self: 1.5)
    monkeypatch.setattr(select, "_told", set())
    assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"
    assert select.store().trials(select.key_of(problem(), CPU)) == []
    assert "other programs keep the processor busy" in capfd.readouterr().err
    monkeypatch.setattr(worker, "trials", lambda *a, **k: pytest.fail("it measured again"))
    assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"


def test_measuring_goes_on_in_the_next_process_where_the_time_did_not_reach(rivals, monkeypatch):
    slowest, slower = Rival("slowest", lambda *a: time.sleep(0.02) or right(*a), 1), Rival("slower", slow, 2)
    rivals(slowest, slower)
    monkeypatch.setattr(config, "tune_problem_s", 0.02)
    key, met = select.key_of(problem(), CPU), []
    for _ in range(6):
        select._seen.clear()
        last = select.choose(problem(), CPU, OP).kernel.id
        met.append({t.kernel: t.count for t in select.store().trials(key)})
    assert met[0] == {"cpu.exp.slowest": 1}
    assert set(met[-1]) == {"cpu.exp.slowest", "cpu.exp.slower", "cpu.exp.numpy"}
    assert last == "cpu.exp.numpy"
    assert select.settled(select.store().trials(key))
    select._seen.clear()
    monkeypatch.setattr(worker, "trials", lambda *a, **k: pytest.fail("it measured again"))
    select.choose(problem(), CPU, OP)


def test_off_never_measures(rivals, monkeypatch):
    ticks = []
    fast, slower = Rival("fast", right, 1), Rival("slower", slow, 2)
    rivals(fast, slower)
    monkeypatch.setattr(worker, "trials", lambda *a, **k: pytest.fail("it measured"))
    monkeypatch.setattr(select.time, "perf_counter", lambda: ticks.append(1) or 0.0)
    with select.policy("off"):
        assert select.choose(problem(), CPU, OP).kernel is fast
        tw.exp(tw.ones(5000))
    with select.policy("cached"):
        assert select.choose(problem(7000), CPU, OP).kernel is fast
    assert ticks == []
    assert slower.launches == 0


@pytest.mark.parametrize(
    ("name", "run", "status", "said"),
    [("wrong", wrong, "wrong", "from the reference"), ("raises", raises, "failed", "no such luck")],
)
def test_planted_rivals_never_win_and_are_recorded(rivals, name, run, status, said):
    rivals(Rival(name, run, 1))
    assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"
    t = next(t for t in select.store().trials(select.key_of(problem(), CPU)) if t.kernel == f"cpu.exp.{name}")
    assert t.status == status
    assert said in t.reason
    rows = select.explain(problem(), CPU)
    assert rows[0]["kernel"] == "cpu.exp.numpy"
    assert next(r for r in rows if r["kernel"] == f"cpu.exp.{name}")["reasons"] == [t.reason]


def test_wrong_only_at_some_sizes(rivals):
    def odd(p, x, y):
        np.exp(x, out=y)
        if x.size % 2:
            y[-1] = 0

    rivals(Rival("odd", odd, 1), Rival("slow", slow, 2))
    assert select.choose(problem(5001), CPU, OP).kernel.id == "cpu.exp.numpy"
    statuses = [t.status for t in select.store().trials(select.key_of(problem(5001), CPU)) if t.kernel == "cpu.exp.odd"]
    assert statuses == ["wrong"]
    even = [t.status for t in select.measure(problem(5000), CPU, OP, budget_s=0.5) if t.kernel == "cpu.exp.odd"]
    assert even == ["ok"]


def test_a_launch_that_fails_falls_to_the_next_and_is_recorded(rivals):
    broken = Rival("moody", right, 1)
    rivals(broken)
    with select.policy("off"):
        chosen = select.choose(problem(), CPU, OP)
    assert chosen.kernel is broken
    broken.run = raises
    x = tw.ones(5000)
    out = CPU.allocate(x.spec.nbytes)
    chosen.launch([x.buffer], [out])
    np.testing.assert_allclose(out.array(x.spec), np.exp(np.ones(5000)), rtol=1e-6)
    assert chosen.kernel.id == "cpu.exp.numpy"
    broken.run = right
    measured = select.choose(problem(6000), CPU, OP)
    if measured.kernel is broken:
        broken.run = raises
        measured.launch([tw.ones(6000).buffer], [CPU.allocate(24000)])
        assert any(t.status == "failed" for t in select.store().trials(select.key_of(problem(6000), CPU)))


def test_every_candidate_refuses(rivals, monkeypatch):
    monkeypatch.setitem(api._kernels, ("cpu", "exp"), [])

    class Never(Rival):
        def prepare(self, problem, config, device):
            raise Unusable("there is no room")

    rivals(Never("never", right))
    with pytest.raises(KernelError, match=r"cpu\.exp\.never: there is no room"):
        select.choose(problem(), CPU, OP)


def test_the_time_of_a_process_is_bounded(rivals, monkeypatch, capsys):
    rivals(Rival("slow", slow, 1))
    monkeypatch.setattr(config, "tune_process_s", 0.05)
    monkeypatch.setattr(select, "_told", set())
    select.choose(problem(5000), CPU, OP)
    select.choose(problem(5001), CPU, OP)
    assert select._spent < 0.5
    monkeypatch.setattr(select, "_spent", 1.0)
    assert select.choose(problem(5002), CPU, OP).kernel.id == "cpu.exp.slow"
    assert select.choose(problem(5003), CPU, OP).kernel.id == "cpu.exp.slow"
    assert capsys.readouterr().err.count("are spent") == 1


def test_deterministic_is_a_key_of_its_own_and_admits_no_other(rivals, monkeypatch):
    loose = Rival("loose", right, 1)
    loose.deterministic = False
    rivals(loose)
    monkeypatch.setattr(config, "deterministic", True)
    assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"
    with select.policy("off"):
        assert select.choose(problem(5001), CPU, OP).kernel.id == "cpu.exp.numpy"


def test_what_cannot_be_kept_is_used_all_the_same(rivals, monkeypatch):
    rivals(Rival("slow", slow, 1))
    monkeypatch.setattr(select.store(), "record", lambda *a: False)
    select.choose(problem(), CPU, OP)
    monkeypatch.setattr(worker, "trials", lambda *a, **k: pytest.fail("it measured again"))
    assert select.choose(problem(), CPU, OP).kernel.id == "cpu.exp.numpy"


def test_lock_round_trip(rivals, monkeypatch, tmp_path):
    slower = Rival("slow", slow, 200)
    rivals(slower)
    lock = Lock(tmp_path / "lock.json")
    lock.set(problem_text(problem()), Choice("cpu.exp.slow"))
    lock.set(problem_text(problem(5001)), Choice("cpu.exp.gone"))
    lock.set(problem_text(problem(5002)), Choice("cpu.exp.slow", (), 7))
    lock.write()
    monkeypatch.setattr(config, "lock", str(tmp_path / "lock.json"))
    assert select.choose(problem(), CPU, OP).kernel is slower
    with pytest.raises(KernelError, match="no such kernel"):
        select.choose(problem(5001), CPU, OP)
    with pytest.raises(KernelError, match="pinned in version 7"):
        select.choose(problem(5002), CPU, OP)
    with pytest.raises(KernelError, match="pins no kernel for exp"):
        select.choose(problem(5003), CPU, OP)


def test_policy_is_restored_and_checked():
    before = config.tune
    with pytest.raises(ZeroDivisionError), select.policy("full"):
        1 / 0
    assert config.tune == before
    with pytest.raises(ArgumentError, match="tune policy 'sometimes'"), select.policy("sometimes"):
        pass


@pytest.mark.parametrize("value", ["-1", "many"])
def test_settings_are_checked(value, monkeypatch):
    for read, name in ((settings._count, "TILEWRIGHT_PLANS"), (settings._policy, "TILEWRIGHT_TUNE")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ArgumentError, match=f"{name}='{value}'"):
            read(*((name, 4) if read is settings._count else (name,)))
    monkeypatch.setenv("TILEWRIGHT_TUNE_PROBLEM_S", value)
    with pytest.raises(ArgumentError, match="seconds"):
        settings._seconds("TILEWRIGHT_TUNE_PROBLEM_S", 0.25)
