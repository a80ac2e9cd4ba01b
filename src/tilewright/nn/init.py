"""Initial values, in place. Fans count the connections of one group: weight (F, C/groups, k...)."""

from __future__ import annotations

import math

import numpy as np

from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops import random
from tilewright.tensor import Tensor


def fans(weight: Tensor, groups: int = 1) -> tuple[int, int]:
    """(fan_in, fan_out): inputs of one output, and outputs of one input."""
    if weight.ndim < 2:
        raise ShapeError(f"init: a weight of shape {weight.shape} has no fan; it needs at least 2 axes")
    field = math.prod(weight.shape[2:])
    return weight.shape[1] * field, weight.shape[0] // groups * field


def gain(nonlinearity: str, a: float = 0.0) -> float:
    """By which a layer's weights are scaled for the activation that follows (He et al., 2015; Glorot and Bengio, 2010)."""
    table = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "leaky_relu": math.sqrt(2 / (1 + a * a)), "selu": 0.75}
    if nonlinearity not in table:
        raise ArgumentError(f"init: nonlinearity {nonlinearity!r} must be one of {', '.join(table)}")
    return table[nonlinearity]


def uniform_(t: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return t.copy_(random.uniform(t.shape, low=low, high=high)) if t.size else t


def normal_(t: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return t.copy_(random.normal(t.shape, mean=mean, std=std)) if t.size else t


def trunc_normal_(t: Tensor, mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0) -> Tensor:
    """Normal, drawn again where outside [low, high]. Raises ArgumentError where that would take for ever."""
    ends = [math.erf((edge - mean) / (std * math.sqrt(2))) for edge in (low, high)] if std > 0 else [0.0, 0.0]
    if ends[1] - ends[0] < 0.01:
        raise ArgumentError(f"init: mean {mean} and std {std} leave less than a hundredth of the values in {low} to {high}; widen the range")
    values = np.array(random.normal(t.shape, mean=mean, std=std).numpy())
    while (outside := (values < low) | (values > high)).any():
        values[outside] = random.normal(int(outside.sum()), mean=mean, std=std).numpy()
    return t.copy_(values)


def constant_(t: Tensor, value: float) -> Tensor:
    return t.copy_(np.full(t.shape, value))


def zeros_(t: Tensor) -> Tensor:
    return constant_(t, 0.0)


def ones_(t: Tensor) -> Tensor:
    return constant_(t, 1.0)


def _fan(t: Tensor, mode: str, groups: int) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"init: mode {mode!r} must be 'fan_in' or 'fan_out'")
    return max(fans(t, groups)[mode == "fan_out"], 1)


def kaiming_uniform_(t: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", groups: int = 1) -> Tensor:
    """He et al., "Delving deep into rectifiers" (2015)."""
    bound = gain(nonlinearity, a) * math.sqrt(3 / _fan(t, mode, groups))
    return uniform_(t, -bound, bound)


def kaiming_normal_(t: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", groups: int = 1) -> Tensor:
    """He et al., "Delving deep into rectifiers" (2015)."""
    return normal_(t, 0.0, gain(nonlinearity, a) / math.sqrt(_fan(t, mode, groups)))


def xavier_uniform_(t: Tensor, gain: float = 1.0, groups: int = 1) -> Tensor:
    """Glorot and Bengio (2010)."""
    bound = gain * math.sqrt(6 / max(sum(fans(t, groups)), 1))
    return uniform_(t, -bound, bound)


def xavier_normal_(t: Tensor, gain: float = 1.0, groups: int = 1) -> Tensor:
    """Glorot and Bengio (2010)."""
    return normal_(t, 0.0, gain * math.sqrt(2 / max(sum(fans(t, groups)), 1)))


def orthogonal_(t: Tensor, gain: float = 1.0) -> Tensor:
    """Rows (or columns, where there are fewer) orthonormal (Saxe et al., 2014)."""
    rows, cols = t.shape[0], math.prod(t.shape[1:])
    a = np.array(random.normal(max(rows, cols), min(rows, cols), dtype="float64").numpy())
    q, r = np.linalg.qr(a)
    q *= np.sign(np.diag(r))
    return t.copy_(gain * (q if rows >= cols else q.T).reshape(t.shape))
