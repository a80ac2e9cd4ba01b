"""Which device `auto` is: the one that does given problems in the least time, measured once on each and kept.

The CPU stays unless another device takes less than `SHARE` of its time, so that neither an integrated GPU that is slower nor an OpenCL
device made of the same cores takes its place. A device that fails is passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright import devices
from tilewright._files import write_atomically
from tilewright.devices.api import Device, Problem
from tilewright.errors import DataError
from tilewright.tune import select
from tilewright.tune.store import cache_folder, source_hash

SHARE = 0.9
REPEATS = 5


def fastest(problems: Sequence[Problem], names: Sequence[str] | None = None) -> str:
    """The name of the device, of `names` or of all that compute, that does these problems fastest."""
    times = {name: _known(name, problems) for name in (devices.names() if names is None else names)}
    best = min(times, key=lambda name: times[name])
    return best if times[best] < SHARE * times.get("cpu", math.inf) else "cpu"


def _known(name: str, problems: Sequence[Problem]) -> float:
    """Seconds on a device: those kept for its driver, libraries, threads and kernels, else measured now; infinite where it fails."""
    try:
        device = devices.get(name)
        sources = sorted({source_hash(kernel) for p in problems for kernel in device.kernels(p.op)})
        identity = [*device.identity(), *map(str, problems), *sources]
        path = cache_folder() / f"pick-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text())
            if data["identity"] == identity and 0 < data["seconds"] < math.inf:
                return float(data["seconds"])
        seconds = measure(device, problems)
    except Exception:  # a driver raises what it likes
        return math.inf
    with contextlib.suppress(OSError, DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(str(path), json.dumps({"identity": identity, "seconds": seconds}, indent=1).encode(), DataError)
    return seconds


def measure(device: Device, problems: Sequence[Problem], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the problems one after another, launches included, by the first kernels in rank: the least of several runs."""
    runs: list[tuple[Any, list[Any], list[Any]]] = []
    with select.policy("off"):
        for problem in problems:
            inputs = [None if s is None else device.upload(np.ones(s.shape, s.dtype.np), s) for s in problem.inputs]
            runs.append((select.choose(problem, device).launch, inputs, [device.allocate(s.nbytes) for s in problem.outputs]))
    times = []
    for _ in range(1 + REPEATS):
        device.synchronize()
        began = clock()
        for launch, inputs, outputs in runs:
            launch(inputs, outputs)
        device.synchronize()
        times.append(clock() - began)
    return min(times[1:])
