"""What the commands share: naming a dataset, and weights files that say which model they belong to."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import numpy as np

from tilewright import data, models
from tilewright.errors import ArgumentError, CheckpointError, DataError

DATA_HELP = "digits, mnist_5k[:FILE], mnist:FOLDER (IDX files) or folder:FOLDER (one sub-folder per class)."


def open_data(name: str, size: int | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """(train, test, facts) of the dataset `name`; facts: `data`, `classes`, `input` (C, H, W), `mean`, `std`, `mode`."""
    kind, _, where = name.partition(":")
    mode = "gray"
    if kind == "digits":
        train, test = data.digits()
    elif kind == "mnist_5k":
        train, test = data.mnist_5k(where or None)
    elif kind == "mnist" and where:
        train, test = data.mnist_files(where)
    elif kind == "folder" and where:
        train, test, mode = _folder(where, size)
    else:
        raise ArgumentError(f"data {name!r} is not known; use {DATA_HELP}")
    first = train[0][0]
    mean, std = (0.5, 0.5) if kind == "folder" else (0.1307, 0.3081)
    facts = {"data": name, "classes": list(train.classes or []), "input": list(first.shape), "mean": mean, "std": std, "mode": mode}
    return train, test, facts


def _folder(where: str, size: int | None) -> tuple[Any, Any, str]:
    """FOLDER/train and FOLDER/test (or val) where they are there; else every fifth picture is held out."""
    held = next((os.path.join(where, n) for n in ("test", "val") if os.path.isdir(os.path.join(where, n))), None)
    size = size or 224
    if held and os.path.isdir(os.path.join(where, "train")):
        train = data.ImageFolder(os.path.join(where, "train"), size=size)
        return train, data.ImageFolder(held, size=size, classes=train.classes), "rgb"
    whole = data.ImageFolder(where, size=size)
    if len(whole) < 5:
        raise DataError(f"{where}: holds {len(whole)} pictures, and with fewer than 5 none can be held out; add some, or make train and test folders")
    index = np.arange(len(whole))
    return Part(whole, index[index % 5 != 4]), Part(whole, index[index % 5 == 4]), "rgb"


class Part:
    """Some samples of a dataset."""

    def __init__(self, whole: Any, index: np.ndarray) -> None:
        self.whole, self.index, self.classes = whole, index, whole.classes

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Any:
        return self.whole[int(self.index[i])]


def normalise(facts: dict[str, Any]) -> Any:
    return data.Normalize(facts["mean"], facts["std"])


def make_model(name: str, facts: dict[str, Any], options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """A model of that name for the data, and the arguments it was made with."""
    maker = getattr(models, name, None)
    known = [n for n in models.__all__ if not n[0].isupper()]
    if maker is None or name not in known:
        raise ArgumentError(f"model {name!r} is not known; use one of {', '.join(known)}")
    accepted = inspect.signature(maker).parameters
    wanted = {"num_classes": len(facts["classes"]), "in_channels": facts["input"][0], "input_size": tuple(facts["input"][1:])}
    arguments = {k: v for k, v in wanted.items() if k in accepted} | (options or {})
    return maker(**arguments), arguments


def describe_model(name: str, arguments: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """Metadata of a weights file, from which `load_model` makes the model again."""
    return {"model": name, "arguments": json.dumps(arguments), "facts": json.dumps(facts)}


def load_model(path: str) -> tuple[Any, dict[str, Any]]:
    """The model in a weights file that `tilewright train` wrote, and its facts. Raises CheckpointError."""
    from tilewright.io import load_safetensors

    tensors, metadata = load_safetensors(path)
    if "model" not in metadata:
        raise CheckpointError(f"{path}: the file does not say which model it holds; use one that `tilewright train` wrote")
    facts = json.loads(metadata["facts"])
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(metadata["arguments"]).items()}
    model = getattr(models, metadata["model"])(**arguments)
    model.load_state_dict(tensors)
    return model.eval(), facts
