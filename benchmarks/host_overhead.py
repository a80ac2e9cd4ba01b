"""The host's own cost of one eager op call, measured on the null device, and a profile of where it goes.

python benchmarks/host_overhead.py [--json FILE] [--rounds N] [--cases relu,add]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script, too

import tilewright as tw
from benchmarks._harness import print_table, verdict, write_json

TARGET_S = {True: 15e-6, False: 8e-6}  # with gradients recorded, and without
CALLS = 200


def cases(grad: bool) -> dict[str, Callable[[], Any]]:
    """One call of each kind of op that nets are made of; `grad` makes the operands require gradients."""

    def new(*shape: int) -> tw.Tensor:
        t = tw.empty(shape, device="null")
        t.requires_grad = grad
        return t

    x, y = new(8, 16, 32, 32), new(8, 16, 32, 32)
    weight, bias = new(32, 16, 3, 3), new(32)
    a, b, c = new(64, 128), new(128, 256), new(256, 128)
    gamma, beta = new(16), new(16)
    mean, variance = tw.empty((16,), device="null"), tw.empty((16,), device="null")
    labels = tw.empty((64,), dtype=tw.int64, device="null")
    return {
        "relu": lambda: tw.relu(x),
        "add": lambda: x + y,
        "mul by a number": lambda: x * 0.5,
        "conv2d 3x3 + bias": lambda: tw.conv2d(x, weight, bias, padding=1),
        "matmul": lambda: a @ b,
        "linear": lambda: tw.linear(a, c),
        "max_pool2d": lambda: tw.max_pool2d(x, 2),
        "batch_norm": lambda: tw.batch_norm(x, mean, variance, gamma, beta, training=True),
        "mean": lambda: x.mean(),
        "reshape": lambda: x.reshape(8, 16384),
        "cross_entropy": lambda: tw.cross_entropy(a, labels),
    }


def seconds_per_call(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def profile(call: Callable[[], Any], title: str, per_call: float) -> list[dict[str, Any]]:
    """Own time per function, scaled so that it sums to the time measured without the profiler."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20 * CALLS):
        call()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    entries = [
        (own, count / (20 * CALLS), f"{Path(file).name}:{line} {name}" if line else name)
        for (file, line, name), (_, count, own, *_) in stats.stats.items()
    ]
    total = sum(own for own, _, _ in entries)
    rows = [{"where": where, "calls": count, "us": own / total * per_call * 1e6} for own, count, where in sorted(entries, reverse=True)[:14]]
    table = [(r["where"], f"{r['calls']:.1f}", f"{r['us']:.2f}") for r in rows]
    print_table(f"\n{title}: own time per call (cProfile, scaled to the unprofiled time)", ("where", "calls", "us"), table)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser("host_overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and machine description here")
    parser.add_argument("--rounds", type=int, default=50, help=f"rounds of {CALLS} calls of every case")
    parser.add_argument("--cases", default="", help="only names containing one of these (a,b,...)")
    options = parser.parse_args()
    words = [word for word in options.cases.split(",") if word]
    calls = {(name, grad): call for grad in (True, False) for name, call in cases(grad).items() if not words or any(word in name for word in words)}
    if not calls:
        parser.error(f"no case matches {options.cases!r}; there are {', '.join(cases(False))}")
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in calls}
    for number in range(options.rounds + 2):
        for key, call in calls.items():
            seconds = seconds_per_call(call)
            if number >= 2:
                times[key].append(seconds)
    rows = []
    for (name, grad), values in times.items():
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        case = f"{name}, {'gradients on' if grad else 'no gradients'}"
        rows.append(
            {
                "case": case,
                "device": "null",
                "peer": None,
                "ours_s": median,
                "peer_s": None,
                "ratio": None,
                "q1_s": q1,
                "q3_s": q3,
                "target_s": TARGET_S[grad],
            }
        )
    table = [
        (
            row["case"],
            f"{row['ours_s'] * 1e6:.2f}",
            f"{row['q1_s'] * 1e6:.2f} .. {row['q3_s'] * 1e6:.2f}",
            verdict(row["ours_s"] * 1e6, row["target_s"] * 1e6),
        )
        for row in rows
    ]
    title = f"host_overhead, us per eager call on the null device (median of {options.rounds} rounds)"
    print_table(title, ("case", "us", "quartiles", "target"), table)
    profiles = {}
    for name, grad in calls:
        if name in ("relu", "conv2d 3x3 + bias"):
            label = f"{name}, {'gradients on' if grad else 'no gradients'}"
            measured = next(row["ours_s"] for row in rows if row["case"] == label)
            profiles[label] = profile(calls[name, grad], label, measured)
    write_json(options.json, "host_overhead", rows, profiles=profiles)
    return int(any(row["ours_s"] > row["target_s"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
