"""The choice of a kernel for a problem: pinned by a lock file, kept from an earlier measurement, measured now, or by rank.

What is measured holds for exactly one problem, device, set of versions and number of threads. Nothing here knows any
particular kind of device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from tilewright.config import POLICIES, config
from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Unusable
from tilewright.errors import ArgumentError, KernelError
from tilewright.tune.bench import HostTimer, bench, rank
from tilewright.tune.check import Material, check, describe
from tilewright.tune.lock import Lock
from tilewright.tune.store import Key, Store, Trial, problem_text, source_hash

Candidate = tuple[Kernel, Config]

# Elements of all operands up to which a reference that must be computed whole fits the time allowed at first sight.
WHOLE = 1 << 20
FEW = 3  # samples below which a candidate is not believed to be faster
FAR = 5.0  # times the leader's time seen while checking: not worth a closer look
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

    In order: the lock file's choice (TILEWRIGHT_LOCK); by policy the stored one ("cached", "auto", "full"), or one
    measured now ("auto": within a budget; "full": all there is); else the first in rank that takes the problem.
    """
    if config.lock:
        return _pinned(problem, device)
    if config.tune == "off" or op is None:
        return _first(_by_rank(problem, device), problem, device)
    kernels = device.kernels(problem.op)
    if len(kernels) < 2 and len(_candidates(problem, device)) < 2:
        return _first(_by_rank(problem, device), problem, device)
    key = key_of(problem, device)
    order = _stored(key, problem, device)
    if not order and config.tune != "cached":
        order = _at_first_sight(key, problem, device, op)
    return _first(chain(order, _by_rank(problem, device)), problem, device, key)


# -- candidates --------------------------------------------------------------------------------------------------------


def reasons_against(kernel: Kernel, problem: Problem, device: Device) -> list[str]:
    """Why the kernel may not be taken for the problem; empty when it may."""
    reasons = list(kernel.reject(problem, device))
    if config.deterministic and not kernel.deterministic:
        reasons.append("it is not deterministic")
    return reasons


def _candidates(problem: Problem, device: Device) -> list[Candidate]:
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
                store().record(key, [_trial(choice.kernel, choice.config, status, reason=describe(first))])
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


_unkept: dict[Key, list[Trial]] = {}  # what the store would not take, for this process


def key_of(problem: Problem, device: Device) -> Key:
    name, driver, library, threads = device.identity()
    return Key(problem_text(problem), name, driver, library, problem.precision, threads, config.deterministic)


def current(kernels: Iterable[Kernel]) -> dict[str, tuple[int, str]]:
    """kernel id -> (version, source hash), as the kernels are now."""
    return {k.id: (k.version, source_hash(k)) for k in kernels}


class _Timed(NamedTuple):
    status: str
    median: Any  # seconds; never None where it is timed
    spread: float | None
    count: int


def ranked(trials: Iterable[Trial], problem: Problem, device: Device) -> list[Candidate]:
    """The usable trials' candidates, best first; the default before those that do not beat it by more than the noise."""
    kernels = {k.id: k for k in device.kernels(problem.op)}
    usable = [t for t in trials if t.status == "ok" and t.median_s is not None and t.kernel in kernels]
    timings = {(t.kernel, t.config): _Timed("ok", t.median_s, t.spread_s, t.count) for t in usable}
    first = next((k for k in kernels if any(c[0] == k for c in timings)), None)
    if first is None:
        return []
    incumbent = (first, next(iter(kernels[first].configs(problem, device)), ()))
    sure = {c: t for c, t in timings.items() if t.count >= FEW}
    order = rank(sure, incumbent) if incumbent in sure or incumbent not in timings else [incumbent]
    order += sorted([c for c in timings if c not in order], key=lambda c: timings[c].median)
    return [(kernels[k], c) for k, c in order]


def _stored(key: Key, problem: Problem, device: Device) -> list[Candidate]:
    return ranked(store().ranking(key, current(device.kernels(problem.op))) or _unkept.get(key, []), problem, device)


def _trial(kernel: Kernel, settings: Config, status: str, timing: Any = None, reason: str = "") -> Trial:
    median = spread = None
    count = 0
    if timing is not None:
        median, count = timing.median, timing.count
        spread = timing.spread if count > 1 else None
    return Trial(kernel.id, settings, kernel.version, source_hash(kernel), status, median, spread, count, reason)


# -- measuring ---------------------------------------------------------------------------------------------------------

_measuring = threading.RLock()  # one at a time, or they would time each other
_spent = 0.0
_met = 0
_told: set[str] = set()


def _say(once: str, message: str) -> None:
    if once not in _told:
        _told.add(once)
        print(f"tilewright: {message}", file=sys.stderr, flush=True)


def _at_first_sight(key: Key, problem: Problem, device: Device, op: Any) -> list[Candidate]:
    """Measure within what is left of this process's time; [] where it is not worth it or there is none left."""
    global _spent, _met
    full = config.tune == "full"
    with _measuring:
        known = _stored(key, problem, device)  # another thread may have come first
        if known:
            return known
        left = config.tune_process_s - _spent
        if not full and left <= 0:
            _say("spent", f"the {config.tune_process_s:g} s for measuring kernels are spent; `tilewright tune` measures the rest ahead of time")
            return []
        began = time.perf_counter()
        try:
            trials = measure(problem, device, op, budget_s=None if full else min(config.tune_problem_s, left))
        finally:
            _spent += time.perf_counter() - began
        _met += 1
        if _spent > SAY_AFTER_S:
            _say("long", f"measuring kernels for this device ({_met} problems so far); what is found is kept, TILEWRIGHT_TUNE=off does without")
        if trials and not store().record(key, trials):
            _unkept[key] = trials
        return ranked(trials, problem, device)


def measure(problem: Problem, device: Device, op: Any, *, budget_s: float | None = None, cold: bool = False) -> list[Trial]:
    """Check and time every candidate for a problem, in rank order: a trial for each that had its turn.

    budget_s: seconds for all of it, making the operands and the reference included (None: as long as it takes, at most
    five seconds of timing). A problem with one candidate, or whose reference would not fit the budget, has no trials.
    """
    clock = time.perf_counter
    began = clock()
    candidates = _candidates(problem, device)
    if len(candidates) < 2:
        return []
    if budget_s is not None and op.reference_at is None:
        if sum([s.size for s in (*problem.inputs, *problem.outputs) if s is not None]) > WHOLE:
            return []
    try:
        material = Material(op, problem)
    except (KernelError, MemoryError):
        return []
    trials: dict[tuple[str, Config], Trial] = {}
    launches: dict[Candidate, Launch] = {}
    seen: dict[Candidate, float] = {}
    for kernel, settings in candidates:
        if budget_s is not None and launches:
            # What may be a launch of this one: generic kernels, those far down in rank, are many times slower where a problem is large.
            expected = min(seen.values()) * (20 if kernel.rank >= 100 else 3)
            if clock() - began + expected > budget_s / 2:
                continue
        try:
            launch = kernel.prepare(problem, settings, device)
        except Exception as error:
            trials[kernel.id, settings] = _trial(
                kernel, settings, "over-limit" if isinstance(error, MemoryError) else "failed", reason=describe(error)
            )
            continue
        found = check(problem, device, kernel, settings, launch, material, patience_s=0.05 if budget_s is not None else 1.0)
        if found.status == "ok":
            launches[kernel, settings] = launch
            seen[kernel, settings] = found.seconds or 0.0
        else:
            trials[kernel.id, settings] = _trial(kernel, settings, found.status, reason=found.reason)
    # What checking saw is a time too, if a rough one: enough to leave out whoever is far behind, or all there is.
    leader = min(seen.values(), default=0.0)
    left = 5.0 if budget_s is None else budget_s - (clock() - began)
    for candidate, seconds in seen.items():
        trials[candidate[0].id, candidate[1]] = _trial(*candidate, "ok", _Timed("ok", seconds, None, 1))
    rivals = {c: run for c, run in launches.items() if seen[c] <= FAR * leader}
    if len(rivals) > 1 and left > 0:
        result = bench(
            rivals,
            lambda: (material.on(device), [device.allocate(s.nbytes) for s in problem.outputs]),
            timer=HostTimer(clock, device.synchronize),
            budget_s=left,
            cold=cold,
            incumbent=next(iter(rivals)),
            known=seen,
        )
        for (kernel, settings), timing in result.timings.items():
            if timing.status == "ok" and timing.count:
                trials[kernel.id, settings] = _trial(kernel, settings, "ok", timing)
            elif timing.status == "failed":
                trials[kernel.id, settings] = _trial(kernel, settings, "failed", reason=timing.reason)
    return list(trials.values())


# -- lock files --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _lock(path: str) -> Lock:
    return Lock.read(path)


def _pinned(problem: Problem, device: Device) -> Choice:
    lock = _lock(config.lock)
    text = problem_text(problem)
    pin = lock.get(text, device.kind)
    if pin is None:
        if len(_candidates(problem, device)) > 1:
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
