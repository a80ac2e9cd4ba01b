"""`tilewright summary`."""

from __future__ import annotations

import os

import typer


def run(
    model: str = typer.Argument(help="A name from tilewright.models, or a weights file."),
    input: str = typer.Option("1x3x224x224", help="NxCxHxW."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Shapes, parameters, FLOPs and memory, layer by layer, without running the model."""
    from tilewright.cli._app import emit
    from tilewright.cli._data import load_model, make_model
    from tilewright.cli._problems import sizes
    from tilewright.nn import summary

    shape = sizes(input)
    if os.path.exists(model):
        net = load_model(model)[0]
    else:
        net, _ = make_model(model, {"classes": range(1000), "input": list(shape[1:])})
    report = summary(net, shape)
    if as_json:
        emit(report.as_dict())
    else:
        print(report)
