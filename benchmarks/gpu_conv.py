"""Every distinct convolution of ResNet-50 and MobileNetV2, three directions, on an OpenCL device: our best candidate against cuDNN
(through PyTorch) and, forward, netcl.

    python -m benchmarks.gpu_conv [--device opencl:0] [--batch 32] [--quick] [--seconds 480] [--json FILE]

Each candidate is checked against float64 at sampled places and timed by the device's own events (median); PyTorch by CUDA graphs replayed
between CUDA events, in the better of its two layouts, benchmark mode, TF32 off and on. Rates are TFLOP/s. `ratio` = our time / the peer's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import print_table, write_json

WAYS = {"conv2d": "forward", "conv2d_input_grad": "input grad", "conv2d_weight_grad": "weight grad"}


def problems(batch: int) -> list[tuple[str, Any]]:
    """(net, problem) of each distinct convolution, forward first."""
    from tilewright import devices, models

    null, found = devices.get("null"), {}
    for name in ("resnet50", "mobilenet_v2"):
        null.plans.clear()
        net = getattr(models, name)().to(device=null)
        from tilewright import empty

        out = net.train()(empty(batch, 3, 224, 224, device=null, layout="channels_last"))
        (out * out).mean().backward()
        for plan in null.plans.values():
            if plan.problem.op in WAYS:
                found.setdefault(plan.problem, name)
    null.plans.clear()
    return sorted([(net, p) for p, net in found.items()], key=lambda t: list(WAYS).index(t[1].op))


def spread(items: list[Any], count: int) -> list[Any]:
    return items if len(items) <= count else [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def ours(problem: Any, device: Any, budget_s: float) -> list[tuple[str, dict[str, Any], float, float]]:
    """(kernel, config, seconds, worst error relative to the largest value) of each candidate that is right, fastest first."""
    from tilewright.ops._op import find
    from tilewright.tune import select
    from tilewright.tune.check import Material, check

    op = find(problem.op)
    material = Material(op, problem, seed=1)
    rows = []
    rivals = [c for c in select.candidates(problem, device) if c[0].rank < 100] or select.candidates(problem, device)[:1]
    began = time.perf_counter()
    for kernel, config in rivals:
        if rows and time.perf_counter() - began > budget_s:
            break
        try:
            launch = kernel.prepare(problem, config, device)
        except Exception as error:
            print(f"{kernel.id} {dict(config)}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            continue
        result = check(problem, device, kernel, config, launch, material)
        if result.status != "ok":
            print(f"{kernel.id} {dict(config)} on {problem}: {result.status}: {result.reason}", file=sys.stderr)
            continue
        inputs = material.on(device)
        sets = [[device.allocate(s.nbytes) for s in problem.outputs] for _ in range(4)]
        runs = [partial(launch, inputs, o) for o in sets]
        for run in runs:
            run()
        times = [device.seconds(run) for run in runs * 4]
        rows.append((kernel.id, dict(config), statistics.median(times), 0.0))
    return sorted(rows, key=lambda r: r[2])


def cudnn(problem: Any, tf32: bool) -> float | None:
    """Seconds of PyTorch's convolution on the same problem, the better of two layouts."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a = problem.attrs if problem.op == "conv2d" else problem.attrs.conv
    top, left, bottom, right = a.padding
    if (top, left) != (bottom, right):
        return None
    shapes = {
        "conv2d": lambda: (problem.inputs[0].shape, problem.inputs[1].shape),
        "conv2d_input_grad": lambda: (problem.outputs[0].shape, problem.inputs[1].shape),
        "conv2d_weight_grad": lambda: (problem.inputs[0].shape, problem.outputs[0].shape),
    }[problem.op]()
    y = (problem.outputs if problem.op == "conv2d" else problem.inputs)[0 if problem.op != "conv2d_weight_grad" else 1].shape
    mask = [problem.op == "conv2d_input_grad", problem.op == "conv2d_weight_grad", False]
    best = math.inf
    for layout in (torch.channels_last, torch.contiguous_format):
        x = torch.randn(shapes[0], device="cuda").to(memory_format=layout)
        w = torch.randn(shapes[1], device="cuda").to(memory_format=layout)
        g = torch.randn(y, device="cuda").to(memory_format=layout)

        def run(x: Any = x, w: Any = w, g: Any = g) -> Any:
            if problem.op == "conv2d":
                return torch.ops.aten.convolution(x, w, None, a.stride, (top, left), a.dilation, False, (0, 0), a.groups)
            return torch.ops.aten.convolution_backward(g, x, w, None, a.stride, (top, left), a.dilation, False, (0, 0), a.groups, mask)

        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                run()
        graph.replay()
        times = []
        for _ in range(8):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / 4e3)
        best = min(best, statistics.median(times))
    return best


def netcl(problem: Any, device: Any) -> float | None:
    """Seconds of netcl's forward convolution (it picks its own kernel): 20 launches in a row by the wall clock, of which the least of 5 runs."""
    try:
        from netcl.core.tensor import Tensor
        from netcl.ops import conv2d
    except ImportError:
        return None
    a = problem.attrs
    if problem.op != "conv2d" or len(set(a.padding)) > 1 or len(set(a.stride)) > 1:
        return None
    rng = np.random.default_rng(0)
    x, w = (Tensor.from_host(device.queue, rng.standard_normal(s.shape).astype(np.float32)) for s in problem.inputs[:2])

    def run() -> None:
        for _ in range(20):
            conv2d(x, w, stride=a.stride[0], pad=a.padding[0], groups=a.groups)
        device.queue.finish()

    try:
        run()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) / 20)
        return min(times)
    except Exception as error:
        print(f"netcl: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None


def main() -> int:
    parser = argparse.ArgumentParser("gpu_conv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--quick", type=int, default=0, metavar="N", help="only N problems, spread over all")
    parser.add_argument("--way", choices=list(WAYS.values()), help="only this direction")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop after so long and report what is there")
    parser.add_argument("--each", type=float, default=20.0, help="seconds for the candidates of one problem")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from tilewright import devices
    from tilewright.ops._op import find

    device = devices.get(options.device)
    name = str(device.describe().get("model", device.name))
    print(device.describe())
    wanted = problems(options.batch)
    wanted = [(n, p) for n, p in wanted if not options.way or WAYS[p.op] == options.way]
    if options.quick:
        wanted = spread(wanted, options.quick)
    has_torch = True
    try:
        import torch

        has_torch = torch.cuda.is_available()
    except ImportError:
        has_torch = False
    began, rows, lines = time.perf_counter(), [], []
    for net, problem in wanted:
        if time.perf_counter() - began > options.seconds:
            print(f"time is up after {len(lines)} of {len(wanted)} problems")
            break
        found = ours(problem, device, options.each)
        if not found:
            print(f"no candidate for {problem}")
            continue
        kernel, config, seconds, _ = found[0]
        cost = find(problem.op).cost(problem.attrs, *problem.inputs)
        a = problem.attrs if problem.op == "conv2d" else problem.attrs.conv
        shape = " ".join("x".join(map(str, s.shape)) for s in problem.inputs[:2])
        case = f"{net} {WAYS[problem.op]} {shape} s{a.stride[0]} g{a.groups}"
        peers = {"cudnn fp32": cudnn(problem, False), "cudnn tf32": cudnn(problem, True)} if has_torch else {}
        peers["netcl"] = netcl(problem, device)
        for peer, theirs in peers.items():
            if theirs is not None:
                rows.append(
                    {"case": case, "device": str(device.cl.name), "peer": peer, "ours_s": seconds, "peer_s": theirs, "ratio": seconds / theirs}
                )
        if not any(peers.values()):
            rows.append({"case": case, "device": name, "peer": "none", "ours_s": seconds, "peer_s": None, "ratio": None})
        rate = [f"{cost.flops / t * 1e-12:.1f}" if t else "-" for t in (seconds, *peers.values())]
        tile = "x".join(str(v) for v in config.values())
        lines.append([case, kernel.removeprefix("opencl."), tile, f"{seconds * 1e6:.0f}", *rate, f"{cost.bytes / seconds * 1e-9:.0f}"])
        print("  ".join(lines[-1]), flush=True)
    cudnns = ("cudnn fp32", "cudnn tf32") if has_torch else ()
    head = ("problem", "kernel", "config", "us", "ours", *cudnns, "netcl", "GB/s")
    print_table("gpu_conv: TFLOP/s", head, lines)
    for peer in ("cudnn fp32", "cudnn tf32", "netcl"):
        for way in WAYS.values():
            ratios = [r["ratio"] for r in rows if r["peer"] == peer and f" {way} " in r["case"]]
            if ratios:
                mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
                print(f"{way}: geometric mean speed against {peer} {1 / mean:.2f}x ({len(ratios)} problems)")
    write_json(options.json, "gpu_conv", rows)
    return 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
