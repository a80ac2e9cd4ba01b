"""`tilewright explain`."""

from __future__ import annotations

from typing import Any

import typer


def run(
    target: str = typer.Argument(help="A model's name, a weights file, or a CSV file of convolutions."),
    input: str = typer.Option("1x3x224x224", help="NxCxHxW, for a model."),
    direction: str = typer.Option("forward", help="forward, train or all."),
    device: str = typer.Option(None, help="cpu; TILEWRIGHT_DEVICE sets the default."),
    rejected: bool = typer.Option(False, help="Print the reason of every rejected candidate too."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """For every problem of a model: the kernel chosen, its measured time, the runner-up's, and what was rejected and why."""
    from tilewright.cli._app import emit
    from tilewright.cli._problems import of_target, sizes
    from tilewright.devices import get
    from tilewright.ops._op import find
    from tilewright.tune import select

    place = get(device)
    report: list[dict[str, Any]] = []
    for problem in of_target(target, sizes(input), direction, place):
        select.choose(problem, place, find(problem.op))  # measures it where the policy says so
        rows = select.explain(problem, place)
        usable = [r for r in rows if r["status"] in ("ok", "unmeasured")]
        chosen = usable[0] if usable else None
        report.append({"problem": str(problem), "op": problem.op, "chosen": chosen, "candidates": rows})
    if as_json:
        emit(report)
        return
    for entry in report:
        print(entry["problem"])
        for row in entry["candidates"]:
            if row["status"] == "rejected" and not rejected:
                continue
            took = "not measured" if row["median_s"] is None else f"{row['median_s'] * 1e6:10.1f} us"
            mark = "*" if row is entry["chosen"] else " "
            why = f"  {row['status']}: {'; '.join(row['reasons'])}" if row["status"] not in ("ok", "unmeasured") else ""
            print(f"  {mark} {took:>14}  {row['kernel']} {dict(row['config']) or ''}{why}")
    if any(e["chosen"] and e["chosen"]["median_s"] is None and len(e["candidates"]) > 1 for e in report):
        print("what is not measured is taken in order of rank; `tilewright tune` measures it")
