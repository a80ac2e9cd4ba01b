"""Weights in the safetensors format, with a checksum, written so that a crash never costs the old file."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from tilewright._files import write_atomically
from tilewright.dtypes import as_dtype
from tilewright.errors import CheckpointError
from tilewright.tensor import Tensor

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# Written under two names: a byte changed in one of them would make a file of ours look like one without a checksum.
CHECKSUMS = ("tilewright.crc32", "checksum.crc32")


def _checksum(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """Over every name, dtype, shape, value and note, in sorted order."""
    crc = zlib.crc32(json.dumps(sorted((k, v) for k, v in metadata.items() if k not in CHECKSUMS)).encode())
    for name in sorted(arrays):
        a = arrays[name]
        crc = zlib.crc32(f"{name}|{a.dtype.name}|{a.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data, crc) if a.size else crc
    return f"{crc:08x}"


def save_safetensors(path: str | os.PathLike[str], tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write tensors (Tensor or NumPy, any layout; stored in logical order) and string notes.

    The file appears whole or not at all: it is written beside its place, flushed to disk, then moved there.
    Raises CheckpointError naming the file when that fails; the old file then stays.
    """
    path = os.fspath(path)
    arrays = {k: np.ascontiguousarray(v.numpy() if isinstance(v, Tensor) else v).reshape(v.shape) for k, v in tensors.items()}
    notes = {k: str(v) for k, v in (metadata or {}).items()}
    if "__metadata__" in arrays:
        raise CheckpointError(f"{path}: was not written: the format keeps the name '__metadata__' for itself; rename that array")
    kinds = sorted({a.dtype.name for a in arrays.values()} - set(_NAMES.values()))
    if kinds:
        raise CheckpointError(f"{path}: was not written: there are arrays of {', '.join(kinds)}, which the format cannot hold; convert them first")
    notes.update(dict.fromkeys(CHECKSUMS, _checksum(arrays, notes)))
    data = save(arrays, notes)
    write_atomically(path, data, CheckpointError)


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError where no file can be written at `path`: before the work whose result goes there."""
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder; give the name of a file in it")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path}: the folder {folder} cannot be written to; choose another")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the header names {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def load_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays by name, notes). A file of ours is checked against its checksum.

    Raises CheckpointError naming a file that is missing, truncated, altered or of another format.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as error:
        raise CheckpointError(f"{path}: could not be read ({error.strerror or error})") from error
    try:
        entries: Any = deserialize(data)  # type: ignore[operator]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_unique)
        notes = {str(k): str(v) for k, v in (header.get("__metadata__") or {}).items()}
        arrays = {}
        for name, entry in entries:
            if entry["dtype"] not in _NAMES:
                raise CheckpointError(f"{path}: {name} is of type {entry['dtype']}; {', '.join(_NAMES)} can be read, convert it first")
            kind = as_dtype(_NAMES[entry["dtype"]]).np
            arrays[name] = np.frombuffer(bytearray(entry["data"]), kind).reshape(entry["shape"])
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError) as error:  # type: ignore[misc]
        raise CheckpointError(
            f"{path}: the file ({len(data)} bytes) is truncated, damaged or not a safetensors file ({error}); use another copy"
        ) from error
    held = {notes.get(name) for name in CHECKSUMS}
    if held != {None} and held != {_checksum(arrays, notes)}:
        raise CheckpointError(f"{path}: the contents do not match the file's checksum, so it was altered or damaged; use another copy")
    return arrays, notes


def save_weights(path: str | os.PathLike[str], model: Any, metadata: dict[str, str] | None = None) -> None:
    """Write a model's state_dict. See `save_safetensors`."""
    save_safetensors(path, model.state_dict(), metadata)


def load_weights(path: str | os.PathLike[str], model: Any, strict: bool = True) -> dict[str, str]:
    """Read a state_dict into a model, which stays as it was when anything is wrong; returns the file's notes."""
    arrays, notes = load_safetensors(path)
    try:
        model.load_state_dict(arrays, strict)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error
    return notes
