"""One forward pass in evaluation mode, float32: ResNet-18 and MobileNetV2 at 224x224, Nature-CNN at 84x84.

python benchmarks/cpu_inference.py [--json FILE] [--rounds N] [--threads N] [--cases nature_cnn]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script, too

from benchmarks._harness import Case, main

SIZES = [("resnet18", 1), ("resnet18", 16), ("mobilenet_v2", 1), ("mobilenet_v2", 16), ("nature_cnn", 1)]
CASES = [Case(f"infer {model} b{size}", "inference", {"model": model, "batch_size": size}, target=0.8) for model, size in SIZES]

if __name__ == "__main__":
    sys.exit(main("cpu_inference", CASES, __doc__ or ""))
