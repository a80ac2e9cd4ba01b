"""Optimizer updates: parameters and their state change in place, as one op over a flat stretch of memory.

Hyper-parameters come as a float64 vector, not as attributes, so that a schedule does not make a new plan each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import Spec
from tilewright.errors import ShapeError
from tilewright.ops._op import Arg, Op, Sample


class SgdAttrs(NamedTuple):
    momentum: bool
    nesterov: bool


class AdamAttrs(NamedTuple):
    decoupled: bool  # weight decay outside the moments: AdamW


class RmspropAttrs(NamedTuple):
    momentum: bool


def _alike(p: Spec, *others: Spec | None) -> None:
    if p.ndim != 1 or any(o is not None and (o.shape != p.shape or o.dtype is not p.dtype) for o in others):
        raise ShapeError(f"optimizer: parameter {p}, gradient and state must be flat, of one size and dtype, and are {others}")


def _sgd_infer(a: SgdAttrs, p: Spec, g: Spec, v: Spec | None, hyper: Spec) -> Any:
    _alike(p, g, v)
    return (p, p) if a.momentum else p


def _sgd(a: SgdAttrs, p: Any, g: Any, v: Any, hyper: Any) -> Any:
    lr, momentum, decay = hyper
    g = g + decay * p
    if not a.momentum:
        return p - lr * g
    v = momentum * v + g
    return p - lr * (g + momentum * v if a.nesterov else v), v


def _state(n: int, states: int) -> tuple[Arg, ...]:
    return (Arg((n,)), Arg((n,)), *[Arg((n,), fill="positive")] * states)


def _hyper(*values: float) -> Arg:
    return Arg((len(values),), "float64", fill="uniform", low=0.1, high=0.9)


SGD = Op(
    "sgd_update",
    _sgd_infer,
    _sgd,
    None,
    lambda: (
        [Sample((*_state(n, 1), _hyper(1, 2, 3)), SgdAttrs(True, nest), grad=False) for n in (7, 0, 70000) for nest in (False, True)]
        + [Sample((Arg((7,)), Arg((7,)), None, _hyper(1, 2, 3)), SgdAttrs(False, False), grad=False)]
    ),
    inplace={0: 0, 1: 2},
)


def _adam_infer(a: AdamAttrs, p: Spec, g: Spec, m: Spec, v: Spec, hyper: Spec) -> Any:
    _alike(p, g, m, v)
    return p, p, p


def _adam(a: AdamAttrs, p: Any, g: Any, m: Any, v: Any, hyper: Any) -> Any:
    lr, b1, b2, eps, decay, fix1, fix2 = hyper
    if a.decoupled:
        p = p * (1 - lr * decay)
    else:
        g = g + decay * p
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    return p - lr / fix1 * m / (np.sqrt(v / fix2) + eps), m, v


ADAM = Op(
    "adam_update",
    _adam_infer,
    _adam,
    None,
    lambda: [Sample((*_state(n, 2), _hyper(1, 2, 3, 4, 5, 6, 7)), AdamAttrs(d), grad=False) for n in (7, 0, 70000) for d in (False, True)],
    inplace={0: 0, 1: 2, 2: 3},
)


def _rms_infer(a: RmspropAttrs, p: Spec, g: Spec, s: Spec, v: Spec | None, hyper: Spec) -> Any:
    _alike(p, g, s, v)
    return (p, p, p) if a.momentum else (p, p)


def _rmsprop(a: RmspropAttrs, p: Any, g: Any, s: Any, v: Any, hyper: Any) -> Any:
    lr, alpha, eps, decay, momentum = hyper
    g = g + decay * p
    s = alpha * s + (1 - alpha) * g * g
    step = g / (np.sqrt(s) + eps)
    if not a.momentum:
        return p - lr * step, s
    v = momentum * v + step
    return p - lr * v, s, v


RMSPROP = Op(
    "rmsprop_update",
    _rms_infer,
    _rmsprop,
    None,
    lambda: (
        [Sample((*_state(n, 2), _hyper(1, 2, 3, 4, 5)), RmspropAttrs(True), grad=False) for n in (7, 0, 70000)]
        + [Sample((*_state(7, 1), None, _hyper(1, 2, 3, 4, 5)), RmspropAttrs(False), grad=False)]
    ),
    inplace={0: 0, 1: 2, 2: 3},
)
