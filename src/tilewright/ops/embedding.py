"""Tables of vectors, and their trivial case."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Spec, spec
from tilewright.dtypes import float32
from tilewright.errors import ShapeError
from tilewright.ops._call import call
from tilewright.ops._op import Arg, Op, Sample
from tilewright.ops.movement import take
from tilewright.tensor import Tensor


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight (entries, features) at integer positions: index's shape with features appended."""
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {weight.shape} must be (entries, features)")
    return take(weight, index, 0)


def _infer(attrs: Any, index: Spec) -> Spec:
    return spec((*index.shape, attrs), float32)


def _reference(classes: int, index: np.ndarray) -> np.ndarray:
    return np.eye(classes)[index]


ONE_HOT = Op(
    "one_hot",
    _infer,
    _reference,
    None,
    lambda: [Sample((Arg(s, "int64", fill="int", low=0, high=4),), 4, grad=False) for s in ((5,), (2, 3), (), (0,))],
    saves=(),
)


def one_hot(index: Tensor, classes: int) -> Tensor:
    """float32 zeros with a 1 at each index, along a new last axis of `classes`. Raises ArgumentError outside it."""
    return call(ONE_HOT, (index,), int(classes))
