"""`tilewright eval`."""

from __future__ import annotations

import typer

from tilewright.cli._data import DATA_HELP


def run(
    weights: str = typer.Argument(help="A file that `tilewright train` wrote."),
    data: str = typer.Option(None, help=f"{DATA_HELP} If not given, what the model was trained on."),
    batch: int = typer.Option(128, min=1),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Loss and accuracy of a trained model on a dataset's held-out part."""
    from tilewright.cli._app import emit
    from tilewright.cli._data import load_model, normalise, open_data
    from tilewright.data import Loader
    from tilewright.devices import get
    from tilewright.errors import DataError
    from tilewright.train import Trainer

    place = get(device)
    model, facts = load_model(weights)
    data = data or facts.get("data", "mnist_5k")
    _, test, there = open_data(data, facts["input"][1])
    if there["input"] != facts["input"] or len(there["classes"]) != len(facts["classes"]):
        raise DataError(
            f"{data}: images {there['input']} in {len(there['classes'])} classes do not fit {weights}, which was trained on "
            f"{facts['input']} in {len(facts['classes'])}"
        )
    figures = Trainer(model.to(device=place), device=place).evaluate(Loader(test, batch, transform=normalise(facts)))
    if as_json:
        emit({"weights": weights, "data": data, "samples": len(test), **figures})
    else:
        print(f"{weights} on {len(test)} held-out samples of {data}: loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.2%}")
