"""One-hot rows in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.errors import ArgumentError


@numpy_kernel("one_hot")
def _one_hot(classes: Any, out: Any, index: Any) -> None:
    if index.size and not (index.min() >= 0 and index.max() < classes):
        raise ArgumentError(f"one_hot: indices from {index.min()} to {index.max()} are outside the {classes} classes")
    np.copyto(out, np.arange(classes) == index[..., None])
