"""Matrix products and the fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import mode
from tilewright.devices.api import CONTIGUOUS, Spec, spec
from tilewright.dtypes import promote
from tilewright.errors import ArgumentError, DTypeError, ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import call, need_tensor, operands
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample, wide
from tilewright.tensor import Tensor


class MatmulAttrs(NamedTuple):
    """Whether the two last axes of each operand are to be read exchanged; nothing is moved."""

    ta: bool = False
    tb: bool = False


def _turn(x: np.ndarray, t: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if t else x


def _infer(a: MatmulAttrs, x: Spec, y: Spec) -> Spec:
    if x.dtype is not y.dtype or x.dtype.kind == "b":
        raise DTypeError(f"matmul: operands are {x.dtype.name} and {y.dtype.name}; both must be one numeric dtype, convert with .to(dtype=)")
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


def _reference_at(a: MatmulAttrs, inputs: Sequence[Any], output: int, positions: np.ndarray) -> np.ndarray:
    x, y = (_turn(v, t) for v, t in zip(inputs, a, strict=True))
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = np.broadcast_to(x, (*batch, *x.shape[-2:])), np.broadcast_to(y, (*batch, *y.shape[-2:]))
    out = np.empty(len(positions), x.dtype if x.dtype.kind in "iu" else np.float64)
    for p, (*at, i, j) in enumerate(positions.tolist()):
        out[p] = np.dot(wide(x[(*at, i)]), wide(y[(*at, slice(None), j)]))
    return out


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


_PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((2, 3), (3, 4)),
    ((1, 1), (1, 1)),
    ((1, 40), (40, 17)),
    ((40, 3), (3, 1)),
    ((0, 3), (3, 2)),
    ((3, 2), (2, 0)),
    ((2, 0), (0, 2)),
    ((5, 2, 3), (3, 4)),
    ((1, 2, 3), (4, 3, 2)),
    ((2, 1, 2, 3), (3, 3, 2)),
    ((2, 0, 3), (2, 3, 4)),
)


def _samples() -> list[Sample]:
    def turned(shape: tuple[int, ...], t: bool) -> Arg:
        return Arg((*shape[:-2], shape[-1], shape[-2]) if t else shape)

    out = [Sample((turned(x, ta), turned(y, tb)), MatmulAttrs(ta, tb)) for x, y in _PAIRS for ta in (False, True) for tb in (False, True)]
    for m, k, n in ((65, 130, 33), (1, 300, 70)):
        out += [Sample((turned((m, k), ta), turned((k, n), tb)), MatmulAttrs(ta, tb), grad=False) for ta in (False, True) for tb in (False, True)]
    for dtype in ("float64", "float16", "bfloat16", "int32", "uint8"):
        out.append(Sample((Arg((9, 20), dtype), Arg((20, 5), dtype)), MatmulAttrs(), grad=False, note=dtype))
    return out


def _error() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    text = "matmul: shapes (2, 3) and (4, 5) do not fit; the inner sizes 3 and 4 must be equal and the leading axes broadcast"
    return [
        ErrorSample(lambda: matmul(zeros(2, 3), zeros(4, 5)), ShapeError, text),
        ErrorSample(
            lambda: matmul(zeros(2, 2, 3), zeros(3, 3, 5)),
            ShapeError,
            "matmul: shapes (2, 2, 3) and (3, 3, 5) do not fit; the inner sizes 3 and 3 must be equal and the leading axes broadcast",
        ),
        ErrorSample(
            lambda: matmul(zeros(()), zeros(3)),
            ShapeError,
            "matmul: shapes () and (3,): both operands need at least one axis; use * for a number",
        ),
        ErrorSample(
            lambda: matmul(zeros(2, 3, dtype="bool"), zeros(3, 2, dtype="bool")),
            DTypeError,
            "matmul: operands are bool and bool; both must be one numeric dtype, convert with .to(dtype=)",
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
    reference_at=_reference_at,
)


def matmul(a: Any, b: Any) -> Tensor:
    """Matrix product of (..., M, K) and (..., K, N), leading axes broadcast; a 1-D operand is a row or a column.

    Returns (..., M, N), contiguous, without the axis of a 1-D operand. Half types accumulate in float32; integers keep
    their dtype and wrap. Raises ShapeError when the inner sizes differ or the leading axes do not broadcast.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands("matmul", a, b)
    x, y = a.spec.shape, b.spec.shape
    if len(x) == len(y) == 2:
        return call(MATMUL, (a, b), _STRAIGHT)
    from tilewright.ops.movement import reshape

    if not x or not y:
        raise ShapeError(f"matmul: shapes {x} and {y}: both operands need at least one axis; use * for a number")
    row, column = len(x) == 1, len(y) == 1
    left = reshape(a, (1, *x)) if row else a.to(layout=CONTIGUOUS)
    right = reshape(b, (*y, 1)) if column else b.to(layout=CONTIGUOUS)
    if left.ndim > 2 and right.ndim == 2 and x[-1] == right.shape[0]:
        # One tall product: it runs faster than many small ones, and its weight gradient needs no sum over the batch.
        out = call(MATMUL, (reshape(left, (prod(x[:-1]), x[-1])), right), _STRAIGHT)
        return reshape(out, (*x[:-1], *(() if column else out.shape[1:])))
    out = call(MATMUL, (left, right), _STRAIGHT)
    if row or column:
        shape = out.shape
        out = reshape(out, (*shape[:-2], *(() if row else shape[-2:-1]), *(() if column else shape[-1:])))
    return out


_STRAIGHT = MatmulAttrs()


# -- fully connected ---------------------------------------------------------------------------------------------------


class LinearAttrs(NamedTuple):
    activation: str | None = None
    alpha: float = 0.0
    beta: float = 0.0


def _linear_infer(a: LinearAttrs, x: Spec, w: Spec, b: Spec | None) -> Spec:
    if w.ndim != 2:
        raise ShapeError(f"linear: weight {w.shape} must have 2 axes (out, in)")
    if x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ShapeError(f"linear: input {x.shape} must end in the {w.shape[-1]} features that weight {w.shape} takes")
    if b is not None and b.shape != (w.shape[0],):
        raise ShapeError(f"linear: bias {b.shape} must be ({w.shape[0]},), one value per output feature of weight {w.shape}")
    if any(s is not None and s.dtype is not x.dtype for s in (w, b)) or not x.dtype.is_floating:
        names = ", ".join(s.dtype.name for s in (x, w, b) if s is not None)
        raise DTypeError(f"linear: operands are {names}; all must be one floating dtype, convert with .to(dtype=)")
    return spec((x.shape[0], w.shape[0]), x.dtype)


def _linear_reference(a: LinearAttrs, x: np.ndarray, w: np.ndarray, b: Any = None) -> np.ndarray:
    y = np.einsum("nk,fk->nf", x, w)
    return _activation.reference(a.activation, a.alpha, a.beta, y if b is None else y + b)


def _linear_at(a: LinearAttrs, inputs: Sequence[Any], output: int, positions: np.ndarray) -> np.ndarray:
    x, w, b = inputs
    y = np.array([np.dot(wide(x[n]), wide(w[f])) for n, f in positions.tolist()], np.float64)
    return _activation.reference(a.activation, a.alpha, a.beta, y if b is None else y + wide(b)[positions[:, 1]])


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
    sizes = ((2, 3, 4), (1, 40, 17), (16, 70, 33), (0, 3, 2), (3, 0, 2), (2, 3, 0), (1, 1, 1))
    for x, w in [((n, k), (m, k)) for n, k, m in sizes]:
        out.append(Sample((Arg(x), Arg(w), None), LinearAttrs(), grad=w[0] < 20))
        out.append(Sample((Arg(x), Arg(w), Arg(w[:1])), LinearAttrs(), grad=w[0] < 20))
    for rows in (1, 3):
        for name, (alpha, beta) in _activation.DEFAULTS.items():
            smooth = name in ("tanh", "sigmoid")
            out.append(Sample((Arg((rows, 8)), Arg((5, 8)), Arg((5,))), LinearAttrs(name, alpha, beta), grad=smooth, note=f"fused {name}"))
    for dtype in ("float64", "float16", "bfloat16"):
        out.append(Sample((Arg((3, 20), dtype), Arg((7, 20), dtype), Arg((7,), dtype)), LinearAttrs("relu"), grad=False, note=dtype))
    return out


def _linear_errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    return [
        ErrorSample(
            lambda: linear(zeros(2, 3), zeros(4, 5)),
            ShapeError,
            "linear: input (2, 3) must end in the 5 features that weight (4, 5) takes",
        ),
        ErrorSample(
            lambda: linear(zeros(2, 6, 3), zeros(4, 5)),
            ShapeError,
            "linear: input (2, 6, 3) must end in the 5 features that weight (4, 5) takes",
        ),
        ErrorSample(
            lambda: linear(zeros(2, 5), zeros(4, 5), zeros(5)),
            ShapeError,
            "linear: bias (5,) must be (4,), one value per output feature of weight (4, 5)",
        ),
        ErrorSample(
            lambda: linear(zeros(2, 5, dtype="int32"), zeros(4, 5, dtype="int32")),
            DTypeError,
            "linear: operands are int32, int32; all must be one floating dtype, convert with .to(dtype=)",
        ),
        ErrorSample(
            lambda: linear(zeros(2, 5), zeros(4, 5), activation="swoosh"),
            ArgumentError,
            f"linear: activation 'swoosh' is not known; use None or one of {', '.join(_activation.DEFAULTS)}",
        ),
    ]


LINEAR = Op(
    "linear",
    _linear_infer,
    _linear_reference,
    _linear_vjp,
    _linear_samples,
    _linear_errors,
    flops=lambda a, x, w, b: 2.0 * x.shape[0] * w.size,
    terms=lambda a, x, w, b: max(x.shape[1], 1),
    reference_at=_linear_at,
    saves=(0, 1),
    saves_outputs=True,
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, alpha: float | None = None, beta: float | None = None
) -> Tensor:  # fmt: skip
    """x (..., in) times weight (out, in) transposed, plus bias (out,), then the activation: (..., out).

    activation: a name in `tilewright.ops._activation`; alpha and beta are its parameters. Operands are promoted to one
    floating dtype; half types accumulate in float32. NaN in a fused activation: see
    `conv2d`. Raises ShapeError, DTypeError or ArgumentError.
    """
    need_tensor("linear", x=x, weight=weight)
    if x.spec.dtype is not weight.spec.dtype:
        wide = promote(x.spec.dtype, weight.spec.dtype)
        x, weight = x.to(dtype=wide), weight.to(dtype=wide)
    shape = x.spec.shape
    if len(shape) != 2:
        from tilewright.ops.movement import reshape

        if not shape or weight.ndim != 2 or shape[-1] != weight.shape[1]:
            raise ShapeError(f"linear: input {shape} must end in the {weight.shape[-1]} features that weight {weight.shape} takes")
        flat = linear(reshape(x, (prod(shape[:-1]), shape[-1])), weight, bias, activation=activation, alpha=alpha, beta=beta)
        return reshape(flat, (*shape[:-1], weight.shape[0]))
    if activation is None:
        return call(LINEAR, (x, weight, bias), _PLAIN)
    name, a, b = _activation.normalise("linear", activation, alpha, beta)
    if name not in _activation.FROM_OUTPUT and mode.enabled and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        from tilewright.ops.pointwise import activate

        return activate(call(LINEAR, (x, weight, bias), _PLAIN), activation, a, b)
    return call(LINEAR, (x, weight, bias), LinearAttrs(name, a, b))


_PLAIN = LinearAttrs()
