"""Reductions over axes, cumulative sums and order statistics."""

from __future__ import annotations

import builtins
import math
from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Spec, spec
from tilewright.dtypes import bool_, float32, int64
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops._call import call
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor, zeros

SHARED = ("axes_of", "reduced")


class ReduceAttrs(NamedTuple):
    axes: tuple[int, ...]
    keepdims: bool


def axes_of(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Axes as sorted non-negative integers; None means all. Raises ShapeError for one out of range or repeated."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    if not builtins.all(isinstance(a, (int, np.integer)) for a in axes):
        raise ArgumentError(f"{name}: axis {axis!r} must be an integer, several, or None for all")
    out = tuple(sorted(int(a) + ndim if a < 0 else int(a) for a in axes))
    if builtins.any(not 0 <= a < ndim for a in out) or len(set(out)) != len(out):
        raise ShapeError(f"{name}: axis {axis} must name distinct axes from {-ndim} to {ndim - 1} of a tensor with {ndim}")
    return out


def reduced(a: ReduceAttrs, x: Spec, dtype: Any = None) -> Spec:
    """The spec of `x` without the reduced axes, or with them at size 1."""
    dtype = dtype or x.dtype
    if a.keepdims:
        return spec((1 if i in a.axes else s for i, s in enumerate(x.shape)), dtype, x.layout)
    return spec((s for i, s in enumerate(x.shape) if i not in a.axes), dtype)


def _kept(node: Any, t: Tensor) -> Tensor:
    """A reduced tensor with the reduced axes back at size 1, in the input's layout."""
    from tilewright.ops.movement import reshape

    x = node.specs[0]
    return reshape(t, tuple(1 if i in node.attrs.axes else s for i, s in enumerate(x.shape))).to(layout=x.layout)


def _sum_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.movement import expand

    return expand(_kept(node, g), node.specs[0].shape)


_CASES = (((2, 3, 4), (0, 2)), ((2, 3, 4), (1,)), ((5,), (0,)), ((), ()), ((3, 4), (0, 1)), ((1, 3), (0,)), ((300, 7), (0,)), ((2, 3), ()))
_EMPTY = (((0, 3), (0,)), ((2, 0), (0,)), ((0,), (0,)))
_LAST = (((2, 3, 4, 5), (0, 2, 3)), ((2, 3, 4, 5), (2, 3)), ((2, 3, 4, 5), (1,)))


def _samples(fill: str, empty: bool, grad: bool, ints: bool = True) -> Any:
    def samples() -> list[Sample]:
        cases = _CASES + (_EMPTY if empty else ())
        out = [Sample((Arg(s, fill=fill),), ReduceAttrs(a, k), grad=grad and math.prod(s) < 200) for s, a in cases for k in (False, True)]
        out += [Sample((Arg(s, layout=CHANNELS_LAST, fill=fill),), ReduceAttrs(a, k), grad=grad) for s, a in _LAST for k in (False, True)]
        if ints:
            out += [Sample((Arg((3, 4), t, fill="int", low=0, high=4),), ReduceAttrs((1,), False), grad=False) for t in ("int32", "uint8", "bool")]
            out.append(Sample((Arg((1100, 256), fill=fill),), ReduceAttrs((0,), False), grad=False, note="many rows"))
        return out

    return samples


def _errors(name: str, empty: bool = True) -> Any:
    def errors() -> list[ErrorSample]:
        f = globals()[name]
        text = f"{name}: axis {{}} must name distinct axes from -2 to 1 of a tensor with 2"
        out = [
            ErrorSample(lambda: f(zeros(2, 3), 2), ShapeError, text.format(2)),
            ErrorSample(lambda: f(zeros(2, 3), -3), ShapeError, text.format(-3)),
            ErrorSample(lambda: f(zeros(2, 3), (0, -2)), ShapeError, text.format((0, -2))),
            ErrorSample(lambda: f(zeros(2, 3), 0.5), ArgumentError, f"{name}: axis 0.5 must be an integer, several, or None for all"),
        ]
        if not empty:
            text = f"{name}: axes (0,) of shape (0, 3) have no elements, and {name} of nothing has no value"
            out.append(ErrorSample(lambda: f(zeros(0, 3), 0), ShapeError, text))
        return out

    return errors


def _terms(a: ReduceAttrs, x: Spec) -> int:
    return builtins.max(x.size // builtins.max(reduced(a, x).size, 1), 1)


def _not_empty(name: str) -> Any:
    def infer(a: ReduceAttrs, x: Spec) -> Spec:
        if builtins.any(x.shape[i] == 0 for i in a.axes):
            raise ShapeError(f"{name}: axes {a.axes} of shape {x.shape} have no elements, and {name} of nothing has no value")
        return reduced(a, x)

    return infer


def _extreme_vjp(node: Any, g: Tensor) -> Tensor:
    """Shared equally among the elements that attain the extreme."""
    from tilewright.ops.pointwise import div, equal, mul

    x = node.inputs[0]
    hit = equal(x, _kept(node, node.outputs[0])).to(dtype=g.dtype)
    return mul(hit, div(_kept(node, g), sum(hit, node.attrs.axes, keepdims=True)))


def _prod_vjp(node: Any, g: Tensor) -> Tensor:
    """g times the product of all others: exact also where elements are zero."""
    from tilewright.ops.pointwise import div, equal, mul, where

    x = node.inputs[0]
    axes = node.attrs.axes
    zero = equal(x, 0.0)
    ones = where(zero, 1.0, x)
    others = prod(ones, axes, keepdims=True)
    count = sum(zero.to(dtype=x.dtype), axes, keepdims=True)
    without = div(others, ones)
    here = where(zero, where(equal(count, 1.0), others, 0.0), where(equal(count, 0.0), without, 0.0))
    return mul(_kept(node, g), here)


def _whole(a: ReduceAttrs, f: Any, x: np.ndarray) -> np.ndarray:
    return f(x, axis=a.axes, keepdims=a.keepdims)


def _counted(x: Spec) -> Any:
    """The type in which bool and integers add up."""
    return x.dtype if x.dtype.is_floating else int64


def _mean_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.movement import expand

    return expand(_kept(node, g) * (1.0 / _terms(node.attrs, node.specs[0])), node.specs[0].shape)


class VarAttrs(NamedTuple):
    axes: tuple[int, ...]
    keepdims: bool
    correction: float


def _var_reference(a: VarAttrs, x: np.ndarray) -> np.ndarray:
    d = x - _whole(ReduceAttrs(a.axes, True), np.mean, x)
    rest = math.prod(x.shape[i] for i in a.axes) - a.correction
    return (d * d).sum(a.axes, keepdims=a.keepdims) / (rest if rest > 0 else math.nan)


def _var_vjp(node: Any, g: Tensor) -> Tensor:
    x = node.inputs[0]
    a = node.attrs
    rest = _terms(a, node.specs[0]) - a.correction
    return _kept(node, g) * (2.0 / rest if rest > 0 else math.nan) * (x - mean(x, a.axes, keepdims=True))


def _var_samples() -> list[Sample]:
    return [
        Sample(s.inputs, VarAttrs(*s.attrs, c), s.grad and _terms(s.attrs, s.inputs[0].spec) > c, s.note)  # type: ignore[union-attr]
        for s in _samples("normal", False, True, False)()
        for c in (0.0, 1.0)
    ]


def _logsumexp_reference(a: ReduceAttrs, x: np.ndarray) -> np.ndarray:
    top = np.max(x, axis=a.axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    out = np.log(np.exp(x - top).sum(a.axes, keepdims=True)) + top
    return out if a.keepdims else out.reshape([s for i, s in enumerate(x.shape) if i not in a.axes])


def _logsumexp_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.pointwise import equal, exp, where

    y = _kept(node, node.outputs[0])
    return _kept(node, g) * exp(node.inputs[0] - where(equal(y, -math.inf), 0.0, y))


def _reduction(name: str, infer: Any, f: Any, vjp: Any, samples: Any, empty: bool = True, **more: Any) -> Op:
    return Op(name, infer, lambda a, x: _whole(a, f, x), vjp, samples, _errors(name, empty), terms=_terms, **more)


def _added(a: ReduceAttrs, x: Spec) -> Spec:
    return reduced(a, x, _counted(x))


def _averaged(a: ReduceAttrs, x: Spec) -> Spec:
    return reduced(a, x, x.dtype if x.dtype.is_floating else float32)


def _judged(a: ReduceAttrs, x: Spec) -> Spec:
    return reduced(a, x, bool_)


SUM = _reduction("sum", _added, np.sum, _sum_vjp, _samples("normal", True, True), saves=())
MEAN = _reduction("mean", _averaged, np.mean, _mean_vjp, _samples("normal", False, True), saves=())
PROD = _reduction("prod", _added, np.prod, _prod_vjp, _samples("positive", True, True))
MAX = _reduction("max", _not_empty("max"), np.max, _extreme_vjp, _samples("distinct", False, True), False, saves_outputs=True)
MIN = _reduction("min", _not_empty("min"), np.min, _extreme_vjp, _samples("distinct", False, True), False, saves_outputs=True)
ANY = _reduction("any", _judged, np.any, None, _samples("int", True, False), saves=())
ALL = _reduction("all", _judged, np.all, None, _samples("int", True, False), saves=())
VAR = Op("var", lambda a, x: reduced(a, x), _var_reference, _var_vjp, _var_samples, _errors("var"), terms=_terms)
_LSE = _samples("normal", False, True, False)
LOGSUMEXP = Op("logsumexp", reduced, _logsumexp_reference, _logsumexp_vjp, _LSE, _errors("logsumexp"), terms=_terms, saves_outputs=True)


def _floating(x: Tensor) -> Tensor:
    return x if x.spec.dtype.is_floating else x.to(dtype=float32)


def sum(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Sum over one axis, several, or all (None); 0 of no elements. bool and integers give int64, half types accumulate
    in float32. Raises ShapeError for an axis that x does not have.
    """
    return call(SUM, (x,), ReduceAttrs(axes_of("sum", axis, x.spec.ndim), bool(keepdims)))


def mean(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Mean over axes (None: all); NaN of no elements. bool and integers give float32; half types accumulate in float32."""
    return call(MEAN, (x,), ReduceAttrs(axes_of("mean", axis, x.spec.ndim), bool(keepdims)))


def var(x: Tensor, axis: Any = None, keepdims: bool = False, correction: float = 1) -> Tensor:
    """Variance about the mean, divided by count - correction (NaN unless that is positive). Two passes, so a large mean
    does no harm. bool and integers give float32."""
    return call(VAR, (_floating(x),), VarAttrs(axes_of("var", axis, x.ndim), bool(keepdims), float(correction)))


def std(x: Tensor, axis: Any = None, keepdims: bool = False, correction: float = 1) -> Tensor:
    """Square root of `var`; where it is 0 the gradient is 0."""
    from tilewright.ops.pointwise import equal, sqrt, where

    v = var(x, axis, keepdims, correction)
    flat = equal(v, 0.0)
    return where(flat, 0.0, sqrt(where(flat, 1.0, v)))


def prod(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Product over axes (None: all); 1 of no elements. bool and integers give int64."""
    return call(PROD, (x,), ReduceAttrs(axes_of("prod", axis, x.ndim), bool(keepdims)))


def max(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Largest element over axes (None: all); NaN where there is one. Equal ones share the gradient. For positions see
    `argmax`. Raises ShapeError when there are no elements.
    """
    return call(MAX, (x,), ReduceAttrs(axes_of("max", axis, x.ndim), bool(keepdims)))


def min(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Smallest element over axes (None: all); NaN where there is one. Equal ones share the gradient. For positions see
    `argmin`. Raises ShapeError when there are no elements.
    """
    return call(MIN, (x,), ReduceAttrs(axes_of("min", axis, x.ndim), bool(keepdims)))


def any(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Is any element nonzero (NaN is), bool; False of no elements."""
    return call(ANY, (x,), ReduceAttrs(axes_of("any", axis, x.ndim), bool(keepdims)))


def all(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Are all elements nonzero (NaN is), bool; True of no elements."""
    return call(ALL, (x,), ReduceAttrs(axes_of("all", axis, x.ndim), bool(keepdims)))


def logsumexp(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over axes (None: all), without overflow; -inf of no elements."""
    return call(LOGSUMEXP, (_floating(x),), ReduceAttrs(axes_of("logsumexp", axis, x.ndim), bool(keepdims)))


# -- positions ---------------------------------------------------------------------------------------------------------


class ArgAttrs(NamedTuple):
    axis: int
    keepdims: bool


def _arg_op(name: str, f: Any) -> Op:
    def infer(a: ArgAttrs, x: Spec) -> Spec:
        if x.shape[a.axis] == 0:
            raise ShapeError(f"{name}: axis {a.axis} of shape {x.shape} has no elements, and {name} of nothing has no value")
        return spec(reduced(ReduceAttrs((a.axis,), a.keepdims), x).shape, int64)

    samples = [
        Sample((Arg(s, fill="distinct"),), ArgAttrs(i, k), grad=False) for s, i in (((2, 3, 4), 1), ((5,), 0), ((3, 4), 1)) for k in (False, True)
    ]

    def errors() -> list[ErrorSample]:
        find = globals()[name]
        return [
            ErrorSample(
                lambda: find(zeros(2, 0), 1), ShapeError, f"{name}: axis 1 of shape (2, 0) has no elements, and {name} of nothing has no value"
            ),
            ErrorSample(lambda: find(zeros(2, 3), 2), ShapeError, f"{name}: axis 2 must name distinct axes from -2 to 1 of a tensor with 2"),
        ]

    last = Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill="distinct"),), ArgAttrs(1, False), grad=False)
    return Op(name, infer, lambda a, x: f(x, axis=a.axis, keepdims=a.keepdims), None, lambda: [*samples, last], errors, saves=())


ARGMAX, ARGMIN = _arg_op("argmax", np.argmax), _arg_op("argmin", np.argmin)


def _position(op: Op, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is None:
        from tilewright.ops.movement import reshape

        out = call(op, (reshape(x, (x.size,)),), ArgAttrs(0, False))
        return reshape(out, (1,) * x.ndim) if keepdims else out
    return call(op, (x,), ArgAttrs(axes_of(op.name, axis, x.ndim)[0], bool(keepdims)))


def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position (int64) of the first largest element along an axis, or in the flattened tensor; of the first NaN if any."""
    return _position(ARGMAX, x, axis, keepdims)


def argmin(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position (int64) of the first smallest element along an axis, or in the flattened tensor; of the first NaN if any."""
    return _position(ARGMIN, x, axis, keepdims)


# -- along an axis -----------------------------------------------------------------------------------------------------


def _cumsum_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.movement import flip

    return flip(cumsum(flip(g, node.attrs), node.attrs), node.attrs)


CUMSUM = Op(
    "cumsum",
    lambda axis, x: x.like(dtype=_counted(x)),
    lambda axis, x: np.cumsum(x, axis),
    _cumsum_vjp,
    lambda: [
        Sample((Arg((2, 3)),), 1),
        Sample((Arg((4,)),), 0),
        Sample((Arg((0, 2)),), 0),
        Sample((Arg((2, 3, 2, 2), layout=CHANNELS_LAST),), 1),
        Sample((Arg((2, 3), "uint8", fill="int", low=200, high=256),), 1, grad=False),
    ],
    terms=lambda axis, x: builtins.max(x.shape[axis], 1),
    saves=(),
)


def cumsum(x: Tensor, axis: int) -> Tensor:
    """Sums of the elements up to and with each one, along an axis. bool and integers give int64."""
    return call(CUMSUM, (x,), axes_of("cumsum", axis, x.ndim)[0])


class TopkAttrs(NamedTuple):
    k: int
    axis: int
    largest: bool


def _topk_infer(a: TopkAttrs, x: Spec) -> Any:
    if not 0 <= a.k <= x.shape[a.axis]:
        raise ShapeError(f"topk: k {a.k} must be from 0 to the {x.shape[a.axis]} elements of axis {a.axis} of shape {x.shape}")
    shape = tuple(a.k if i == a.axis else s for i, s in enumerate(x.shape))
    return spec(shape, x.dtype), spec(shape, int64)


def _topk(a: TopkAttrs, x: np.ndarray) -> Any:
    key = np.where(np.isnan(x), -np.inf, -x) if a.largest else x  # NaN is the largest
    order = np.argsort(key, axis=a.axis, kind="stable")
    if a.largest:
        order = np.take_along_axis(order, np.argsort(~np.isnan(np.take_along_axis(x, order, a.axis)), axis=a.axis, kind="stable"), a.axis)
    index = np.take(order, np.arange(a.k), a.axis)
    return np.take_along_axis(x, index, a.axis), index


def _topk_vjp(node: Any, g: Tensor | None, _: Any) -> Tensor | None:
    from tilewright.ops.movement import scatter_add

    if g is None:
        return None
    x = node.specs[0]
    return scatter_add(zeros(x.shape, dtype=x.dtype, device=g.device), node.attrs.axis, node.outputs[1], g).to(layout=x.layout)


TOPK = Op(
    "topk",
    _topk_infer,
    _topk,
    _topk_vjp,
    lambda: [
        Sample((Arg((3, 5), fill="distinct"),), TopkAttrs(2, 1, True)),
        Sample((Arg((4, 2), fill="distinct"),), TopkAttrs(3, 0, False)),
        Sample((Arg((3,), fill="distinct"),), TopkAttrs(0, 0, True), grad=False),
    ],
    saves=(),
    saves_outputs=True,
)


def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements along an axis in order, and their positions (int64)."""
    if not isinstance(k, (int, np.integer)):
        raise ArgumentError(f"topk: k {k!r} must be an integer")
    return call(TOPK, (x,), TopkAttrs(int(k), axes_of("topk", axis, x.ndim)[0], bool(largest)))
