"""Pointwise ops as NumPy ufuncs writing straight into the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import register
from tilewright.devices.cpu.numpy._base import NumpyKernel, numpy_kernel
from tilewright.devices.cpu.numpy._blocks import elementwise
from tilewright.devices.cpu.numpy._epilogue import activate, erf


def _enter(name: str, fn: Callable[..., None]) -> None:
    register(NumpyKernel(name, lambda attrs, out, *arrays: elementwise(fn, out, *arrays)))


def _ufunc(f: Any) -> Callable[..., None]:
    return lambda out, *arrays: f(*arrays, out=out)


def _div(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    (np.divide if out.dtype.kind not in "iu" else np.floor_divide)(a, b, out=out)


def _rsqrt(out: np.ndarray, x: np.ndarray) -> None:
    np.sqrt(x, out=out)
    np.divide(1, out, out=out)


for _name, _f in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floor_div": np.floor_divide,
    "remainder": np.remainder,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
    "neg": np.negative,
    "abs": np.absolute,
    "sign": np.sign,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "sin": np.sin,
    "cos": np.cos,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
}.items():
    _enter(_name, _ufunc(_f))

_enter("div", _div)
_enter("rsqrt", _rsqrt)
_enter("reciprocal", lambda out, x: np.divide(1, x, out=out))
_enter("erf", lambda out, x: np.copyto(out, erf(x), casting="unsafe"))
_enter("where", lambda out, c, a, b: np.copyto(out, np.where(c, a, b)))


@numpy_kernel("clamp")
def _clamp(attrs: Any, out: Any, x: Any) -> None:
    low, high = attrs
    if low is None or high is None:
        bound = out.dtype.type(high if low is None else low)
        elementwise(lambda o, v: (np.minimum if low is None else np.maximum)(v, bound, out=o), out, x)
    else:
        elementwise(lambda o, v: np.clip(v, out.dtype.type(low), out.dtype.type(high), out=o), out, x)


def _activation(name: str) -> None:
    register(NumpyKernel(name, lambda attrs, out, x: elementwise(lambda o, v: activate(o, v, name, *attrs), out, x)))


for _name in (
    "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "elu", "silu", "gelu", "gelu_tanh", "hard_sigmoid", "hard_swish", "softplus", "mish",
):  # fmt: skip
    _activation(_name)


def _tanh_grad(out: np.ndarray, g: np.ndarray, y: np.ndarray) -> None:
    np.multiply(y, y, out=out)
    np.subtract(1, out, out=out)
    np.multiply(out, g, out=out)


def _sigmoid_grad(out: np.ndarray, g: np.ndarray, y: np.ndarray) -> None:
    np.subtract(1, y, out=out)
    np.multiply(out, y, out=out)
    np.multiply(out, g, out=out)


_enter("relu_grad", lambda out, g, y: np.multiply(g, y > 0, out=out))
_enter("relu6_grad", lambda out, g, y: np.multiply(g, (y > 0) & (y < 6), out=out))
_enter("tanh_grad", _tanh_grad)
_enter("sigmoid_grad", _sigmoid_grad)
