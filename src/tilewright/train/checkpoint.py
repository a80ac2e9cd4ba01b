"""Checkpoints: everything a run needs to go on bit for bit, in one file written atomically.

The file is a safetensors file: arrays as tensors, all else as JSON in its metadata.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from tilewright.errors import CheckpointError
from tilewright.io import load_safetensors, save_safetensors
from tilewright.tensor import Tensor

FORMAT = "tilewright-checkpoint-1"


def _pack(tree: Any, path: str, arrays: dict[str, Any]) -> Any:
    """The tree with arrays moved into `arrays` and their keys in their place."""
    if isinstance(tree, (Tensor, np.ndarray)):
        while path in arrays:  # a key may itself hold a dot
            path += "'"
        arrays[path] = tree
        return {"$tensor": path}
    if isinstance(tree, dict):
        for k in tree:
            if not (k is None or isinstance(k, (str, int, float))):
                raise CheckpointError(f"{path} has the key {k!r:.80}, which a checkpoint cannot hold; use strings or numbers as keys")
        return {"$dict": [[k, _pack(v, f"{path}.{k}", arrays)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"$tuple" if isinstance(tree, tuple) else "$list": [_pack(v, f"{path}.{i}", arrays) for i, v in enumerate(tree)]}
    if isinstance(tree, np.generic):
        tree = tree.item()
    if not (tree is None or isinstance(tree, (str, int, float))):
        raise CheckpointError(
            f"{path} is of type {type(tree).__name__}, which a checkpoint cannot hold; use numbers, strings, arrays, lists, tuples and dicts"
        )
    return tree


def _unpack(tree: Any, arrays: dict[str, Any]) -> Any:
    if not isinstance(tree, dict):
        return tree
    kind, value = next(iter(tree.items()))
    if kind == "$tensor":
        return arrays[value]
    if kind == "$dict":
        return {k: _unpack(v, arrays) for k, v in value}
    items = [_unpack(v, arrays) for v in value]
    return tuple(items) if kind == "$tuple" else items


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write nested dicts, lists, numbers, strings and arrays to `path`; the old file stays until the new one is whole.

    Raises CheckpointError naming the file when it cannot be written, or the entry that it cannot hold.
    """
    arrays: dict[str, Any] = {}
    try:
        tree = _pack(state, "state", arrays)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: was not written: {error}") from None
    save_safetensors(path, arrays, {"format": FORMAT, "tree": json.dumps(tree)})


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save_checkpoint` wrote, arrays as NumPy. Raises CheckpointError for a missing, damaged or foreign file."""
    arrays, metadata = load_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)}: this is not a training checkpoint (format {metadata.get('format')!r}); "
            "load plain weights with tilewright.io.load_weights"
        )
    try:
        return _unpack(json.loads(metadata["tree"]), arrays)
    except (KeyError, ValueError, TypeError, StopIteration, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)}: the checkpoint's description is damaged ({error}); use an earlier one") from error
