"""A training step (forward, loss, backward, SGD with momentum) of MobileNetV2 and ResNet-50 on an OpenCL device, beside PyTorch on the same GPU.

    python -m benchmarks.gpu_training [--device opencl:0] [--batch 64] [--nets mobilenet_v2,resnet50] [--json FILE]

Float32, 224x224, channels last; PyTorch (with torchvision's nets) in benchmark mode, TF32 off and on, steps of the three in turn, medians.
Kernels are taken by rank unless TILEWRIGHT_TUNE says otherwise. A profile by kernel follows. `ratio` = our time / the peer's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TILEWRIGHT_TUNE", "off")

from benchmarks._harness import print_table, write_json


def our_step(name: str, device: Any, batch: int) -> tuple[Callable[[], None], Any]:
    import tilewright as tw
    from tilewright import models, nn, optim

    tw.manual_seed(0)
    net = getattr(models, name)()
    net.to(device=device)
    net.train()
    optimizer, loss_fn = optim.SGD(net.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss()
    rng = np.random.default_rng(0)
    x = tw.tensor(rng.random((batch, 3, 224, 224), np.float32), device=device, layout="channels_last")
    y = tw.tensor(rng.integers(0, 1000, batch), device=device)

    def step() -> None:
        loss = loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        device.synchronize()

    return step, net


def torch_step(name: str, batch: int, tf32: bool) -> Callable[[], None]:
    import torch
    import torchvision

    net = getattr(torchvision.models, name)().cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x = torch.rand(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def main() -> int:
    parser = argparse.ArgumentParser("gpu_training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--nets", default="mobilenet_v2,resnet50")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from tilewright import devices
    from tilewright.nn import profile

    device = devices.get(options.device)
    name = str(device.describe().get("model", device.name))
    try:
        import torch

        has_torch = torch.cuda.is_available()
        torch.backends.cudnn.benchmark = True
    except ImportError:
        has_torch = False
    rows, lines = [], []
    for net in options.nets.split(","):
        ours, model = our_step(net, device, options.batch)
        steps = {"ours": ours}
        if has_torch:
            steps |= {"pytorch fp32": torch_step(net, options.batch, False), "pytorch tf32": torch_step(net, options.batch, True)}
        times: dict[str, list[float]] = {k: [] for k in steps}
        for k, step in steps.items():
            for _ in range(5):
                step()
            print(f"{net}: {k} is warm", file=sys.stderr, flush=True)
        for _ in range(options.rounds):
            for k, step in steps.items():
                began = time.perf_counter()
                step()
                times[k].append(time.perf_counter() - began)
        medians = {k: statistics.median(v) for k, v in times.items()}
        for peer in [k for k in medians if k != "ours"] or ["none"]:
            theirs = medians.get(peer)
            ratio = None if theirs is None else medians["ours"] / theirs
            rows.append(
                {"case": f"{net} b{options.batch}", "device": name, "peer": peer, "ours_s": medians["ours"], "peer_s": theirs, "ratio": ratio}
            )
            shown = ["-", "-"] if theirs is None else [f"{theirs * 1e3:.1f}", f"{theirs / medians['ours']:.2f}x"]
            lines.append([net, peer, f"{medians['ours'] * 1e3:.1f}", *shown])
        found = profile(model, (options.batch, 3, 224, 224), train=True, budget_s=1.0, least=2, most=3)
        by: dict[str, float] = {}
        for call in found.calls:
            by[call.kernel] = by.get(call.kernel, 0.0) + call.seconds
        top = sorted(by.items(), key=lambda t: -t[1])[:10]
        print_table(f"{net}: where the device's time goes", ("kernel", "ms"), [[k, f"{v * 1e3:.2f}"] for k, v in top])
        print(f"kernels {found.kernels_s * 1e3:.1f} ms\n", flush=True)
    print_table("gpu_training: a step", ("net", "peer", "ours ms", "peer ms", "throughput"), lines)
    write_json(options.json, "gpu_training", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
