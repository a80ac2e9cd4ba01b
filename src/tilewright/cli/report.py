"""`tilewright report`."""

from __future__ import annotations

import json
from importlib import resources

import typer


def run(
    target: str = typer.Argument(help="A model's name, a weights file, or a CSV file of convolutions."),
    out: str = typer.Option("report.html", "--out", "-o", help="The page to write."),
    input: str = typer.Option("1x3x224x224", help="NxCxHxW, for a model."),
    direction: str = typer.Option("forward", help="forward, train or all."),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """What `explain` tells as one page with pictures, which needs nothing else: roofline, time by layer, candidates."""
    from tilewright._files import write_atomically
    from tilewright.cli._app import emit
    from tilewright.cli._explain import gather
    from tilewright.cli._problems import check_direction, sizes
    from tilewright.devices import get
    from tilewright.errors import DataError

    check_direction(direction)
    found = gather(target, sizes(input), direction, get(device))
    write_atomically(out, page(found).encode(), DataError)
    if as_json:
        emit({"file": out, "calls": len(found["calls"])})
    else:
        print(f"{out}: {len(found['calls'])} op calls of {target}; open it in a browser")


def page(found: dict[str, object]) -> str:
    """The page for what `gather` gave. No text in it can end the element that holds the data."""
    template = resources.files("tilewright.cli").joinpath("_report.html").read_text(encoding="utf-8")
    data = json.dumps(found, allow_nan=False).replace("<", "\\u003c")
    return template.replace("@DATA@", data)
