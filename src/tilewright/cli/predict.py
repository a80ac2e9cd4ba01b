"""`tilewright predict`."""

from __future__ import annotations

import typer


def run(
    weights: str = typer.Argument(help="A file that `tilewright train` wrote."),
    images: list[str] = typer.Argument(help="Picture files."),
    top: int = typer.Option(3, min=1, help="How many classes to name."),
    invert: bool = typer.Option(False, help="The picture is dark on light, and the model was trained on light on dark."),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Classify pictures given by path."""
    import numpy as np

    from tilewright import no_grad, softmax, tensor
    from tilewright.cli._app import emit
    from tilewright.cli._data import load_model, normalise
    from tilewright.data import load_image
    from tilewright.devices import get

    place = get(device)
    model, facts = load_model(weights)
    model.to(device=place)
    scale = normalise(facts)
    results = []
    for path in images:
        pixels = load_image(path, facts["mode"], tuple(facts["input"][1:]))[None]
        x, _ = scale(255 - pixels if invert else pixels, None, None)
        with no_grad():
            chances = softmax(model(tensor(x, device=place)), 1).numpy()[0]
        best = np.argsort(-chances)[:top]
        results.append({"image": path, "classes": [{"class": facts["classes"][i], "probability": float(chances[i])} for i in best]})
    if as_json:
        emit(results)
        return
    for r in results:
        print(f"{r['image']}: " + ", ".join(f"{c['class']} {c['probability']:.1%}" for c in r["classes"]))
