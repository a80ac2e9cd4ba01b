"""What a kernel does to its output last: bias, residual, activation, in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def epilogue(y: np.ndarray, bias: Any, residual: Any, activation: str | None, alpha: float, beta: float) -> None:
    """y (N, C, spatial...) := activation(y + bias + residual)."""
    if bias is not None:
        y += bias.reshape(1, -1, *[1] * (y.ndim - 2))
    if residual is not None:
        y += residual
    if activation is not None:
        activate(y, y, activation, alpha, beta)


# Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969).
_SMALL_P = (3.20937758913846947e3, 3.77485237685302021e2, 1.13864154151050156e2, 3.16112374387056560, 1.85777706184603153e-1)
_SMALL_Q = (2.84423683343917062e3, 1.28261652607737228e3, 2.44024637934444173e2, 2.36012909523441209e1, 1.0)
_MIDDLE_P = (
    1.23033935479799725e3, 2.05107837782607147e3, 1.71204761263407058e3, 8.81952221241769090e2, 2.98635138197400131e2,
    6.61191906371416295e1, 8.88314979438837594, 5.64188496988670089e-1, 2.15311535474403846e-8,
)  # fmt: skip
_MIDDLE_Q = (
    1.23033935480374942e3, 3.43936767414372164e3, 4.36261909014324716e3, 3.29079923573345963e3, 1.62138957456669019e3,
    5.37181101862009858e2, 1.17693950891312499e2, 1.57449261107098347e1, 1.0,
)  # fmt: skip
_LARGE_P = (
    -6.58749161529837803e-4, -1.60837851487422766e-2, -1.25781726111229246e-1, -3.60344899949804439e-1, -3.05326634961232344e-1,
    -1.63153871373020978e-2,
)  # fmt: skip
_LARGE_Q = (2.33520497626869185e-3, 6.05183413124413191e-2, 5.27905102951428412e-1, 1.87295284992346047, 2.56852019228982242, 1.0)


def _ratio(x: np.ndarray, p: tuple[float, ...], q: tuple[float, ...]) -> np.ndarray:
    top, bottom = np.full_like(x, p[-1]), np.full_like(x, q[-1])
    for c in p[-2::-1]:
        top = top * x + c
    for c in q[-2::-1]:
        bottom = bottom * x + c
    return top / bottom


def erf(x: np.ndarray) -> np.ndarray:
    """The error function in float64, to about one unit in the last place."""
    x = x.astype(np.float64)
    y = np.abs(x)
    square = y * y
    out = np.where(y <= 0.46875, x * _ratio(np.minimum(square, 0.25), _SMALL_P, _SMALL_Q), 0.0)
    middle = (y > 0.46875) & (y <= 4)
    if middle.any():
        v = y[middle]
        out[middle] = np.sign(x[middle]) * (1 - np.exp(-v * v) * _ratio(v, _MIDDLE_P, _MIDDLE_Q))
    large = y > 4
    if large.any():
        v = np.minimum(y[large], 10.0)
        inverse = 1 / (v * v)
        tail = np.exp(-v * v) / v * (1 / math.sqrt(math.pi) + inverse * _ratio(inverse, _LARGE_P, _LARGE_Q))
        out[large] = np.sign(x[large]) * (1 - tail)
    return np.where(np.isnan(x), x, out)


def activate(out: np.ndarray, x: np.ndarray, name: str, alpha: float, beta: float) -> None:
    """out := activation(x); `out` may be `x`."""
    if name == "relu":
        np.maximum(x, 0, out=out)
    elif name == "relu6":
        np.clip(x, 0, 6, out=out)
    elif name == "leaky_relu":
        np.copyto(out, np.where(x > 0, x, x * x.dtype.type(alpha)))
    elif name == "tanh":
        np.tanh(x, out=out)
    elif name == "sigmoid":
        _sigmoid(out, x)
    elif name == "elu":
        np.copyto(out, np.where(x > 0, x, np.expm1(np.minimum(x, 0)) * x.dtype.type(alpha)))
    elif name == "silu":
        np.multiply(x, _sigmoid(np.empty_like(x), x), out=out)
    elif name == "gelu":
        np.copyto(out, x * 0.5 * (1 + erf(x / math.sqrt(2))), casting="unsafe")
    elif name == "gelu_tanh":
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        np.copyto(out, 0.5 * x * (1 + inner), casting="unsafe")
    elif name == "hard_sigmoid":
        np.clip(x * x.dtype.type(alpha) + x.dtype.type(beta), 0, 1, out=out)
    elif name == "hard_swish":
        np.multiply(x, np.clip(x * x.dtype.type(alpha) + x.dtype.type(beta), 0, 1), out=out)
    elif name == "softplus":
        np.logaddexp(x, 0, out=out)
    elif name == "mish":
        np.multiply(x, np.tanh(np.logaddexp(x, x.dtype.type(0))), out=out)
    else:
        raise NotImplementedError(name)


def _sigmoid(out: np.ndarray, x: np.ndarray) -> np.ndarray:
    half = x.dtype.type(0.5)
    np.multiply(x, half, out=out)
    np.tanh(out, out=out)
    np.multiply(out, half, out=out)
    np.add(out, half, out=out)
    return out
