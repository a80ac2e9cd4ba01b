"""Every benchmark of this folder, in turn; each writes benchmarks/results/<date>-<name>.json.

    python benchmarks/run_all.py [--peer none] [--only host_overhead,memory]

Without PyTorch, training and inference are timed alone (as with `--peer none`). Returns 1 when any misses a target.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script, too

from benchmarks._harness import PEERS, ROOT

COMPARISONS = ("cpu_training", "cpu_inference")
NAMES = ("host_overhead", "memory", "warm_start", *COMPARISONS, "selection_regret")


def main() -> int:
    parser = argparse.ArgumentParser("run_all", description=__doc__)
    parser.add_argument("--peer", choices=[*PEERS, "none"], help="default: pytorch-eager where PyTorch is installed")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    options = parser.parse_args()
    peer = options.peer
    if peer is None:
        peer = "pytorch-eager" if importlib.util.find_spec("torch") else "none"
        if peer == "none":
            print("PyTorch is not installed here, so nothing is compared; `pip install torch` to compare with it")
    date = datetime.date.today().isoformat()
    failed = []
    for name in options.only.split(","):
        if name not in NAMES:
            parser.error(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
        result = ROOT / "benchmarks" / "results" / f"{date}-{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(result)]
        if name in COMPARISONS:
            command += ["--peer", peer]
        print(f"\n== {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nmissed a target or failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
