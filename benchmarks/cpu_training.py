"""One training step (forward, cross-entropy, backward, SGD with momentum), batch 16, 224x224, float32.

python benchmarks/cpu_training.py [--json FILE] [--rounds N] [--threads N] [--cases resnet18]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script, too

from benchmarks._harness import Case, main

CASES = [Case(f"train {model} b16", "training_step", {"model": model, "batch_size": 16}, target=1.0) for model in ("resnet18", "mobilenet_v2")]

if __name__ == "__main__":
    sys.exit(main("cpu_training", CASES, __doc__ or ""))
