"""Timing on a machine whose clock stands still but for the launches: nothing here depends on how fast the tests run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tilewright.devices.api import Device
from tilewright.tune.bench import FEWEST, MOST, SAMPLE_S, Flush, Timing, bench, quantile, rank, standard_error


class Machine:
    """Launches that take as long as they are told, on a clock of their own; keeps the order in which they ran."""

    def __init__(self):
        self.now = 0.0
        self.ran = []

    def clock(self):
        return self.now

    def launch(self, name, *costs, noise=0.0, bursts=0.0, seed=0):
        """Takes `costs` in turn (the last one from then on), up to (1 + noise) times; with chance `bursts` ten times as long."""
        rng = np.random.default_rng(seed)
        plan = itertools.chain(costs, itertools.repeat(costs[-1]))

        def run(inputs, outputs):
            self.ran.append(name)
            cost = next(plan)
            if isinstance(cost, Exception):
                raise cost
            self.now += cost * (1 + noise * rng.random()) * (10 if rng.random() < bursts else 1)

        return run

    def bench(self, candidates, **options):
        return bench(candidates, lambda: ([], []), clock=self.clock, **options)

    def rivals(self, noise=0.0, bursts=0.0, seed=0, **costs):
        return {n: self.launch(n, c, noise=noise, bursts=bursts, seed=seed * 100 + i) for i, (n, c) in enumerate(costs.items())}


def test_the_best_of_noisy_rivals_is_picked():
    """Each time within 3 % of the best, among rivals some of which are as close, with a fifth of noise and some bursts."""
    for seed in range(40):
        machine = Machine()
        found = machine.bench(machine.rivals(0.2, 0.05, seed, d=1.3e-3, c=1.15e-3, b=1.02e-3, a=1e-3, e=4e-3), budget_s=2.0)
        assert found.ranking[0] in "ab", (seed, found)
        assert set(found.ranking[2:]) == set("cde")


@pytest.mark.parametrize("budget", [0.0, 1e-5, 0.001, 0.03, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("costs", [(1e-6, 3e-6), (4e-4, 5e-4, 6e-4), (0.01, 0.011, 0.012), (0.09, 0.2, 0.05), (0.7, 0.001)])
def test_the_budget_is_overrun_by_one_launch_at_most(budget, costs):
    machine = Machine()
    found = machine.bench({i: machine.launch(i, c, noise=0.3, seed=i) for i, c in enumerate(costs)}, budget_s=budget)
    assert machine.now <= budget + 1.3 * max(*costs, SAMPLE_S)
    assert found.seconds == machine.now
    for timing in found.timings.values():
        assert (timing.status, timing.count > 0) in (("ok", True), ("skipped", False))
    assert set(found.ranking) == {k for k, t in found.timings.items() if t.count}


def test_whom_the_budget_does_not_reach_is_skipped():
    machine = Machine()
    found = machine.bench(machine.rivals(a=0.2, b=0.1, c=0.1), budget_s=0.25)
    assert machine.ran == ["a", "b"]
    assert [found.timings[k].status for k in "abc"] == ["ok", "ok", "skipped"]
    assert found.timings["c"].reason == "the 0.25 s allowed were spent before its turn"
    assert found.ranking == ["b", "a"]
    assert not found.settled


def test_a_slow_rival_that_no_longer_fits_does_not_stop_the_others():
    machine = Machine()
    machine.bench(machine.rivals(slow=0.24, a=0.05, b=0.0501), budget_s=0.9)
    last = len(machine.ran) - machine.ran[::-1].index("slow")
    assert machine.ran.count("slow") == 2
    assert sorted(machine.ran[last:]) == ["a", "a", "b", "b"]
    assert machine.now <= 0.9


def test_losers_are_dropped_early():
    machine = Machine()
    found = machine.bench(machine.rivals(0.1, a=1e-3, near=1.01e-3, far=1.2e-3, twice=2e-3, hopeless=8e-3), budget_s=10.0)
    ran = {k: machine.ran.count(k) for k in found.timings}
    assert ran["hopeless"] == 2
    assert ran["twice"] <= 1 + 3
    assert ran["far"] <= 1 + 8
    assert ran["a"] == ran["near"] > ran["far"]
    assert [k for k, t in found.timings.items() if t.dropped] == ["far", "twice", "hopeless"]
    assert found.ranking[-1] == "hopeless"
    assert found.timings["hopeless"].count == 1


def test_a_disturbed_first_launch_does_not_lose():
    """Nor a disturbed half of all: the shortest launch says what a kernel can do."""
    machine = Machine()
    better = machine.launch("better", 1.0, *[0.9e-3, 5e-3] * 3, 0.9e-3)
    found = machine.bench({"good": machine.launch("good", 1e-3), "better": better}, budget_s=5.0)
    assert found.ranking == ["better", "good"]


def test_known_launches_count():
    machine = Machine()
    slow_now = machine.launch("b", 0.01, 0.01, 0.01, 0.01, 0.9e-3)
    found = machine.bench({"a": machine.launch("a", 1e-3, noise=0.5), "b": slow_now}, known={"b": 0.9e-3}, budget_s=5.0)
    assert found.ranking[0] == "b"


def test_the_incumbent_stays_unless_beaten_by_more_than_the_noise():
    for new, wins in ((1.0e-3, False), (0.995e-3, False), (0.97e-3, True), (0.8e-3, True), (1.2e-3, False)):
        machine = Machine()
        found = machine.bench(machine.rivals(old=1e-3, new=new), incumbent="old", budget_s=1.0)
        assert (found.ranking[0] == "new") == wins, new
        machine = Machine()
        assert machine.bench(machine.rivals(old=1e-3, new=new), budget_s=1.0).ranking[0] == ("new" if new < 1e-3 else "old")


def test_noise_decides_for_the_incumbent():
    def timing(median, spread, count):
        return Timing(samples=[median - spread / 2, median, median + spread / 2] * (count // 3))

    close = {"old": timing(1.0, 0.2, 9), "new": timing(0.95, 0.2, 9)}
    assert rank(close, "old") == ["old", "new"]
    assert rank(close) == ["new", "old"]
    assert rank({"old": timing(1.0, 0.2, 999), "new": timing(0.95, 0.2, 999)}, "old") == ["new", "old"]
    assert rank(close | {"bad": Timing("failed", "it raised", [0.1]), "late": Timing("skipped")}, "bad") == ["new", "old"]
    assert rank({"old": Timing(samples=[1.0]), "new": Timing(samples=[0.9])}, "old") == ["new", "old"]
    assert rank({}, "old") == []


@pytest.mark.parametrize("when", [0, 1, 3, 30])
def test_a_candidate_that_raises_fails_and_the_others_go_on(when):
    machine = Machine()
    bad = machine.launch("bad", *[0.5e-3] * when, ValueError("tile 7 is\nodd"))
    candidates = {"a": machine.launch("a", 1e-3, noise=0.4, seed=1), "bad": bad, "b": machine.launch("b", 1.01e-3, noise=0.4, seed=2)}
    found = machine.bench(candidates, budget_s=10.0)
    if when < 30:
        assert (found.timings["bad"].status, found.timings["bad"].reason) == ("failed", "it raised ValueError: tile 7 is")
        assert machine.ran.count("bad") == when + 1
        assert "bad" not in found.ranking
        assert set(found.ranking) == {"a", "b"}


def test_interrupts_go_through():
    machine = Machine()

    def stop(inputs, outputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.bench({"a": machine.launch("a", 1e-3), "b": stop})


def test_it_ends_when_the_medians_have_settled():
    machine = Machine()
    found = machine.bench(machine.rivals(a=1e-3, b=1.02e-3), budget_s=100.0)
    assert found.settled
    assert [t.count for t in found.timings.values()] == [FEWEST, FEWEST]
    machine = Machine()
    noisy = machine.bench(machine.rivals(0.3, a=1e-3, b=1.02e-3), budget_s=100.0)
    assert noisy.settled
    assert all(FEWEST < t.count < MOST for t in noisy.timings.values())
    assert all(standard_error(t.spread, t.count) <= 0.01 * t.median for t in noisy.timings.values())
    machine = Machine()
    wild = machine.bench(machine.rivals(30.0, a=1e-3, b=1e-3), budget_s=1000.0)
    assert not wild.settled
    assert [t.count for t in wild.timings.values()] == [MOST, MOST]


def test_short_launches_are_repeated_within_a_sample():
    machine = Machine()
    found = machine.bench(machine.rivals(a=1e-6, b=1.5e-6, c=30e-6), budget_s=1.0)
    for key, cost in (("a", 1e-6), ("b", 1.5e-6), ("c", 30e-6)):
        timing = found.timings[key]
        assert timing.repeats * cost >= SAMPLE_S
        assert timing.repeats * cost < 3 * max(SAMPLE_S, cost)
        assert timing.median == pytest.approx(cost)


def test_a_clock_too_coarse_for_a_launch():
    machine = Machine()
    found = bench({"a": machine.launch("a", 1e-9)}, lambda: ([], []), clock=lambda: round(machine.now, 6), budget_s=1.0)
    assert found.timings["a"].repeats == 4096
    assert found.timings["a"].status == "ok"


def test_rivals_take_turns():
    machine = Machine()
    machine.bench(machine.rivals(a=1e-3, b=1e-3, c=1e-3), budget_s=1.0)
    rounds = ["".join(machine.ran[i : i + 3]) for i in range(0, len(machine.ran), 3)]
    assert rounds[0] == "abc"  # to warm up
    assert all(sorted(r) == list("abc") for r in rounds)
    assert {r[0] for r in rounds[1:]} == set("abc")  # none is always first


def test_cold_caches():
    machine = Machine()
    flushes = []

    def flush():
        flushes.append(len(machine.ran))
        machine.now += 2e-3

    found = machine.bench(machine.rivals(a=1e-6, b=2e-6), cold=True, flush=flush, budget_s=0.1)
    assert flushes == list(range(len(machine.ran)))  # before every launch, so none is repeated within a sample
    assert [t.repeats for t in found.timings.values()] == [1, 1]
    assert found.timings["a"].median == pytest.approx(1e-6)  # its time is not the flush's
    assert machine.now <= 0.1 + 2e-3 + 2e-6
    without = Machine()
    without.bench(without.rivals(a=1e-3), flush=flush, budget_s=0.1)
    assert len(flushes) == len(machine.ran)


def test_flush_touches_all_of_its_memory():
    flush = Flush(1 << 16)
    flush()
    assert flush.memory.nbytes == 1 << 16
    assert (flush.memory == 1).all()


def test_a_device_may_time_itself():
    """By its own events b is faster, though the host waits longer for it."""
    machine = Machine()
    costs = {"a": 2e-3, "b": 1e-3}

    def events(run, clock):
        first = len(machine.ran)
        run()
        return sum(costs[k] for k in machine.ran[first:])

    candidates = {"a": machine.launch("a", 1e-3), "b": machine.launch("b", 4e-3)}
    found = machine.bench(candidates, timer=events, budget_s=1.0)
    assert found.ranking == ["b", "a"]
    assert found.timings["b"].median == pytest.approx(1e-3)


def test_a_device_waits_for_its_work_before_the_clock_is_read():
    machine = Machine()
    queued = [0.5]

    def synchronize():
        machine.now += sum(queued)
        queued.clear()

    device = SimpleNamespace(synchronize=synchronize)
    assert Device.seconds(device, lambda: queued.append(0.25), machine.clock) == 0.25  # pyright: ignore[reportArgumentType]


def test_who_comes_next_and_who_is_finished_is_told():
    machine = Machine()
    announced, finished = [], []
    candidates = machine.rivals(0.1, a=1e-3, b=3e-3, c=1.01e-3) | {"bad": machine.launch("bad", ValueError())}
    found = machine.bench(candidates, before=announced.append, finished=lambda k, t: finished.append((k, t.status)), budget_s=1.0)
    assert announced == machine.ran
    assert sorted(finished) == [("a", "ok"), ("b", "ok"), ("bad", "failed"), ("c", "ok")]
    assert finished[:2] == [("bad", "failed"), ("b", "ok")]  # as soon as it is known
    assert found.timings["b"].dropped


def test_one_clock_gives_one_result():
    def once():
        machine = Machine()
        return machine.bench(machine.rivals(0.3, 0.1, 5, a=1e-3, b=1.05e-3, c=1.4e-3), budget_s=0.5), machine.ran

    assert once() == once()


def test_quantiles_are_numpys():
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 4, 10, 33):
        values = rng.random(n).tolist()
        for q in (0.25, 0.5, 0.75):
            assert quantile(values, q) == pytest.approx(np.quantile(values, q))
