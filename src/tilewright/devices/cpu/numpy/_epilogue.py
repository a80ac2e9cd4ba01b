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


def _erf(x: np.ndarray) -> np.ndarray:
    """Through math.erf on the distinct float64 values: exact, and NumPy has none."""
    flat = x.astype(np.float64).ravel()
    return np.fromiter(map(math.erf, flat), np.float64, flat.size).reshape(x.shape)


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
        np.copyto(out, x * 0.5 * (1 + _erf(x / math.sqrt(2))), casting="unsafe")
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
