"""Softmax and its logarithm, and their gradients from the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Spec
from tilewright.dtypes import float32
from tilewright.errors import ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.pointwise import exp
from tilewright.ops.reduce import axes_of, sum
from tilewright.tensor import Tensor


def _softmax(axis: int, x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


def _log_softmax(axis: int, x: np.ndarray) -> np.ndarray:
    if not x.shape[axis]:
        return x
    shifted = x - np.max(x, axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _alike(axis: int, g: Spec, y: Spec) -> Spec:
    if g is not y:
        raise ShapeError(f"softmax gradient: {g} and the result {y} must be alike")
    return y


def _call_grad(op: Op, g: Tensor, y: Tensor, axis: int) -> Tensor:
    return call(op, (g.to(layout=y.spec.layout), y), axis)


def _softmax_grad_vjp(node: Any, v: Tensor) -> Any:
    g, y = node.inputs
    axis = node.attrs
    dg = _call_grad(SOFTMAX_GRAD, v, y, axis) if node.needs[0] else None
    dy = None
    if node.needs[1]:
        dy = v * (g - sum(g * y, axis, keepdims=True)) - g * sum(v * y, axis, keepdims=True)
    return dg, dy


def _log_softmax_grad_vjp(node: Any, v: Tensor) -> Any:
    g, y = node.inputs
    axis = node.attrs
    vp = v * exp(y)
    dg = v - sum(vp, axis, keepdims=True) if node.needs[0] else None
    dy = -(vp * sum(g, axis, keepdims=True)) if node.needs[1] else None
    return dg, dy


_SHAPES = (((2, 3), 1), ((2, 3), 0), ((2, 3, 4), 1), ((5,), 0), ((3, 1), 1), ((0, 3), 1), ((3, 0), 1), ((1, 10), 1), ((4, 37), 1))


def _samples() -> list[Sample]:
    out = [Sample((Arg(s),), i) for s, i in _SHAPES]
    out += [Sample((Arg((2, 3, 2, 2), layout=CHANNELS_LAST),), i) for i in (1, 3)]
    out += [Sample((Arg((3, 40), dtype),), 1, grad=False, note=dtype) for dtype in ("float64", "float16", "bfloat16")]
    return [*out, Sample((Arg((2, 4), fill="uniform", low=900, high=1000),), 1, grad=False, note="large logits")]


def _grad_samples(low: float, high: float) -> Any:
    def samples() -> list[Sample]:
        def result(s: tuple[int, ...], layout: str = "contiguous") -> Arg:
            return Arg(s, layout=layout, fill="uniform", low=low, high=high)

        out = [Sample((Arg(s), result(s)), i) for s, i in _SHAPES]
        last = (2, 3, 2, 2)
        return [*out, Sample((Arg(last, layout=CHANNELS_LAST), result(last, CHANNELS_LAST)), 1)]

    return samples


def _errors(name: str) -> Any:
    def errors() -> list[ErrorSample]:
        from tilewright.tensor import zeros

        text = f"{name}: axis 2 must name distinct axes from -2 to 1 of a tensor with 2"
        return [ErrorSample(lambda: globals()[name](zeros(2, 3), 2), ShapeError, text)]

    return errors


def _length(axis: int, x: Spec, *_: Spec) -> int:
    return max(x.shape[axis], 1)


SOFTMAX = Op(
    "softmax",
    lambda axis, x: x,
    _softmax,
    lambda node, g: _call_grad(SOFTMAX_GRAD, g, node.outputs[0], node.attrs),
    _samples,
    _errors("softmax"),
    terms=_length,
    saves=(),
    saves_outputs=True,
)
LOG_SOFTMAX = Op(
    "log_softmax",
    lambda axis, x: x,
    _log_softmax,
    lambda node, g: _call_grad(LOG_SOFTMAX_GRAD, g, node.outputs[0], node.attrs),
    _samples,
    _errors("log_softmax"),
    terms=_length,
    saves=(),
    saves_outputs=True,
)
SOFTMAX_GRAD = Op(
    "softmax_grad",
    _alike,
    lambda axis, g, y: y * (g - (g * y).sum(axis, keepdims=True)),
    _softmax_grad_vjp,
    _grad_samples(0.0, 1.0),
    terms=_length,
)
LOG_SOFTMAX_GRAD = Op(
    "log_softmax_grad",
    _alike,
    lambda axis, g, y: g - np.exp(y) * g.sum(axis, keepdims=True),
    _log_softmax_grad_vjp,
    _grad_samples(-3.0, 0.0),
    terms=_length,
)


def _along(op: Op, x: Tensor, axis: int) -> Tensor:
    need_tensor(op.name, x=x)
    if x.ndim == 0:
        raise ShapeError(f"{op.name}: a 0-d tensor has no axis; reshape it to (1,)")
    return call(op, (x if x.dtype.is_floating else x.to(dtype=float32),), axes_of(op.name, axis, x.ndim)[0])


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis, without overflow. Integers give float32. NaN makes its whole line NaN.

    Raises ShapeError for an axis that x does not have.
    """
    return _along(SOFTMAX, x, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """x - log(sum(exp(x))) along an axis, without overflow. Integers give float32. NaN makes its whole line NaN.

    Raises ShapeError for an axis that x does not have.
    """
    return _along(LOG_SOFTMAX, x, axis)
