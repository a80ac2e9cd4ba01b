"""Growth of resident memory: 500 differently sized inputs through a three-layer net, and 10,000 training steps.

    python benchmarks/memory.py [--json FILE] [--cases sizes,steps]

Either case runs in a process of its own. Growth is counted from a warm state (the first 20 inputs, the first 500
steps) to the largest value seen later, so memory that is taken and given back counts too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script, too

import numpy as np

from benchmarks._harness import ROOT, print_table, verdict, write_json

MIB = 2**20
TARGET_BYTES = {"sizes": 200 * MIB, "steps": 20 * MIB}
INPUTS, INPUTS_WARM = 500, 20
STEPS, STEPS_WARM = 10_000, 500


def resident() -> int:
    """Bytes of this process now in memory. Raises RuntimeError where the system does not tell (only Linux does)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise RuntimeError("memory: this benchmark reads /proc/self/statm; run it on Linux") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def sizes(device: str) -> Iterator[int]:
    """A three-layer net, trained one step on each of 500 different image sizes; yields resident bytes."""
    import tilewright as tw
    from tilewright import nn

    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to(device=device)
    rng = np.random.default_rng(1)
    chosen = rng.permutation([(h, w) for h in range(16, 176, 6) for w in range(17, 177, 6)])[:INPUTS]
    for index, (height, width) in enumerate(chosen):
        x = tw.tensor(rng.standard_normal((2, 3, height, width), np.float32), device=device)
        if index % 2 == 0:
            x = x.to(layout="channels_last")
        loss = tw.cross_entropy(net(x), tw.tensor(np.array([1, 2]), device=device))
        loss.backward()
        if not np.isfinite(loss.item()):
            raise RuntimeError(f"the loss at {height}x{width} is {loss.item()}")
        yield resident()


def steps(device: str) -> Iterator[int]:
    """10,000 steps of a small net (convolution, batch norm, linear) with SGD; yields resident bytes."""
    import tilewright as tw
    from tilewright import nn, optim

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)).to(
        device=device
    )
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        x = tw.tensor(rng.standard_normal((8, 1, 8, 8), np.float32), device=device)
        y = tw.tensor(rng.integers(0, 10, 8), device=device)
        optimizer.zero_grad()
        loss = tw.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield resident()
    if not np.isfinite(loss.item()):
        raise RuntimeError(f"the loss after {STEPS} steps is {loss.item()}")


CASES = {"sizes": (sizes, INPUTS_WARM), "steps": (steps, STEPS_WARM)}


def growth(case: str, device: str) -> dict[str, int]:
    run, warm = CASES[case]
    seen = list(run(device))
    return {"warm_bytes": seen[warm - 1], "max_bytes": max(seen[warm:]), "last_bytes": seen[-1], "count": len(seen)}


def main() -> int:
    parser = argparse.ArgumentParser("memory", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and machine description here")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(growth(options.run, options.device)))
        return 0
    rows = []
    for case in options.cases.split(","):
        if case not in CASES:
            parser.error(f"no case {case!r}; there are {', '.join(CASES)}")
        command = [sys.executable, "-m", "benchmarks.memory", "--run", case, "--device", options.device]
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(result.stdout)
        grown = figures["max_bytes"] - figures["warm_bytes"]
        rows.append({"case": case, "device": options.device, "growth_bytes": grown, "target_bytes": TARGET_BYTES[case], **figures})
    table = [
        (
            row["case"],
            row["device"],
            str(row["count"]),
            f"{row['warm_bytes'] / MIB:.0f}",
            f"{row['max_bytes'] / MIB:.0f}",
            f"{row['growth_bytes'] / MIB:.1f}",
            verdict(row["growth_bytes"] / MIB, row["target_bytes"] / MIB),
        )
        for row in rows
    ]
    print_table("memory, MiB resident", ("case", "device", "runs", "warm", "largest", "growth", "target"), table)
    write_json(options.json, "memory", rows)
    return int(any(row["growth_bytes"] > row["target_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
