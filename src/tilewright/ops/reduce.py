"""Reductions over axes."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Spec, spec
from tilewright.errors import ShapeError
from tilewright.ops._call import call
from tilewright.ops._op import Arg, Op, Sample
from tilewright.tensor import Tensor


class ReduceAttrs(NamedTuple):
    axes: tuple[int, ...]
    keepdims: bool


def axes_of(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Axes as sorted non-negative integers; None means all. Raises ShapeError for one out of range or repeated."""
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    out = tuple(sorted(a + ndim if a < 0 else a for a in axes))
    if any(not 0 <= a < ndim for a in out) or len(set(out)) != len(out):
        raise ShapeError(f"{name}: axis {axis} must name distinct axes from {-ndim} to {ndim - 1} of a tensor with {ndim}")
    return out


def reduced(a: ReduceAttrs, x: Spec) -> Spec:
    if a.keepdims:
        return x.like(shape=tuple(1 if i in a.axes else s for i, s in enumerate(x.shape)))
    return spec((s for i, s in enumerate(x.shape) if i not in a.axes), x.dtype)


def _sum_vjp(node: Any, g: Tensor) -> Tensor:
    from tilewright.ops.movement import expand, reshape

    x = node.specs[0]
    kept = tuple(1 if i in node.attrs.axes else s for i, s in enumerate(x.shape))
    return expand(reshape(g, kept).to(layout=x.layout), x.shape)


def _samples() -> list[Sample]:
    out = [
        Sample((Arg(s),), ReduceAttrs(axes, keep))
        for s, axes in (
            ((2, 3, 4), (0, 2)),
            ((2, 3, 4), (1,)),
            ((5,), (0,)),
            ((), ()),
            ((0, 3), (0,)),
            ((2, 0), (0,)),
            ((3, 4), (0, 1)),
        )
        for keep in (False, True)
    ]
    return [
        *out,
        Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST),), ReduceAttrs((0, 2, 3), True)),
        Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST),), ReduceAttrs((2, 3), False)),
    ]


SUM = Op(
    "sum",
    reduced,
    lambda a, x: x.sum(a.axes, keepdims=a.keepdims),
    _sum_vjp,
    _samples,
    terms=lambda a, x: max(x.size // max(reduced(a, x).size, 1), 1),
    saves=(),
)


def sum(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Sum over one axis, several, or all (None). Accumulated in at least float32."""
    return call(SUM, (x,), ReduceAttrs(axes_of("sum", axis, x.ndim), keepdims))


_ = CONTIGUOUS
