"""The choice of a kernel for a problem: pinned by a lock file, kept from an earlier measurement, measured now, or by rank.

What is measured holds for exactly one problem, device, set of versions and number of threads. Nothing here knows any
particular kind of device.
"""

from __future__ import annotations

import math
import operator
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from tilewright.config import POLICIES, config
from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Unusable
from tilewright.errors import ArgumentError, KernelError
from tilewright.tune import worker
from tilewright.tune.bench import FEWEST, SETTLED, rank, standard_error
from tilewright.tune.check import Material, describe
from tilewright.tune.load import Load
from tilewright.tune.lock import Lock
from tilewright.tune.store import Key, Store, Timed, Trial, problem_text, source_hash

Candidate = tuple[Kernel, Config]

WHOLE = 1 << 23  # elements of all operands up to which a whole reference fits the time allowed at first sight
SLOW = 1e8  # operations, or elements, beyond which generic kernels are not tried at first sight
GENERIC = 100  # the rank from which a kernel is one that takes anything
FULL_S = 5.0  # seconds a problem by the policy "full"
FEW = 3  # samples below which a candidate is not believed to be faster
# So many samples, and so many times the best median: a candidate that is beyond has lost for good. The first launch of all is
# slower than the next, so that few samples say little.
LOST = ((8, 1.0), (5, 1.05), (3, 1.3), (1, 2.5))
SAY_AFTER_S = 1.0  # measuring that takes longer than this in all is told of


class Choice:
    """A kernel, its config, and a launch ready to run; another one from the moment its launch failed and the next took over."""

    __slots__ = ("config", "kernel", "launch")

    def __init__(self, kernel: Kernel, config: Config, launch: Launch) -> None:
        self.kernel, self.config, self.launch = kernel, config, launch


@contextmanager
def policy(name: str) -> Iterator[None]:
    """Within the block, choose for problems not met before by this policy: "off", "cached", "auto" or "full"."""
    if name not in POLICIES:
        raise ArgumentError(f"tune policy {name!r} is not known; it must be one of {', '.join(POLICIES)}")
    before, config.tune = config.tune, name
    try:
        yield
    finally:
        config.tune = before


def choose(problem: Problem, device: Device, op: Any = None) -> Choice:
    """The kernel for a problem. `op`: its Op, without which nothing is measured. Raises KernelError with every candidate's reason.

    In order: the lock file's choice (TILEWRIGHT_LOCK; not by the policy "off"); by policy the stored one ("cached", "auto", "full"), or one
    measured now ("auto": within a budget; "full": all there is); else the first in rank that takes the problem.
    """
    if config.lock and config.tune != "off":
        return _pinned(problem, device)
    if config.tune == "off":
        return _first(_by_rank(problem, device), problem, device)
    kernels = device.kernels(problem.op)
    if len(kernels) < 2 and len(candidates(problem, device)) < 2:
        return _first(_by_rank(problem, device), problem, device)
    key = key_of(problem, device)
    trials = _stored(key, problem, device)
    order = ranked(trials, problem, device)
    if config.tune != "cached" and op is not None and not settled(trials):
        order = _measured_now(key, problem, device, op) or order
    return _first(chain(order, _by_rank(problem, device)), problem, device, key)


# -- candidates --------------------------------------------------------------------------------------------------------


def reasons_against(kernel: Kernel, problem: Problem, device: Device) -> list[str]:
    """Why the kernel may not be taken for the problem; empty when it may."""
    reasons = list(kernel.reject(problem, device))
    if config.deterministic and not kernel.deterministic:
        reasons.append("it is not deterministic")
    return reasons


def candidates(problem: Problem, device: Device) -> list[Candidate]:
    """Every kernel that may be taken with every config it offers, in rank order."""
    return [(k, c) for k in device.kernels(problem.op) if not reasons_against(k, problem, device) for c in k.configs(problem, device)]


def _by_rank(problem: Problem, device: Device) -> Iterator[tuple[Kernel, Config | None]]:
    """Every kernel, with its own default config (None, to be asked for once it has not rejected the problem)."""
    return ((k, None) for k in device.kernels(problem.op))


def _first(order: Iterable[tuple[Kernel, Config | None]], problem: Problem, device: Device, key: Key | None = None) -> Choice:
    """The first that takes the problem and can be prepared; the rest stand by for a launch that fails."""
    refused: dict[str, str] = {}
    rest = iter(order)
    choice = _next(rest, problem, device, refused)
    if choice is None:
        why = "\n  ".join(f"{k}: {r}" for k, r in refused.items()) or f"no kernel for {problem.op} is registered"
        raise KernelError(f"no kernel on {device.name} takes {problem}:\n  {why}")
    if len(device.kernels(problem.op)) > 1:
        _stand_by(choice, rest, problem, device, key)
    return choice


def _next(rest: Iterator[tuple[Kernel, Config | None]], problem: Problem, device: Device, refused: dict[str, str]) -> Choice | None:
    for kernel, settings in rest:
        reasons = reasons_against(kernel, problem, device)
        if not reasons:
            try:
                settings = next(iter(kernel.configs(problem, device))) if settings is None else settings
                return Choice(kernel, settings, kernel.prepare(problem, settings, device))
            except (Unusable, RuntimeError, MemoryError) as error:
                reasons.append(str(error))
        refused[kernel.id] = "; ".join(reasons)
    return None


def _stand_by(choice: Choice, rest: Iterator[tuple[Kernel, Config | None]], problem: Problem, device: Device, key: Key | None) -> None:
    """Let the next in order take over where a launch fails or lacks workspace; bad input still raises what it raises."""
    run = choice.launch

    def launch(inputs: Any, outputs: Any) -> None:
        nonlocal run
        try:
            run(inputs, outputs)
            return
        except (Unusable, RuntimeError, MemoryError) as error:
            first = error
        while True:
            if key is not None:
                status = "over-limit" if isinstance(first, MemoryError) else "failed"
                k = choice.kernel
                store().record(key, [Trial(k.id, choice.config, k.version, source_hash(k), status, reason=describe(first))])
            other = _next(rest, problem, device, {})
            if other is None:
                raise first
            choice.kernel, choice.config, run = other.kernel, other.config, other.launch
            try:
                run(inputs, outputs)
                return
            except (Unusable, RuntimeError, MemoryError):
                continue

    choice.launch = launch


# -- what is known -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def store() -> Store:
    """The user's store of trials."""
    return Store()


_unkept: dict[Key, list[Trial]] = {}  # for this process: what the store would not take, or was timed on a busy machine


def key_of(problem: Problem, device: Device) -> Key:
    name, driver, library, threads = device.identity()
    return Key(problem_text(problem), name, driver, library, problem.precision, threads, config.deterministic)


def current(kernels: Iterable[Kernel]) -> dict[str, tuple[int, str]]:
    """kernel id -> (version, source hash), as the kernels are now."""
    return {k.id: (k.version, source_hash(k)) for k in kernels}


class _Entry(NamedTuple):
    """A trial as `rank` takes it."""

    median: Any  # seconds; never None where it is timed
    spread: float | None
    count: int
    status: str = "ok"


def ranked(trials: Iterable[Trial | Timed], problem: Problem, device: Device) -> list[Candidate]:
    """The usable trials' candidates, best first; the default before those that do not beat it by more than the noise."""
    kernels = {k.id: k for k in device.kernels(problem.op)}
    usable = [t for t in trials if t.status == "ok" and t.kernel in kernels]
    if not usable:
        return []
    there = {t.kernel for t in usable}
    first = next(k for k in kernels if k in there)
    incumbent = (first, next(iter(kernels[first].configs(problem, device)), ()))
    usable.sort(key=_by_median)
    best = usable[0]
    if (best.kernel, best.config) == incumbent:
        return [(kernels[t.kernel], t.config) for t in usable]
    timings = {(t.kernel, t.config): _Entry(t.median_s, t.spread_s, t.count) for t in usable}
    own = timings.get(incumbent)
    sure = {c: t for c, t in timings.items() if t.count >= FEW}
    if own is not None and incumbent not in sure:  # then only who is far ahead of it is believed
        sure = {c: t for c, t in sure.items() if 2 * t.median < own.median} | {incumbent: own}
    order = rank(sure, incumbent)
    order += [c for c in timings if c not in order]
    return [(kernels[k], c) for k, c in order]


_by_median = operator.attrgetter("median_s")


def settled(trials: Sequence[Trial | Timed]) -> bool:
    """Are the trials enough to choose by: has each been timed often enough for how far it is behind the best one?

    Where the time for a problem did not reach, they have not (see `kept`), and the next process goes on.
    """
    usable = [t for t in trials if t.status == "ok" and t.median_s is not None]
    if not usable:
        return False
    best = min([t.median_s for t in usable if t.median_s is not None])
    return all(_done(t, best) for t in usable)


def _done(t: Trial | Timed, best: float) -> bool:
    """Does a candidate need no more samples, where `best` is the lowest median?"""
    if t.status != "ok" or t.median_s is None:
        return True
    limit = next((times for least, times in LOST if t.count >= least), math.inf)
    sure = t.spread_s is not None and t.count >= FEWEST and standard_error(t.spread_s, t.count) <= SETTLED * t.median_s
    return sure or t.median_s >= best * limit


def _stored(key: Key, problem: Problem, device: Device) -> Sequence[Trial | Timed]:
    """Trials of the kernels as they are now."""
    return _unkept.get(key) or store().ranking(key, current(device.kernels(problem.op)), ahead=True)


# -- measuring ---------------------------------------------------------------------------------------------------------

_measuring = threading.RLock()  # one at a time, or they would time each other
_seen: set[Key] = set()  # what this process has measured
_spent = 0.0
_met = 0
_told: set[str] = set()


def _say(once: str, message: str) -> None:
    if once not in _told:
        _told.add(once)
        print(f"tilewright: {message}", file=sys.stderr, flush=True)


def _measured_now(key: Key, problem: Problem, device: Device, op: Any) -> list[Candidate]:
    """Measure within what is left of this process's time; [] where it is not worth it or there is none left.

    Once in a process for each problem: what its time did not reach is left to the next process.
    """
    global _spent, _met
    full = config.tune == "full"
    with _measuring:
        known = _unkept.get(key) or store().trials(key)
        if key in _seen:  # another thread may have come first
            return ranked(known, problem, device)
        left = config.tune_process_s - _spent
        if not full and left <= 0:
            _say("spent", f"the {config.tune_process_s:g} s for measuring kernels are spent; `tilewright tune` measures the rest ahead of time")
            return []
        _seen.add(key)
        began, load = time.perf_counter(), Load()
        try:
            trials = measure(problem, device, op, budget_s=FULL_S if full else min(config.tune_problem_s, left), known=known)
        finally:
            _spent += time.perf_counter() - began
        disturbed = load.disturbed(device.identity()[3])
        _met += 1
        if _spent > SAY_AFTER_S:
            _say("long", f"measuring kernels for this device ({_met} problems so far); what is found is kept, TILEWRIGHT_TUNE=off does without")
        if disturbed:
            _say("load", "other programs keep the processor busy: what is measured now counts for this process only")
        if trials and (disturbed or not store().record(key, trials)):
            _unkept[key] = trials
        return ranked(trials, problem, device)


def measure(problem: Problem, device: Device, op: Any, *, budget_s: float, known: Iterable[Trial] = ()) -> list[Trial]:
    """Check and time the candidates for a problem in this process, within so many seconds: a trial for each that had its turn.

    known: trials of earlier times. Their losers are left out, those found right are not checked again, and the others'
    times are joined with the new ones; candidates without a trial come first.

    Left to `tilewright tune`, which takes its time: an op whose reference must be computed whole on large operands, and
    generic kernels, those far down in rank, for work that they take too long over.
    """
    began = time.perf_counter()
    rivals = candidates(problem, device)
    size = sum([s.size for s in (*problem.inputs, *problem.outputs) if s is not None])
    if op.reference_at is None and size > WHOLE:
        return []
    if max(op.cost(problem.attrs, *problem.inputs).flops, size) > SLOW:
        rivals = [c for i, c in enumerate(rivals) if not i or c[0].rank < GENERIC]
    if len(rivals) < 2:
        return []
    now = current(device.kernels(problem.op))
    before = {(t.kernel, t.config): t for t in known if now.get(t.kernel) == (t.version, t.source)}
    best = min((t.median_s for t in before.values() if t.status == "ok" and t.median_s is not None), default=0.0)
    lost = {c for c, t in before.items() if t.status != "ok" or ((t.median_s or 0.0) > best and _done(t, best))}
    rivals = [c for c in rivals if (c[0].id, c[1]) not in lost]
    rivals.sort(key=lambda c: (c[0].id, c[1]) in before)  # stable: in rank order within
    try:
        material = Material(op, problem)
    except (KernelError, MemoryError):
        return []
    left = budget_s - (time.perf_counter() - began)
    if left <= 0 or not rivals:
        return list(before.values())
    found, _ = worker.trials(problem, device, rivals, material, budget_s=left, checked=[c for c in rivals if (c[0].id, c[1]) in before])
    fresh = [_joined(before.get((t.kernel, t.config)), t) for t in kept(found, rivals)]
    met = {(t.kernel, t.config) for t in fresh}
    return [*fresh, *[t for c, t in before.items() if c not in met]]


def _joined(old: Trial | None, new: Trial) -> Trial:
    """A candidate's times of two occasions as one trial; they are weighted by their counts."""
    if old is None or old.status != "ok" or new.status != "ok" or old.median_s is None or new.median_s is None:
        return new
    n = old.count + new.count
    median = (old.median_s * old.count + new.median_s * new.count) / n
    spreads = [s for s in (old.spread_s, new.spread_s) if s is not None]
    return replace(new, median_s=median, spread_s=max(spreads, default=None), count=n)


def measure_apart(problem: Problem, device: Device, by: worker.Worker, *, budget_s: float, cold: bool = False) -> list[Trial]:
    """As `measure`, of every candidate, in a worker process that may hang or crash. Raises KernelError where there are no operands."""
    rivals = candidates(problem, device)
    found = list(by.measure(problem, rivals, budget_s=budget_s, cold=cold))
    return kept(found, rivals)


def is_known(problem: Problem, device: Device, rivals: list[Candidate]) -> bool:
    """Is there a trial of each of these candidates, as they are now, and a closely timed one among them?"""
    now = current(device.kernels(problem.op))
    trials = {(t.kernel, t.config): t for t in store().trials(key_of(problem, device)) if now.get(t.kernel) == (t.version, t.source)}
    return all((k.id, c) in trials for k, c in rivals) and any(t.count >= FEW or t.status != "ok" for t in trials.values())


def kept(found: Iterable[worker.Trial], rivals: Iterable[Candidate]) -> list[Trial]:
    """What is worth keeping of a worker's trials: all but those that had no turn.

    Where there are such, no count is written that would say that measuring has ended (see `settled`).
    """
    kernels = {k.id: k for k, _ in rivals}
    found = list(found)
    most = LOST[0][0] - 1 if any(t.status == "skipped" for t in found) else sys.maxsize
    return [
        Trial(
            t.kernel, t.config, kernels[t.kernel].version, source_hash(kernels[t.kernel]), t.status, t.median, t.spread, min(t.count, most), t.reason
        )
        for t in found
        if t.status != "skipped" and not (t.status == "ok" and t.median is None)
    ]


# -- lock files --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _lock(path: str) -> Lock:
    return Lock.read(path)


def _pinned(problem: Problem, device: Device) -> Choice:
    lock = _lock(config.lock)
    text = problem_text(problem)
    pin = lock.get(text, device.kind)
    if pin is None:
        if len(candidates(problem, device)) > 1:
            raise KernelError(lock.missing(text, device.kind))
        return _first(_by_rank(problem, device), problem, device)
    kernel = next((k for k in device.kernels(problem.op) if k.id == pin.kernel), None)
    if kernel is None:
        reasons = ["this Tilewright has no such kernel"]
    elif kernel.version != pin.version:
        reasons = [f"it was pinned in version {pin.version} and is now {kernel.version}"]
    else:
        reasons = reasons_against(kernel, problem, device)
        if not reasons and pin.config not in list(kernel.configs(problem, device)):
            reasons = [f"it does not offer the config {pin.config} here"]
    if reasons or kernel is None:
        raise KernelError(
            f"{lock.path}: pins {pin.kernel} for {problem}, which cannot be: {'; '.join(reasons)}; make the lock anew with `tilewright tune --lock`"
        )
    return Choice(kernel, pin.config, kernel.prepare(problem, pin.config, device))


# -- explaining --------------------------------------------------------------------------------------------------------


def explain(problem: Problem, device: Device) -> list[dict[str, Any]]:
    """Every candidate, best first: `kernel`, `config`, `status` ("ok", "wrong", ..., "unmeasured" or "rejected"), `median_s`, `spread_s`
    (None if not timed) and `reasons` (why it is not taken; empty for the one that is and for slower ones)."""
    kernels = device.kernels(problem.op)
    key = key_of(problem, device)
    now = current(kernels)
    trials = {(t.kernel, t.config): t for t in [*_unkept.get(key, []), *store().trials(key)] if now.get(t.kernel) == (t.version, t.source)}
    rows: list[dict[str, Any]] = []
    for kernel in kernels:
        reasons = reasons_against(kernel, problem, device)
        if reasons:
            rows.append({"kernel": kernel.id, "config": (), "status": "rejected", "median_s": None, "spread_s": None, "reasons": reasons})
            continue
        for settings in kernel.configs(problem, device):
            t = trials.get((kernel.id, settings))
            if t is None:
                row = {"status": "unmeasured", "median_s": None, "spread_s": None, "reasons": []}
            else:
                row = {"status": t.status, "median_s": t.median_s, "spread_s": t.spread_s, "reasons": [t.reason] if t.reason else []}
            rows.append({"kernel": kernel.id, "config": settings, **row})
    place = {(k.id, c): i for i, (k, c) in enumerate(ranked(trials.values(), problem, device))}
    return sorted(rows, key=lambda r: (r["status"] == "rejected", place.get((r["kernel"], r["config"]), len(place))))
