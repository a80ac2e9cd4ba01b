"""`tilewright train`."""

from __future__ import annotations

import os
import sys
import time

import typer

from tilewright.cli._data import DATA_HELP


def run(
    model: str = typer.Option("mobilenet_small", help="A name from tilewright.models."),
    data: str = typer.Option("mnist_5k", help=DATA_HELP),
    epochs: int = typer.Option(10, min=1),
    batch: int = typer.Option(64, min=1),
    lr: float = typer.Option(3e-3, min=0.0, help="Peak learning rate of AdamW's one-cycle schedule."),
    weight_decay: float = typer.Option(0.05, min=0.0),
    augment: bool = typer.Option(True, help="Small random shifts and rotations of the training images."),
    seed: int = typer.Option(0),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    size: int = typer.Option(None, min=8, help="Side of the images of folder:FOLDER."),
    out: str = typer.Option("weights.safetensors", help="Where the weights go."),
    checkpoint: str = typer.Option(None, help="Keep the whole run in this file."),
    resume: bool = typer.Option(False, help="Go on from --checkpoint where it exists."),
    log: str = typer.Option(None, help="Append figures to this JSON-lines file."),
    kernels: bool = typer.Option(True, help="Print the kernels that were used."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Train a model on images and save its weights."""
    from tilewright import manual_seed, optim
    from tilewright.cli._app import emit
    from tilewright.cli._data import describe_model, make_model, normalise, open_data
    from tilewright.data import Compose, Loader, RandomAffine
    from tilewright.devices import get
    from tilewright.errors import ArgumentError
    from tilewright.io import check_place, save_safetensors
    from tilewright.train import Interrupted, JsonlLog, Trainer

    started = time.perf_counter()
    if resume and not checkpoint:
        raise ArgumentError("train: --resume goes on from a checkpoint; name it with --checkpoint FILE")
    for path in filter(None, (out, checkpoint)):
        check_place(path)
    if checkpoint and os.path.realpath(checkpoint) == os.path.realpath(out):
        raise ArgumentError(f"train: --out and --checkpoint are both {out}, and the weights would end the run that is kept there; name two files")
    place = get(device)
    manual_seed(seed)
    train, test, facts = open_data(data, size)
    net, arguments = make_model(model, facts)
    net.to(device=place)
    scale = normalise(facts)
    moves = Compose([RandomAffine(degrees=10, translate=0.08, scale=(0.9, 1.1)), scale]) if augment else scale
    loader = Loader(train, batch, shuffle=True, seed=seed, transform=moves, drop_last=len(train) >= batch)
    held_out = Loader(test, max(batch, 128), transform=scale)
    optimizer = optim.AdamW(net.parameters(), lr=lr, weight_decay=weight_decay)
    schedule = optim.OneCycle(optimizer, max_lr=lr, total_steps=epochs * len(loader))
    trainer = Trainer(
        net,
        optimizer,
        schedule=schedule,
        schedule_every="step",
        device=place,
        callbacks=[JsonlLog(log)] if log else [],
        checkpoint=checkpoint,
        progress="off" if as_json else None,
    )
    try:
        history = trainer.fit(loader, epochs, held_out, resume=checkpoint if resume and checkpoint and os.path.exists(checkpoint) else None)
    except Interrupted:
        if checkpoint:
            saved = f"the run is saved in {checkpoint}, go on with --resume"
        else:
            save_safetensors(out, net.state_dict(), describe_model(model, arguments, facts))
            saved = f"the weights so far are saved in {out}; to go on from an interruption, train with --checkpoint FILE"
        print(f"\ntilewright: interrupted in epoch {trainer.epoch + 1} after step {trainer.step}; {saved}", file=sys.stderr)
        raise typer.Exit(130) from None
    save_safetensors(out, net.state_dict(), describe_model(model, arguments, facts))
    used = kernels_used(place)
    seconds = time.perf_counter() - started
    figures = history[-1] if history else {}
    if as_json:
        emit({"weights": out, "seconds": seconds, "history": history, "kernels": used})
        return
    if kernels:
        print(f"\nkernels used on {place.name}:")
        for line in used:
            print(f"  {line['problems']:4d} problems of {line['op']:24s} {line['kernel']}")
    print(f"\nheld-out accuracy {figures.get('val_accuracy', float('nan')):.2%} after {len(history)} epochs in {seconds:.1f} s; weights in {out}")


def kernels_used(place: object) -> list[dict[str, object]]:
    """How many distinct problems of each op each kernel was chosen for, so far in this process."""
    counts: dict[tuple[str, str], int] = {}
    for plan in place.plans.values():  # type: ignore[attr-defined]
        key = (plan.problem.op, plan.kernel.id)
        counts[key] = counts.get(key, 0) + 1
    return [{"op": op, "kernel": kernel, "problems": n} for (op, kernel), n in sorted(counts.items())]
