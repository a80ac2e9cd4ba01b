"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST
from tilewright.dtypes import float32
from tilewright.ops._call import call
from tilewright.ops._op import Arg, Op, Sample
from tilewright.ops.reduce import axes_of, sum
from tilewright.tensor import Tensor


def _softmax(axis: int, x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


def _log_softmax(axis: int, x: np.ndarray) -> np.ndarray:
    shifted = x - np.max(x, axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _softmax_vjp(node: Any, g: Tensor) -> Tensor:
    y = node.outputs[0]
    gy = g * y
    return gy - y * sum(gy, node.attrs, keepdims=True)


def _log_softmax_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.pointwise import exp

    return g - exp(node.outputs[0]) * sum(g, node.attrs, keepdims=True)


def _samples() -> list[Sample]:
    out = [Sample((Arg(s),), i) for s, i in (((2, 3), 1), ((2, 3, 4), 1), ((5,), 0), ((3, 1), 1), ((0, 3), 1), ((1, 10), 1))]
    out.append(Sample((Arg((2, 3, 2, 2), layout=CHANNELS_LAST),), 1))
    return [*out, Sample((Arg((2, 4), fill="uniform", low=900, high=1000),), 1, grad=False, note="large logits")]


SOFTMAX = Op(
    "softmax", lambda axis, x: x, _softmax, _softmax_vjp, _samples, terms=lambda axis, x: max(x.shape[axis], 1), saves=(), saves_outputs=True
)  # fmt: skip
LOG_SOFTMAX = Op(
    "log_softmax", lambda axis, x: x, _log_softmax, _log_softmax_vjp, _samples, terms=lambda axis, x: max(x.shape[axis], 1), saves=(),
    saves_outputs=True,
)  # fmt: skip


def _call(op: Op, x: Tensor, axis: int) -> Tensor:
    return call(op, (x if x.dtype.is_floating else x.to(dtype=float32),), axes_of(op.name, axis, x.ndim)[0])


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis, without overflow."""
    return _call(SOFTMAX, x, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """x - log(sum(exp(x))) along an axis, without overflow."""
    return _call(LOG_SOFTMAX, x, axis)
