"""A dataset held in arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.errors import ArgumentError, DTypeError, ShapeError


class ArrayDataset:
    """Samples in one array, labels in another.

    Args:
        x: (N, ...) numbers; images are (N, C, H, W), uint8 or float32. Kept, not copied: a memory map stays on disk.
        y: (N, ...) labels. Integers become int64; floating-point targets keep their dtype. None: no labels.
        classes: the classes' names, if they have any; labels are then checked to lie in 0 .. len(classes) - 1.

    `dataset[i]` is `(x[i], y[i])`, or `x[i]` without labels.

    Raises:
        ShapeError: x is 0-d, or x and y differ in length.
        DTypeError: x or y does not hold numbers.
        ArgumentError: a label outside `classes`.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray | Sequence | None = None, classes: Sequence[str] | None = None):
        self.x = _numbers(x, "x")
        if self.x.ndim == 0:
            raise ShapeError("ArrayDataset: x is a single number; give an array with the samples along axis 0")
        self.y = None if y is None else _numbers(y, "y")
        self.classes = None if classes is None else [str(c) for c in classes]
        if self.y is None:
            return
        if self.y.ndim == 0 or len(self.y) != len(self.x):
            raise ShapeError(f"ArrayDataset: x has shape {self.x.shape} and y has shape {self.y.shape}; both need one entry per sample along axis 0")
        if self.y.dtype.kind in "iub":
            self.y = self.y.astype(np.int64)
            if self.classes is not None and self.y.size:
                low, high = int(self.y.min()), int(self.y.max())
                if low < 0 or high >= len(self.classes):
                    raise ArgumentError(
                        f"ArrayDataset: labels run from {low} to {high}, but {len(self.classes)} classes allow 0 to {len(self.classes) - 1}"
                    )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        return self.x[index] if self.y is None else (self.x[index], self.y[index])

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        """The samples at `indices` as one batch, copied; a channels-last x gives a channels-last batch."""
        x = self.x
        if x.ndim == 4 and x.transpose(0, 2, 3, 1).flags.c_contiguous:
            batch = x.transpose(0, 2, 3, 1)[indices].transpose(0, 3, 1, 2)
        else:
            batch = np.take(x, indices, axis=0)
        return batch if self.y is None else (batch, np.take(self.y, indices, axis=0))

    def __repr__(self) -> str:
        labels = "" if self.y is None else f", y {self.y.dtype}{list(self.y.shape)}"
        return f"ArrayDataset(x {self.x.dtype}{list(self.x.shape)}{labels})"


def _numbers(values: object, what: str) -> np.ndarray:
    try:
        array = np.asanyarray(values)
    except ValueError as e:
        raise ShapeError(f"ArrayDataset: {what} is ragged: its samples differ in shape ({e})") from e
    if array.dtype.kind not in "iufb" and array.dtype.name != "bfloat16":
        raise DTypeError(f"ArrayDataset: {what} has dtype {array.dtype}; give integers or floating-point numbers")
    return array
