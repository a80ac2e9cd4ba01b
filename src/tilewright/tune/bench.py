"""How long each of several rival launches takes, found within a budget of seconds.

The rivals take turns, so that what else the machine does meets all of them alike; each is summed up by its median and
interquartile range, which a few disturbed samples do not move. The standard error of a median is taken as 0.93 times the
interquartile range over the square root of the count (its value for a normal distribution).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tilewright.devices.api import Launch
from tilewright.tune.check import describe

Key = TypeVar("Key", bound=Hashable)
Timer = Callable[[Callable[[], Any], Callable[[], float]], float]  # seconds of what it runs; the host's clock is given

SAMPLE_S = 20e-6  # a sample lasts at least so long: shorter launches are repeated within it
MOST_REPEATS = 4096
WARM_S = 1e-3  # a launch so long hardly depends on what ran just before it
FEWEST = 5  # samples before a median may count as settled
MOST = 256
SETTLED = 0.01  # a median has settled when its standard error is at most this part of it
NOISE = 0.01  # a difference below this part counts for nothing, however small the errors
DOUBT = 0.05  # and one above this part counts, however large: an erratic incumbent must not be safe for being erratic
MARGIN = 0.05  # a rival this far behind by its shortest launch, once there are enough samples, is dropped
EARLY = 3, 0.5  # and after so many samples already one that is so far behind
HOPELESS = 5.0  # one whose first launches take this many times the leader's is dropped before its turn
FLUSH_BYTES = 64 << 20


def host_seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """The time `run` takes by the clock. For work handed to a device: its `Device.seconds`."""
    began = clock()
    run()
    return clock() - began


class Flush:
    """Writes over a large buffer in host memory, so that what was in the caches is there no more."""

    def __init__(self, nbytes: int = FLUSH_BYTES) -> None:
        self.memory = np.zeros(nbytes // 8, np.int64)

    def __call__(self) -> None:
        np.add(self.memory, 1, out=self.memory)


@dataclass
class Timing:
    """What is known of one candidate's time; every time in seconds a launch.

    status: "ok"; "failed", with the reason, where it raised; "skipped" where the budget was spent before its turn, which
    says nothing about the candidate. dropped: it could not win and was timed no further.
    """

    status: str = "ok"
    reason: str = ""
    samples: list[float] = field(default_factory=list)
    repeats: int = 1
    dropped: bool = False
    best: float = math.inf  # the shortest launch seen, those to warm up included

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def median(self) -> float:
        return quantile(self.samples, 0.5) if self.samples else math.inf

    @property
    def spread(self) -> float:
        """The interquartile range; infinite where there are fewer than two samples."""
        if len(self.samples) < 2:
            return math.inf
        return quantile(self.samples, 0.75) - quantile(self.samples, 0.25)

    @property
    def settled(self) -> bool:
        return self.count >= FEWEST and standard_error(self.spread, self.count) <= SETTLED * self.median


@dataclass
class Result:
    """`timings` of every candidate, `ranking` of the usable ones (the winner first), `seconds` spent, and whether the
    medians `settled` before the budget was spent."""

    timings: dict[Any, Timing]
    ranking: list[Any]
    seconds: float
    settled: bool


def quantile(samples: Sequence[float], q: float) -> float:
    """With linear interpolation, as `numpy.quantile`; for a few numbers in a small part of its time."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def standard_error(spread: float, count: int) -> float:
    """Of a median, from the interquartile range of so many samples."""
    return 0.93 * spread / math.sqrt(count) if count else math.inf


def rank(timings: Mapping[Key, Any], incumbent: Key | None = None) -> list[Key]:
    """The usable candidates, fastest first, but the incumbent before those that do not beat it by more than the noise.

    timings: anything with `status`, `median`, `spread` and `count` for each key: a `Timing`, or a trial kept from before.
    The noise is twice the standard error of the difference, at least one hundredth and at most one twentieth. An incumbent timed but once has
    a spread that nobody knows, so it is beaten by any lower median.
    """
    usable = sorted((k for k, t in timings.items() if t.status == "ok" and t.count), key=lambda k: timings[k].median)
    if incumbent not in usable or incumbent is None:
        return usable
    own = timings[incumbent]

    def error(t: Any) -> float:
        spread = t.spread if t.spread is not None and math.isfinite(t.spread) else 0.0
        return standard_error(spread, t.count)

    def beats(t: Any) -> bool:
        noise = min(max(2 * math.hypot(error(t), error(own)), NOISE * own.median), DOUBT * own.median)
        return t.median < own.median - noise

    better = [k for k in usable if k != incumbent and beats(timings[k])]
    return [*better, incumbent, *[k for k in usable if k != incumbent and k not in better]]


@dataclass(eq=False)
class _Rival:
    key: Any
    launch: Launch
    timing: Timing
    estimate: float = 0.0  # seconds a launch


def bench(
    candidates: Mapping[Key, Launch],
    make_args: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    timer: Timer = host_seconds,
    budget_s: float = 0.25,
    cold: bool = False,
    flush: Callable[[], None] | None = None,
    incumbent: Key | None = None,
    known: Mapping[Key, float] | None = None,
    before: Callable[[Key], None] | None = None,
    finished: Callable[[Key, Timing], None] | None = None,
) -> Result:
    """Time rival launches of one problem against each other.

    candidates: a launch for each key, in order of expectation: when the budget does not reach all, the last go without.
    make_args: gives (input buffers, output buffers), once, for all of them.
    clock: seconds; the budget is kept by it. timer: takes the times, `Device.seconds` where the launches are handed to a device.
    cold: every launch finds its operands outside the caches (`flush`, else `Flush`, runs before each).
    incumbent: stays first in the ranking unless it is beaten by more than the noise (see `rank`).
    known: the shortest launch of a candidate that was seen before this, in seconds, where there was one. Those of a
        millisecond or more are not warmed up again.
    before: told whose sample comes next, outside the timed part. finished: told as soon as a candidate's timing is final.

    After one launch to warm up, the rivals take turns, a sample each; who cannot win any more is dropped, and it ends
    when every median left has settled, after 256 samples, or when the budget is spent. Nothing is launched that would not
    end within the budget by what is known of it, so that at most one launch overruns. A candidate that raises is
    "failed", and the others go on.
    """
    began = clock()
    end = began + budget_s
    if cold and flush is None:
        flush = Flush()
    if not cold:
        flush = None
    flush_s = 0.0
    inputs, outputs = make_args()
    timings: dict[Key, Timing] = {key: Timing() for key in candidates}
    rivals: list[_Rival] = []

    def leave(rival: _Rival, reason: str | None = None) -> None:
        if reason is not None:
            rival.timing.status, rival.timing.reason = "failed", reason
        if rival in rivals:
            rivals.remove(rival)
        if finished is not None:
            finished(rival.key, rival.timing)

    def fits(rival: _Rival) -> bool:
        return clock() + flush_s + rival.estimate * rival.timing.repeats <= end

    def sample(rival: _Rival) -> bool:
        """Launch it `repeats` times; its `estimate` is what one took. False: it raised, and is out."""
        nonlocal flush_s
        if before is not None:
            before(rival.key)
        if flush is not None:
            now = clock()
            flush()
            flush_s = clock() - now
        launch, repeats = rival.launch, rival.timing.repeats

        def run() -> None:
            for _ in range(repeats):
                launch(inputs, outputs)

        try:
            rival.estimate = timer(run, clock) / repeats
        except Exception as error:
            leave(rival, describe(error))
            return False
        rival.timing.best = min(rival.timing.best, rival.estimate)
        return True

    for key, launch in candidates.items():
        rival = _Rival(key, launch, timings[key])
        timing = rival.timing
        timing.best = (known or {}).get(key, math.inf)
        if clock() >= end:
            timing.status, timing.reason = "skipped", f"the {budget_s:g} s allowed were spent before its turn"
            leave(rival)
            continue
        rivals.append(rival)
        rival.estimate = timing.best
        going = WARM_S <= timing.best < math.inf or sample(rival)
        # With cold caches a launch is never repeated: it would find its operands in them.
        while going and flush is None and rival.estimate * timing.repeats < SAMPLE_S and timing.repeats < MOST_REPEATS and fits(rival):
            going = sample(rival)
            if rival.estimate * timing.repeats < SAMPLE_S:
                wanted = math.ceil(1.1 * SAMPLE_S / rival.estimate) if rival.estimate > 0 else MOST_REPEATS
                timing.repeats = min(max(wanted, 2 * timing.repeats), MOST_REPEATS)

    leader = min((r.timing.best for r in rivals), default=math.inf)
    for rival in rivals[:]:
        timing = rival.timing
        # One launch may have been disturbed, so there is a second before it is given up.
        if timing.best > HOPELESS * leader and (not fits(rival) or sample(rival)) and timing.best > HOPELESS * leader:
            timing.samples.append(timing.best)
            timing.dropped = True
            leave(rival)

    settled, spent = False, False
    for turn in range(1, MOST + 1):
        for rival in _from(rivals, turn):
            if fits(rival):
                if sample(rival):
                    rival.timing.samples.append(rival.estimate)
            else:
                spent = True
                if not rival.timing.samples:  # the launch that warmed it up is all there is
                    rival.timing.samples.append(rival.timing.best)
                leave(rival)
        if turn <= 8 or turn % 8 == 0:  # summing up takes longer than a short sample, and warms other caches
            _drop(rivals, leave)
            settled = all(r.timing.settled for r in rivals) or (len(rivals) == 1 and rivals[0].timing.count >= FEWEST)
        if not rivals or settled:
            break
    while rivals:
        leave(rivals[0])
    return Result(timings, rank(timings, incumbent), clock() - began, settled and not spent)


def _from(rivals: list[_Rival], turn: int) -> list[_Rival]:
    """The rivals of a round, another one first each time, so that none always follows the same."""
    start = turn % max(len(rivals), 1)
    return rivals[start:] + rivals[:start]


def _drop(rivals: list[_Rival], leave: Callable[[_Rival], None]) -> None:
    """Drop those whose shortest launch is clearly above the leader's, and above most of its samples.

    The shortest, since other work on the machine only ever adds: a rival that was disturbed more often is not a loser.
    """
    if len(rivals) < 2:
        return
    leader = min(rivals, key=lambda r: r.timing.best)
    usual = quantile(leader.timing.samples, 0.75) if leader.timing.samples else math.inf
    for rival in list(rivals):
        count, behind = rival.timing.count, rival.timing.best / max(leader.timing.best, 1e-12) - 1
        enough = (count >= EARLY[0] and behind > EARLY[1]) or (count >= FEWEST and behind > MARGIN)
        if enough and rival.timing.best > usual:
            rival.timing.dropped = True
            leave(rival)
