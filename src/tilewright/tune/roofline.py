"""What a device can do at most, measured once and kept: arithmetic, memory traffic, and the cost of one launch.

A problem takes at least as long as the largest of three times (the roofline of Williams, Waterman and Patterson, Comm. ACM 52(4),
2009, with the launch as a third limit): its operations at the highest rate seen, its bytes at the rate seen for so many bytes (what
fits a cache moves faster), and one launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tilewright._files import write_atomically
from tilewright.devices.api import Device, Problem, spec
from tilewright.errors import DataError, KernelError, OutOfMemory
from tilewright.tune import select
from tilewright.tune.store import cache_folder

FORMAT = 1
ENOUGH_S = 20e-3  # a product that takes so long tells the arithmetic rate
LARGEST = 8192  # rows of a product
MOST_BYTES = 1 << 29
REPEATS = 9
LIMITS = ("compute", "memory", "launch")


@dataclass(frozen=True)
class Ceilings:
    """Operations a second; (bytes moved, bytes a second) from small to large; seconds of a launch that does nothing much."""

    flops: float
    bandwidths: tuple[tuple[int, float], ...]
    launch_s: float

    def bandwidth(self, nbytes: float) -> float:
        """Bytes a second for a problem that moves so many: between the sizes measured, on a logarithmic scale."""
        sizes = self.bandwidths
        if nbytes <= sizes[0][0]:
            return sizes[0][1]
        for (small, low), (large, high) in pairwise(sizes):
            if nbytes <= large:
                t = math.log(nbytes / small) / math.log(large / small)
                return math.exp((1 - t) * math.log(low) + t * math.log(high))
        return sizes[-1][1]

    def limit(self, flops: float, nbytes: float) -> tuple[str, float]:
        """Which limit binds ("compute", "memory" or "launch"), and the least seconds that it allows."""
        times = {"compute": flops / self.flops, "memory": nbytes / self.bandwidth(nbytes), "launch": self.launch_s}
        name = max(times, key=lambda k: times[k])
        return name, times[name]


def ceilings(device: Device, find: Callable[[str], Any], *, again: bool = False) -> Ceilings:
    """The device's ceilings: those kept in the cache folder for its driver, libraries and threads, else measured now (a few seconds).

    find: gives an op by its name. A file that is damaged or cannot be written counts as not there.
    """
    path = cache_folder() / f"ceilings-{hashlib.sha256(repr(device.identity()).encode()).hexdigest()[:16]}.json"
    if not again:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text())
            if data["format"] == FORMAT and data["identity"] == list(device.identity()):
                return _checked(Ceilings(data["flops"], tuple((int(n), float(r)) for n, r in data["bandwidths"]), data["launch_s"]))
    found = measure(device, find)
    with contextlib.suppress(OSError, DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "identity": device.identity(), **asdict(found)}, indent=1)
        write_atomically(str(path), text.encode(), DataError)
    return found


def _checked(c: Ceilings) -> Ceilings:
    """Raises ValueError for what no device has."""
    numbers = [c.flops, c.launch_s, *[rate for _, rate in c.bandwidths], *[n for n, _ in c.bandwidths]]
    if not c.bandwidths or not all(isinstance(v, (int, float)) and 0 < v < math.inf for v in numbers):
        raise ValueError("not ceilings")
    return c


def measure(device: Device, find: Callable[[str], Any]) -> Ceilings:
    """From products of square matrices, sums of long vectors and the smallest sum, each by the kernel that is chosen for it."""
    best, n = 0.0, 256
    while n <= LARGEST:
        op = find("matmul")
        a = spec((n, n), "float32")
        sample = next(s for s in op.samples() if not any(s.attrs))
        seconds = _seconds(device, op, Problem("matmul", sample.attrs, (a, a), op.outputs(sample.attrs, a, a)))
        if seconds is None:
            break
        best = max(best, 2.0 * n**3 / seconds)
        if seconds > ENOUGH_S:
            break
        n *= 2
    rates = []
    nbytes = 1 << 14
    while nbytes <= MOST_BYTES:
        x = spec((nbytes // 12,), "float32")
        seconds = _seconds(device, find("add"), Problem("add", None, (x, x), (x,)))
        if seconds is None:
            break
        rates.append((nbytes, nbytes / seconds))
        nbytes *= 4
    # What is small is slowed by the launch, which is a limit of its own: it gets the best rate of anything larger.
    rates = [(n, max(rate for _, rate in rates[i:])) for i, (n, _) in enumerate(rates)]
    one = spec((1,), "float32")
    launch = _seconds(device, find("add"), Problem("add", None, (one, one), (one,)))
    return _checked(Ceilings(best, tuple(rates), launch or 0.0))


def _seconds(device: Device, op: Any, problem: Problem) -> float | None:
    """Of one launch: the least of several medians; None where the device has no room."""
    try:
        choice = select.choose(problem, device, op)
        inputs = [device.allocate(s.nbytes) for s in problem.inputs if s is not None]
        for b, s in zip(inputs, problem.inputs, strict=True):
            if s is not None:
                device.write(b, _ones(s), s)
        outputs = [device.allocate(s.nbytes) for s in problem.outputs]
    except (OutOfMemory, KernelError):
        return None
    choice.launch(inputs, outputs)
    first = device.seconds(lambda: choice.launch(inputs, outputs))
    repeats = max(1, min(200, int(200e-6 / max(first, 1e-7))))

    def run() -> None:
        for _ in range(repeats):
            choice.launch(inputs, outputs)

    return min(statistics.median([device.seconds(run) for _ in range(REPEATS)]) for _ in range(2)) / repeats


def _ones(s: Any) -> Any:
    import numpy as np

    return np.ones(s.shape, s.dtype.np)
