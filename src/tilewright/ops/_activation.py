"""Activations: value and derivative of each, computed plainly, and which of them an op can carry as an attribute.

A kernel may fuse any of `DEFAULTS` as an epilogue; fused and unfused give the same function. Where a derivative is
known from the output alone (`FROM_OUTPUT`), a fused forward keeps all that backward needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.errors import ArgumentError

# name -> (alpha, beta) that the activation takes when none are given
DEFAULTS: dict[str, tuple[float, float]] = {
    "relu": (0.0, 0.0),
    "relu6": (0.0, 6.0),
    "leaky_relu": (0.01, 0.0),
    "tanh": (0.0, 0.0),
    "sigmoid": (0.0, 0.0),
    "elu": (1.0, 0.0),
    "silu": (0.0, 0.0),
    "gelu": (0.0, 0.0),
    "gelu_tanh": (0.0, 0.0),
    "hard_sigmoid": (1 / 6, 0.5),
    "hard_swish": (1 / 6, 0.5),
    "softplus": (0.0, 0.0),
    "mish": (0.0, 0.0),
}
# Those that are ops of their own only, never an attribute.
ALONE: dict[str, tuple[float, float]] = {
    "hard_tanh": (-1.0, 1.0),
    "selu": (1.6732632423543772, 1.0507009873554805),
    "logsigmoid": (0.0, 0.0),
    "softsign": (0.0, 0.0),
}
ALL = DEFAULTS | ALONE

FROM_OUTPUT = ("relu", "relu6", "hard_tanh", "tanh", "sigmoid")


def normalise(op: str, activation: Any, alpha: float | None = None, beta: float | None = None) -> tuple[str | None, float, float]:
    """(name, alpha, beta) from a name or None. Raises ArgumentError for an unknown name."""
    if activation is None:
        return None, 0.0, 0.0
    if activation not in DEFAULTS:
        raise ArgumentError(f"{op}: activation {activation!r} is not known; use None or one of {', '.join(DEFAULTS)}")
    a, b = DEFAULTS[activation]
    return activation, float(a if alpha is None else alpha), float(b if beta is None else beta)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


_GELU = math.sqrt(2 / math.pi)


def reference(name: str | None, alpha: float, beta: float, x: np.ndarray) -> np.ndarray:
    """The activation's value. `alpha` and `beta` as each op's docstring says."""
    if name is None:
        return x
    if name == "relu":
        return np.where(x <= 0, 0, x)
    if name == "relu6":
        return np.clip(x, 0, 6)
    if name == "hard_tanh":
        return np.clip(x, alpha, beta)
    if name == "leaky_relu":
        return np.where(x > 0, x, alpha * x)
    if name == "tanh":
        return np.tanh(x)
    if name == "sigmoid":
        return _sigmoid(x)
    if name == "elu":
        return np.where(x <= 0, alpha * np.expm1(np.minimum(x, 0)), x)
    if name == "selu":
        return beta * np.where(x <= 0, alpha * np.expm1(np.minimum(x, 0)), x)
    if name == "silu":
        return x * _sigmoid(x)
    if name == "gelu":
        return x * _normal_cdf(x)
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(_GELU * (x + 0.044715 * x**3)))
    if name == "hard_sigmoid":
        return np.clip(alpha * x + beta, 0, 1)
    if name == "hard_swish":
        return x * np.clip(alpha * x + beta, 0, 1)
    if name == "softplus":
        return _softplus(x)
    if name == "logsigmoid":
        return -_softplus(-x)
    if name == "softsign":
        return x / (1 + np.abs(x))
    if name == "mish":
        return x * np.tanh(_softplus(x))
    raise ArgumentError(f"activation {name!r} is not known; use one of {', '.join(ALL)}")


def derivative(name: str, alpha: float, beta: float, s: np.ndarray) -> np.ndarray:
    """The activation's derivative from `s`: its output for those in FROM_OUTPUT, its input for the others."""
    if name == "relu":
        return np.where(s <= 0, 0.0, 1.0)
    if name == "relu6":
        return np.where((s > 0) & (s < 6), 1.0, 0.0)
    if name == "hard_tanh":
        return np.where((s > alpha) & (s < beta), 1.0, 0.0)
    if name == "tanh":
        return 1 - s**2
    if name == "sigmoid":
        return s * (1 - s)
    if name == "leaky_relu":
        return np.where(s <= 0, alpha, 1.0)
    if name == "elu":
        return np.where(s <= 0, alpha * np.exp(np.minimum(s, 0)), 1.0)
    if name == "selu":
        return beta * np.where(s <= 0, alpha * np.exp(np.minimum(s, 0)), 1.0)
    if name == "silu":
        return _sigmoid(s) * (1 + s * _sigmoid(-s))
    if name == "gelu":
        return _normal_cdf(s) + s * np.exp(-(s**2) / 2) / math.sqrt(2 * math.pi)
    if name == "gelu_tanh":
        t = np.tanh(_GELU * (s + 0.044715 * s**3))
        return 0.5 * (1 + t) + 0.5 * s * (1 - t**2) * _GELU * (1 + 3 * 0.044715 * s**2)
    if name == "hard_sigmoid":
        line = alpha * s + beta
        return np.where((line > 0) & (line < 1), alpha, 0.0)
    if name == "hard_swish":
        line = alpha * s + beta
        return np.where(line <= 0, 0.0, np.where(line < 1, 2 * alpha * s + beta, 1.0))
    if name == "softplus":
        return _sigmoid(s)
    if name == "logsigmoid":
        return _sigmoid(-s)
    if name == "softsign":
        return 1 / (1 + np.abs(s)) ** 2
    if name == "mish":
        t = np.tanh(_softplus(s))
        return t + s * (1 - t**2) * _sigmoid(s)
    raise ArgumentError(f"activation {name!r} is not known; use one of {', '.join(ALL)}")
