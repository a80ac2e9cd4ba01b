"""Tilewright: convolutional networks, trained and run on CPUs through oneDNN, with NumPy beside it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilewright import dtypes, errors, io, models, nn, ops, optim
from tilewright.autograd import enable_grad, grad, gradcheck, is_grad_enabled, no_grad
from tilewright.config import config
from tilewright.devices import get as device
from tilewright.dtypes import bfloat16, bool_, float16, float32, float64, int8, int16, int32, int64, uint8
from tilewright.random import Generator, manual_seed
from tilewright.tensor import (
    Tensor,
    arange,
    empty,
    eye,
    from_dlpack,
    from_numpy,
    full,
    linspace,
    ones,
    ones_like,
    tensor,
    zeros,
    zeros_like,
)

if TYPE_CHECKING:
    from tilewright import data, train

__version__ = "0.1.0"

# Every op is a name of the package.
globals().update({name: value for name, value in vars(ops).items() if not name.startswith("_") and callable(value)})


def __getattr__(name: str) -> Any:
    """Loaded when first named: what needs Pillow and rich."""
    if name in ("data", "train"):
        return importlib.import_module(f"tilewright.{name}")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
