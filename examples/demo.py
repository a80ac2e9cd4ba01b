"""Train a MobileNet-style net on real handwritten digits, save it, and classify picture files in a new process.

python examples/demo.py [--device cpu|opencl:0|auto] [--data mnist_5k] [--folder runs/demo] [--epochs N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tilewright.cli", *arguments]


def pictures(data: str, folder: Path, count: int = 10) -> list[tuple[Path, int]]:
    """Some of the held-out digits as PNG files, with their labels."""
    from tilewright.cli._data import open_data

    _, test, facts = open_data(data)
    out = []
    for i in range(0, len(test), max(len(test) // count, 1)):
        pixels, label = test[i]
        scaled = pixels[0] if pixels.dtype.kind == "u" else (pixels[0] * 255).round().astype("uint8")
        path = folder / f"digit-{i:04d}.png"
        Image.fromarray(scaled).save(path)
        out.append((path, int(label)))
    assert facts["classes"]
    return out[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="where to train: cpu, opencl:0, or auto (the fastest)")
    parser.add_argument("--data", default="mnist_5k", help="mnist_5k or digits")
    parser.add_argument("--folder", default="runs/demo", help="where the weights and pictures go")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--want", type=float, default=0.97, help="held-out accuracy below which the demo fails")
    options = parser.parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "weights.safetensors"
    device = ["--device", options.device] if options.device else []

    subprocess.run(command("devices"), check=True)
    start = time.perf_counter()
    subprocess.run(
        command("train", "--data", options.data, "--epochs", str(options.epochs), "--out", str(weights), *device),
        check=True,
    )
    print(f"training took {time.perf_counter() - start:.1f} s")
    score = subprocess.run(command("eval", str(weights), "--data", options.data, "--json", *device), check=True, capture_output=True, text=True)
    accuracy = json.loads(score.stdout)["accuracy"]
    print(f"reloaded in a new process: {accuracy:.2%} of the held-out digits are right")

    files = pictures(options.data, folder)
    told = subprocess.run(
        command("predict", str(weights), *[str(p) for p, _ in files], "--top", "1", "--json", *device), check=True, capture_output=True, text=True
    )
    right = 0
    for (path, label), answer in zip(files, json.loads(told.stdout), strict=True):
        best = answer["classes"][0]
        right += best["class"] == str(label)
        print(f"  {path}: {best['class']} ({best['probability']:.1%}), labelled {label}")
    print(f"{right} of {len(files)} pictures are right; weights are in {weights}")
    if accuracy < options.want:
        print(f"the accuracy is below {options.want:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
