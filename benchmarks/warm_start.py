"""What a full store adds to a problem's first call, and what it adds to every call after it.

    python -m benchmarks.warm_start [MODEL] [--json FILE]

A process measures every problem of a training step into a store of its own; a second, fresh one then chooses for each problem, in
turn by the policy "auto" (from the store) and "off" (by rank). Added to the first call: the difference of the two, median of `--rounds`
choices; the store is opened beforehand, as it is once in a process (its time is printed). After: a call of a small convolution
whose plan was made under either policy, interleaved. Targets: 50 us, and 0.5 us.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._harness import print_table, verdict, write_json

FIRST_S, AFTER_S = 50e-6, 0.5e-6


def problems(model: str) -> list[Any]:
    from tilewright import devices
    from tilewright.cli._problems import of_target

    return of_target(model, (2, 3, 64, 64), "all", devices.get("cpu"))


def fill(model: str) -> None:
    """In a process of its own: measure until every problem has been."""
    from tilewright import devices
    from tilewright.config import config
    from tilewright.ops._op import find
    from tilewright.tune import select
    from tilewright.tune.load import Load

    Load.others = lambda self: 0.0  # type: ignore[method-assign]  # keep what is found, be the machine busy or not
    config.tune, config.tune_process_s = "auto", 1e9
    cpu = devices.get("cpu")
    for _ in range(4):
        select._seen.clear()
        for problem in problems(model):
            select.choose(problem, cpu, find(problem.op))


def added_at_first(model: str, rounds: int) -> tuple[list[tuple[str, float, float]], float]:
    """(problem, seconds by "auto", by "off") of each problem that is stored, and the seconds that opening the store took."""
    from tilewright import devices
    from tilewright.ops._op import find
    from tilewright.tune import select

    cpu, rows = devices.get("cpu"), []
    wanted = [p for p in problems(model) if len(select.candidates(p, cpu)) > 1]
    began = time.perf_counter()
    select.store().trials(select.key_of(wanted[0], cpu))
    opening = time.perf_counter() - began
    for problem in wanted:
        if not select.settled(select._stored(select.key_of(problem, cpu), problem, cpu)):
            continue
        # The same kernel either way, or the difference would be that between making one primitive and another.
        times: dict[str, list[float]] = {"auto": [], "off": []}
        with select.policy("auto"):
            kernel = select.choose(problem, cpu, find(problem.op)).kernel
        only = [k for k in cpu.kernels(problem.op) if k is kernel]
        for _ in range(rounds):
            for policy in times:
                with select.policy(policy):
                    if policy == "off":
                        began = time.perf_counter()
                        select._first([(k, None) for k in only], problem, cpu)
                    else:
                        began = time.perf_counter()
                        select.choose(problem, cpu, find(problem.op))
                    times[policy].append(time.perf_counter() - began)
        rows.append((str(problem), statistics.median(times["auto"]), statistics.median(times["off"])))
    return rows, opening


def added_after(rounds: int) -> tuple[float, float]:
    """Seconds of a call whose plan was made by "auto" and by "off": medians, interleaved."""
    import numpy as np

    from tilewright import devices, no_grad, ops, tensor
    from tilewright.tune import select

    cpu = devices.get("cpu")
    x = tensor(np.ones((1, 4, 8, 8), np.float32), layout="channels_last")
    w = tensor(np.ones((4, 4, 3, 3), np.float32), layout="channels_last")
    times: dict[str, list[float]] = {"auto": [], "off": []}
    plans = {}
    with no_grad():
        for policy in times:
            cpu.plans.clear()
            with select.policy(policy):
                ops.conv2d(x, w)
            plans[policy] = next(p for p in cpu.plans.values() if p.op.name == "conv2d")
        plans["auto"].launch = plans["off"].launch  # of one kernel: what the selection adds is the question
        key = (plans["off"].op, plans["off"].problem.attrs, *plans["off"].problem.inputs)
        for _ in range(rounds):
            for policy, plan in plans.items():
                cpu.plans.put(key, plan)
                began = time.perf_counter()
                for _ in range(200):
                    ops.conv2d(x, w)
                times[policy].append((time.perf_counter() - began) / 200)
    return statistics.median(times["auto"]), statistics.median(times["off"])


def main() -> int:
    parser = argparse.ArgumentParser("warm_start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="resnet18")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.fill:
        fill(options.model)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE"] = folder
        command = [sys.executable, "-m", "benchmarks.warm_start", options.model, "--fill"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        rows, opening = added_at_first(options.model, options.rounds)
        after = added_after(options.rounds)
    if not rows:
        print("no problem has more than one kernel here: nothing is stored")
        return 1
    added = sorted(a - b for _, a, b in rows)
    entries = [
        {"case": case, "device": "cpu", "peer": "policy off", "ours_s": a, "peer_s": b, "ratio": a / b, "added_s": a - b} for case, a, b in rows
    ]
    entries.append({"case": "after", "device": "cpu", "peer": "policy off", "ours_s": after[0], "peer_s": after[1], "ratio": after[0] / after[1]})
    slowest = sorted(rows, key=lambda r: r[2] - r[1])[:5]
    print_table(
        "warm_start: a problem's first choice, everything stored (largest five)",
        ("problem", "from the store us", "by rank us", "added us"),
        [[case[:90], f"{a * 1e6:.1f}", f"{b * 1e6:.1f}", f"{(a - b) * 1e6:.1f}"] for case, a, b in slowest],
    )
    middle = statistics.median(added)
    print(f"\n{len(rows)} problems; opening the store, once in a process: {opening * 1e3:.1f} ms")
    print(f"added to a first call: median {middle * 1e6:.1f} us, largest {added[-1] * 1e6:.1f} us: {verdict(added[-1], FIRST_S)}")
    late = after[0] - after[1]
    print(f"added to a later call: {late * 1e6:.2f} us: {verdict(late, AFTER_S)}")
    write_json(options.json, "warm_start", entries)
    return 0 if added[-1] < FIRST_S and late < AFTER_S else 1


if __name__ == "__main__":
    sys.exit(main())
