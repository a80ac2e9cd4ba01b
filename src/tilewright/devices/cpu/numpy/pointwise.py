"""Pointwise ops as NumPy ufuncs writing straight into the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import register
from tilewright.devices.cpu.numpy import _epilogue
from tilewright.devices.cpu.numpy._base import NumpyKernel
from tilewright.devices.cpu.numpy._blocks import elementwise

Function = Callable[..., None]  # fn(out, *arrays)


def _half(a: np.ndarray) -> bool:
    return a.dtype.itemsize == 2 and a.dtype.kind not in "iu"


def _widened(fn: Function) -> Function:
    """`fn` in float32 where operands are float16 or bfloat16: quicker, and rounded once."""

    def run(out: np.ndarray, *arrays: np.ndarray) -> None:
        if not out.ndim:  # arithmetic on 0-d arrays gives scalars, which are no place to write to
            out, arrays = out.reshape(1), tuple(a.reshape(1) for a in arrays)
        if not _half(arrays[-1]):
            fn(out, *arrays)
            return
        wide = [a.astype(np.float32) if _half(a) else a for a in arrays]
        if _half(out):
            result = np.empty(out.shape, np.float32)
            fn(result, *wide)
            np.copyto(out, result, casting="unsafe")
        else:
            fn(out, *wide)

    return run


def _enter(name: str, fn: Function) -> None:
    wide = _widened(fn)
    register(NumpyKernel(name, lambda attrs, out, *arrays: elementwise(wide, out, *arrays)))


def _enter_with(name: str, fn: Callable[..., Function]) -> None:
    """As `_enter`, for fn(attrs) -> function."""
    register(NumpyKernel(name, lambda attrs, out, *arrays: elementwise(_widened(fn(attrs)), out, *arrays)))


def _ufunc(f: Any) -> Function:
    return lambda out, *arrays: f(*arrays, out=out)


def _pow(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    if out.dtype.kind == "i" and (b < 0).any():
        # An integer to a negative power, truncated toward zero: 1 and -1 keep their size, 0 has no value and gives 0.
        np.power(np.where((b < 0) & (np.abs(a) != 1), 0, a), np.where(b < 0, np.where(np.abs(a) == 1, b & 1, 1), b), out=out)
    else:
        np.power(a, b, out=out)


def _rsqrt(out: np.ndarray, x: np.ndarray) -> None:
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


def _prelu(out: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    _epilogue.choose(out, x > 0, x, x * w)


for _name, _f in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floor_div": np.floor_divide,
    "remainder": np.remainder,
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
    "square": np.square,
    "reciprocal": np.reciprocal,
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

_enter("pow", _pow)
_enter("rsqrt", _rsqrt)
_enter("erf", lambda out, x: np.copyto(out, _epilogue.erf(x)))
register(NumpyKernel("where", lambda attrs, out, *arrays: elementwise(_epilogue.choose, out, *arrays)))
_enter("prelu", _prelu)


def _clamp(attrs: Any) -> Function:
    low, high = attrs

    def clamp(out: np.ndarray, x: np.ndarray) -> None:
        if low is None:
            np.minimum(x, high, out=out)
        elif high is None:
            np.maximum(x, low, out=out)
        else:
            np.clip(x, low, high, out=out)

    return clamp


def _clamp_grad(attrs: Any) -> Function:
    low, high = attrs

    def grad(out: np.ndarray, g: np.ndarray, x: np.ndarray) -> None:
        inside = x <= high if low is None else x >= low
        if low is not None and high is not None:
            np.logical_and(inside, x <= high, out=inside)
        np.multiply(g, inside, out=out)

    return grad


_enter_with("clamp", _clamp)
_enter_with("clamp_grad", _clamp_grad)


def _activation(name: str) -> None:
    _enter_with(name, lambda attrs: lambda out, x: _epilogue.activate(out, x, name, *attrs))
    _enter_with(f"{name}_grad", lambda attrs: lambda out, g, s: _epilogue.activation_grad(out, g, s, name, *attrs))


for _name in (
    "relu", "relu6", "hard_tanh", "leaky_relu", "tanh", "sigmoid", "elu", "selu", "silu", "gelu", "gelu_tanh", "hard_sigmoid", "hard_swish",
    "softplus", "logsigmoid", "softsign", "mish",
):  # fmt: skip
    _activation(_name)
