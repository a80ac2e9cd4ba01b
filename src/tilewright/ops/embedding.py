"""Tables of vectors, and their trivial case."""

from __future__ import annotations

import numpy as np

from tilewright.devices.api import Spec, spec
from tilewright.dtypes import float32
from tilewright.errors import ArgumentError, DTypeError, ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.movement import take
from tilewright.tensor import Tensor


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight (entries, features) at integer positions: index's shape with features appended.

    Negative positions count from the end. The gradient adds up where a row is taken more than once. Raises ShapeError,
    DTypeError for an index that is not integer, ArgumentError for one outside the table.
    """
    need_tensor("embedding", index=index, weight=weight)
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {weight.shape} must be (entries, features)")
    return take(weight, index, 0)


def _infer(classes: int, index: Spec) -> Spec:
    if index.dtype.kind not in "iu":
        raise DTypeError(f"one_hot: the index is {index.dtype.name}; it must be integers")
    return spec((*index.shape, classes), float32)


def _reference(classes: int, index: np.ndarray) -> np.ndarray:
    return np.eye(classes)[index]


def _errors() -> list[ErrorSample]:
    from tilewright.tensor import tensor

    return [
        ErrorSample(
            lambda: one_hot(tensor([0, 3]), 3),
            ArgumentError,
            "one_hot: indices from 0 to 3 are outside the 3 classes",
        ),
        ErrorSample(lambda: one_hot(tensor([0.5]), 3), DTypeError, "one_hot: the index is float32; it must be integers"),
        ErrorSample(lambda: one_hot(tensor([0]), -3), ArgumentError, "one_hot: classes -3 must be 0 or more"),
    ]


ONE_HOT = Op(
    "one_hot",
    _infer,
    _reference,
    None,
    lambda: [Sample((Arg(s, t, fill="int", low=0, high=4),), 4, grad=False) for s in ((5,), (2, 3), (), (0,)) for t in ("int64", "uint8")],
    _errors,
    saves=(),
)


def one_hot(index: Tensor, classes: int) -> Tensor:
    """float32 zeros with a 1 at each index, along a new last axis of `classes`.

    Raises DTypeError for an index that is not integer, ArgumentError for one outside the classes.
    """
    need_tensor("one_hot", index=index)
    if classes < 0:
        raise ArgumentError(f"one_hot: classes {classes} must be 0 or more")
    return call(ONE_HOT, (index,), int(classes))
