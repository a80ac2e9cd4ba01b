"""Activations that an op can carry as an attribute: name, value and derivative from the *output* where that exists.

A kernel may fuse any of these as an epilogue; fused and unfused give the same function.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.errors import ArgumentError


def reference(name: str | None, alpha: float, beta: float, x: np.ndarray) -> np.ndarray:
    """The activation's value, computed plainly. `alpha`, `beta` as each op's docstring says."""
    if name is None:
        return x
    one = x.dtype.type(1)
    if name == "relu":
        return np.where(np.isnan(x), x, np.maximum(x, 0))
    if name == "relu6":
        return np.where(np.isnan(x), x, np.clip(x, 0, 6))
    if name == "leaky_relu":
        return np.where(x > 0, x, alpha * x)
    if name == "tanh":
        return np.tanh(x)
    if name == "sigmoid":
        return np.where(x >= 0, one / (one + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (one + np.exp(-np.abs(x))))
    if name == "elu":
        return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))
    if name == "silu":
        return x * reference("sigmoid", 0, 0, x)
    if name == "gelu":
        from math import erf

        return x * 0.5 * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if name == "hard_sigmoid":
        return np.clip(alpha * x + beta, 0, 1)
    if name == "hard_swish":
        return x * np.clip(alpha * x + beta, 0, 1)
    if name == "softplus":
        return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    if name == "mish":
        return x * np.tanh(reference("softplus", 0, 0, x))
    raise ArgumentError(f"activation {name!r} is not known; use one of {', '.join(DEFAULTS)}")


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

# Those whose derivative is a function of the output, so that a fused forward keeps all that backward needs.
FROM_OUTPUT = ("relu", "relu6", "tanh", "sigmoid")


def normalise(op: str, activation: Any, alpha: float | None = None, beta: float | None = None) -> tuple[str | None, float, float]:
    """(name, alpha, beta) from a name or None. Raises ArgumentError for an unknown name."""
    if activation is None:
        return None, 0.0, 0.0
    if activation not in DEFAULTS:
        raise ArgumentError(f"{op}: activation {activation!r} is not known; use None or one of {', '.join(DEFAULTS)}")
    a, b = DEFAULTS[activation]
    return activation, float(a if alpha is None else alpha), float(b if beta is None else beta)
