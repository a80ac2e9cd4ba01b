"""Matrix products and the fully connected layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import mode
from tilewright.devices.api import CONTIGUOUS, Spec, spec
from tilewright.errors import DTypeError, ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import call, need_tensor, operands
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor


class MatmulAttrs(NamedTuple):
    """Whether the two last axes of each operand are to be read exchanged; nothing is moved."""

    ta: bool = False
    tb: bool = False


def _turn(x: np.ndarray, t: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if t else x


def _infer(a: MatmulAttrs, x: Spec, y: Spec) -> Spec:
    m, k = x.shape[-2:] if not a.ta else (x.shape[-1], x.shape[-2])
    k2, n = y.shape[-2:] if not a.tb else (y.shape[-1], y.shape[-2])
    try:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        batch = None
    if k != k2 or batch is None:
        raise ShapeError(
            f"matmul: shapes {x.shape} and {y.shape} do not fit; the inner sizes {k} and {k2} must be equal and the leading axes broadcast"
        )
    return spec((*batch, m, n), x.dtype)


def _vjp(node: Any, g: Tensor) -> Any:
    x, y = node.inputs
    ta, tb = node.attrs
    dx = dy = None
    if node.needs[0]:
        dx = call(MATMUL, (y, g), MatmulAttrs(tb, True)) if ta else call(MATMUL, (g, y), MatmulAttrs(False, not tb))
        dx = unbroadcast(dx, node.specs[0])
    if node.needs[1]:
        dy = call(MATMUL, (g, x), MatmulAttrs(True, ta)) if tb else call(MATMUL, (x, g), MatmulAttrs(not ta, False))
        dy = unbroadcast(dy, node.specs[1])
    return dx, dy


def _samples() -> list[Sample]:
    out = [
        Sample((Arg(x), Arg(y)), MatmulAttrs())
        for x, y in (((2, 3), (3, 4)), ((1, 1), (1, 1)), ((0, 3), (3, 2)), ((2, 0), (0, 2)), ((5, 2, 3), (3, 4)), ((1, 2, 3), (4, 3, 2)),
                     ((2, 1, 2, 3), (3, 3, 2)))
    ]  # fmt: skip
    out += [Sample((Arg(x), Arg(y)), MatmulAttrs(ta, tb)) for x, y, ta, tb in (((3, 2), (3, 4), True, False), ((2, 3), (4, 3), False, True),
                                                                             ((2, 3, 2), (2, 4, 3), True, True))]  # fmt: skip
    out.append(Sample((Arg((65, 130)), Arg((130, 33))), MatmulAttrs(), grad=False))
    out.append(Sample((Arg((3, 4), "int32"), Arg((4, 2), "int32")), MatmulAttrs(), grad=False))
    return out


def _error() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    text = "matmul: shapes (2, 3) and (4, 5) do not fit; the inner sizes 3 and 4 must be equal and the leading axes broadcast"
    return [
        ErrorSample(lambda: matmul(zeros(2, 3), zeros(4, 5)), ShapeError, text),
        ErrorSample(
            lambda: linear(zeros(2, 3), zeros(4, 5)),
            ShapeError,
            "linear: input (2, 3) must end in the 5 features that weight (4, 5) takes",
        ),
    ]


MATMUL = Op(
    "matmul",
    _infer,
    lambda a, x, y: np.matmul(_turn(x, a.ta), _turn(y, a.tb)),
    _vjp,
    _samples,
    _error,
    flops=lambda a, x, y: 2.0 * _infer(a, x, y).size * (x.shape[-2] if a.ta else x.shape[-1]),
    terms=lambda a, x, y: max(x.shape[-2] if a.ta else x.shape[-1], 1),
)


def matmul(a: Any, b: Any) -> Tensor:
    """Matrix product of (..., M, K) and (..., K, N), leading axes broadcast; a 1-D operand is a row or a column.

    Raises ShapeError when the inner sizes differ.
    """
    from tilewright.ops.movement import reshape

    a, b = operands("matmul", a, b)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul: shapes {a.shape} and {b.shape}: both operands need at least one axis; use * for a number")
    row, column = a.ndim == 1, b.ndim == 1
    x = reshape(a, (1, -1)) if row else a.to(layout=CONTIGUOUS)
    y = reshape(b, (-1, 1)) if column else b.to(layout=CONTIGUOUS)
    out = call(MATMUL, (x, y), MatmulAttrs())
    if row or column:
        shape = out.shape[:-2] + (() if row else out.shape[-2:-1]) + (() if column else out.shape[-1:])
        out = reshape(out, shape)
    return out


# -- fully connected ---------------------------------------------------------------------------------------------------


class LinearAttrs(NamedTuple):
    activation: str | None = None
    alpha: float = 0.0
    beta: float = 0.0


def _linear_infer(a: LinearAttrs, x: Spec, w: Spec, b: Spec | None) -> Spec:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ShapeError(f"linear: input {x.shape} must end in the {w.shape[-1]} features that weight {w.shape} takes")
    if b is not None and b.shape != (w.shape[0],):
        raise ShapeError(f"linear: bias {b.shape} must be ({w.shape[0]},), one value per output feature")
    if any(s is not None and s.dtype is not x.dtype for s in (w, b)) or not x.dtype.is_floating:
        raise DTypeError(f"linear: input is {x.dtype.name} and weight {w.dtype.name}; all operands must be one floating dtype")
    return spec((x.shape[0], w.shape[0]), x.dtype)


def _linear_reference(a: LinearAttrs, x: np.ndarray, w: np.ndarray, b: Any = None) -> np.ndarray:
    y = np.einsum("nk,fk->nf", x, w)
    return _activation.reference(a.activation, a.alpha, a.beta, y if b is None else y + b)


def _linear_vjp(node: Any, g: Tensor) -> Any:
    x, w, _ = node.inputs
    a = node.attrs
    if a.activation is not None:
        from tilewright.ops.pointwise import activation_grad

        g = activation_grad(a.activation, g, node.outputs[0])
    dx = call(MATMUL, (g, w), MatmulAttrs()) if node.needs[0] else None
    dw = call(MATMUL, (g, x), MatmulAttrs(True, False)) if node.needs[1] else None
    db = None
    if node.needs[2]:
        from tilewright.ops.reduce import sum

        db = sum(g, 0)
    return dx, dw, db


def _linear_samples() -> list[Sample]:
    out = []
    for x, w in (((2, 3), (4, 3)), ((1, 40), (17, 40)), ((0, 3), (2, 3)), ((3, 0), (2, 0)), ((1, 1), (1, 1))):
        out.append(Sample((Arg(x), Arg(w), None), LinearAttrs()))
        out.append(Sample((Arg(x), Arg(w), Arg(w[:1])), LinearAttrs()))
    for name, (alpha, beta) in _activation.DEFAULTS.items():
        smooth = name in ("tanh", "sigmoid")
        out.append(Sample((Arg((3, 8)), Arg((5, 8)), Arg((5,))), LinearAttrs(name, alpha, beta), grad=smooth))
    return out


LINEAR = Op(
    "linear",
    _linear_infer,
    _linear_reference,
    _linear_vjp,
    _linear_samples,
    flops=lambda a, x, w, b: 2.0 * x.shape[0] * w.size,
    terms=lambda a, x, w, b: max(x.shape[1], 1),
    saves=(0, 1),
    saves_outputs=True,
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, alpha: float | None = None, beta: float | None = None
) -> Tensor:  # fmt: skip
    """x (..., in) times weight (out, in) transposed, plus bias (out,), then the activation: (..., out).

    Raises ShapeError or DTypeError when they do not fit.
    """
    need_tensor("linear", x=x, weight=weight)
    shape = x.spec.shape
    if len(shape) != 2:
        from tilewright.ops.movement import reshape

        if not shape or weight.ndim != 2 or shape[-1] != weight.shape[1]:
            raise ShapeError(f"linear: input {shape} must end in the {weight.shape[-1]} features that weight {weight.shape} takes")
        flat = linear(reshape(x, (x.size // shape[-1] if shape[-1] else 0, shape[-1])), weight, bias, activation=activation, alpha=alpha, beta=beta)
        return reshape(flat, (*shape[:-1], weight.shape[0]))
    if activation is None:
        return call(LINEAR, (x, weight, bias), _PLAIN)
    name, a, b = _activation.normalise("linear", activation, alpha, beta)
    if name not in _activation.FROM_OUTPUT and mode.enabled and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        from tilewright.ops.pointwise import activate

        return activate(call(LINEAR, (x, weight, bias), _PLAIN), activation, a, b)
    return call(LINEAR, (x, weight, bias), LinearAttrs(name, a, b))


_PLAIN = LinearAttrs()
