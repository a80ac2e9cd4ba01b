"""`tilewright explain`."""

from __future__ import annotations

from typing import Any

import typer


def run(
    target: str = typer.Argument(help="A model's name, a weights file, or a CSV file of convolutions."),
    input: str = typer.Option("1x3x224x224", help="NxCxHxW, for a model."),
    direction: str = typer.Option("forward", help="forward, train or all."),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    rejected: bool = typer.Option(False, help="Print every other candidate too, with its time or the reason why it is not taken."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Layer by layer: the kernel chosen, its time, the runner-up's, and how near it comes to which limit of the device."""
    from tilewright.cli._app import emit
    from tilewright.cli._explain import gather
    from tilewright.cli._problems import check_direction, sizes
    from tilewright.devices import get

    check_direction(direction)
    report = gather(target, sizes(input), direction, get(device))
    if as_json:
        emit(report)
        return
    limits = report["ceilings"]
    rates = [rate for _, rate in limits["bandwidths"]]
    print(
        f"{report['device']['identity'][0]}: at most {limits['flops'] / 1e9:.0f} GFLOP/s, {max(rates) / 1e9:.0f} GB/s in caches and "
        f"{rates[-1] / 1e9:.0f} beyond, {limits['launch_s'] * 1e6:.1f} us a launch"
    )
    print(f"{'layer':32} {'':14} {'us':>9} {'of limit':>9}  {'limit':8} {'runner-up us':>12}  kernel")
    for call in report["calls"]:
        print(_line(call))
        if rejected:
            for row in call["candidates"]:
                if (row["kernel"], dict(row["config"])) != (call["kernel"], call["config"]):
                    why = f"{row['status']}: {'; '.join(row['reasons'])}" if row["reasons"] else row["status"]
                    print(f"{'':34} {_us(row['median_s']):>22} {row['kernel']} {dict(row['config']) or ''} {why}")
    for name, what in (("", "forward"), ("train_", "forward and backward in training")):
        if f"{name}whole_s" in report:
            whole, sum_s = report[f"{name}whole_s"], report[f"{name}kernels_s"]
            print(f"{what}: {whole * 1e3:.3f} ms, of which the kernels above {sum_s * 1e3:.3f} ms ({sum_s / whole:.0%}); the rest is the host's")
    if any(c["seconds"] is None for c in report["calls"]):
        print("what is not measured is taken in order of rank; `tilewright tune` measures it")


def _line(call: dict[str, Any]) -> str:
    share = "" if call["share"] is None else f"{call['share']:.0%}"
    other = call["runner_up"]
    name = call["layer"] or call["op"]
    config = f" {call['config']}" if call["config"] else ""
    return (
        f"{name[-32:]:32} {call['direction']:14} {_us(call['seconds']):>9} {share:>9}  {call['limit']:8} "
        f"{_us(other['median_s'] if other else None):>12}  {call['kernel']}{config}"
        f"{'' if call['layer'] else ' ' + call['problem'][:90]}"
    )


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
