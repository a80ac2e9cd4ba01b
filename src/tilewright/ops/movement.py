"""Ops that move elements without changing them: shape, layout, dtype, device."""

from __future__ import annotations

import builtins
import math
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tilewright.autograd import Node, mode
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, Spec, spec
from tilewright.dtypes import DType, as_dtype, int64, promote
from tilewright.errors import ArgumentError, AutogradError, DTypeError, ShapeError
from tilewright.ops._call import as_tensor, call, need_tensor
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor, tensor, zeros

SHARED = ("view", "same_memory", "axis_of")


def view(op: Op, x: Tensor, to: Spec, attrs: Any) -> Tensor:
    """`x`'s memory under another spec of the same bytes, recorded as `op`."""
    out = Tensor(x.buffer, to, x.device)
    if x.requires_grad and mode.enabled:
        out._node = Node(op, attrs, x.device, (x,), [x.spec], (to,), None)
        out.requires_grad = True
    return out


def same_memory(a: Spec, layout: str) -> bool:
    """Does `a` lie the same in the other layout? True when at most one of C and the spatial extent exceeds 1."""
    return a.layout == layout or a.size == 0 or a.shape[1] == 1 or prod(a.shape[2:]) == 1


# -- layout ------------------------------------------------------------------------------------------------------------

TO_LAYOUT = Op(
    "to_layout",
    lambda attrs, x: x.like(layout=attrs),
    lambda attrs, x: x,
    lambda node, g: to_layout(g, node.specs[0].layout),
    lambda: (
        [
            Sample((Arg(s, layout=a),), b)
            for s in ((2, 3, 4, 5), (2, 3, 4), (1, 2, 2, 3, 2), (0, 3, 2, 2))
            for a, b in ((CONTIGUOUS, CHANNELS_LAST), (CHANNELS_LAST, CONTIGUOUS))
        ]
        + [
            Sample((Arg((2, 24, 11, 13), t, a),), b, grad=False)
            for t in ("float32", "bfloat16", "uint8", "int64")
            for a, b in ((CONTIGUOUS, CHANNELS_LAST), (CHANNELS_LAST, CONTIGUOUS))
        ]
    ),
    lambda: [ErrorSample(lambda: to_layout(zeros(1, 2, 3), "NHWC"), ArgumentError, "layout 'NHWC' is not one of contiguous, channels_last")],
    saves=(),
)


def to_layout(x: Tensor, layout: str) -> Tensor:
    """The same values in layout "contiguous" or "channels_last" (see `Tensor.to`)."""
    if x.spec.layout == layout or not 3 <= x.spec.ndim <= 5:
        return x
    if same_memory(x.spec, layout):
        return view(TO_LAYOUT, x, x.spec.like(layout=layout), layout)
    return call(TO_LAYOUT, (x,), layout)


# -- dtype, copy, device -----------------------------------------------------------------------------------------------

CAST = Op(
    "cast",
    lambda attrs, x: x.like(dtype=attrs),
    lambda attrs, x: x if attrs.is_floating and x.dtype.kind == "f" else x.astype(attrs.np),
    lambda node, g: cast(g, node.specs[0].dtype),
    lambda: [
        Sample((Arg(s, a),), as_dtype(b), grad=False)
        for s in ((2, 3), (3, 1500), (), (0, 2))
        for a, b in (
            ("float32", "float64"),
            ("float32", "int32"),
            ("int64", "float32"),
            ("float32", "bfloat16"),
            ("float32", "float16"),
            ("float16", "float32"),
            ("bfloat16", "float16"),
            ("uint8", "float16"),
            ("int64", "bool"),
            ("bool", "float32"),
            ("int32", "int8"),
        )
    ],
    lambda: [
        ErrorSample(
            lambda: zeros(2).to("complex64"),
            DTypeError,
            "dtype 'complex64' is not one of float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool; convert the data first",
        )
    ],
    saves=(),
)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """`x` converted to `dtype`; the gradient is converted back."""
    return x if x.spec.dtype is dtype else call(CAST, (x,), dtype)


COPY = Op(
    "copy",
    lambda attrs, x: x,
    lambda attrs, x: x,
    lambda node, g: g,
    lambda: [
        Sample((Arg((2, 3)),)),
        Sample((Arg((0,)),)),
        Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST),)),
        Sample((Arg((), "int8"),), grad=False),
    ],
    saves=(),
)


def copy(x: Tensor) -> Tensor:
    """A copy with memory of its own."""
    return call(COPY, (x,))


TRANSFER = Op(
    "transfer",
    lambda attrs, x: x,
    lambda attrs, x: x,
    lambda node, g: transfer(g, node.attrs),
    lambda: [Sample((Arg((2, 3)),), grad=False)],
    saves=(),
)


def transfer(x: Tensor, device: Device) -> Tensor:
    """`x` on another device; the gradient comes back."""
    buffer = device.upload(x.device.download(x.buffer, x.spec), x.spec)
    out = Tensor(buffer, x.spec, device)
    if x.requires_grad and mode.enabled:
        out._node = Node(TRANSFER, x.device, device, (x,), [x.spec], (x.spec,), None)
        out.requires_grad = True
    return out


# -- shape -------------------------------------------------------------------------------------------------------------

RESHAPE = Op(
    "reshape",
    lambda attrs, x: spec(attrs, x.dtype),
    lambda attrs, x: x.reshape(attrs),
    lambda node, g: reshape(g, node.specs[0].shape),
    lambda: [
        Sample((Arg((2, 3, 4)),), (4, 6)),
        Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST),), (2, 60)),
        Sample((Arg((0, 3)),), (3, 0, 2)),
        Sample((Arg(()),), (1, 1)),
    ],
    lambda: [
        ErrorSample(lambda: reshape(zeros(2, 3), 4, 2), ShapeError, "reshape: (2, 3) has 6 elements and (4, 2) has 8; they must be equal"),
        ErrorSample(
            lambda: reshape(zeros(2, 3), -1, 4),
            ShapeError,
            "reshape: (2, 3) (6 elements) cannot become (-1, 4); the known sizes must divide the count",
        ),
        ErrorSample(lambda: flatten(zeros(2, 3, 4), 2, 1), ShapeError, "flatten: axis 2 lies after axis 1 in shape (2, 3, 4); give them in order"),
        ErrorSample(
            lambda: squeeze(zeros(2, 1), 0), ShapeError, "squeeze: axis 0 of shape (2, 1) has a size other than 1; only axes of size 1 can go"
        ),
        ErrorSample(lambda: unsqueeze(zeros(2), 3), ShapeError, "unsqueeze: axis 3 must be an integer from -2 to 1 for a tensor with 2 axes"),
    ],
    saves=(),
)


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements, in logical order, under another shape; one size may be -1. Shares memory where it can.

    Raises ShapeError when the element counts differ.
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if -1 in sizes:
        known = prod(s for s in sizes if s != -1)
        if sizes.count(-1) > 1 or known == 0 or x.size % known:
            raise ShapeError(f"reshape: {x.shape} ({x.size} elements) cannot become {sizes}; the known sizes must divide the count")
        sizes = tuple(x.size // known if s == -1 else s for s in sizes)
    if prod(sizes) != x.size:
        raise ShapeError(f"reshape: {x.shape} has {x.size} elements and {sizes} has {prod(sizes)}; they must be equal")
    if sizes == x.spec.shape:
        return x
    if x.spec.layout == CONTIGUOUS:
        return view(RESHAPE, x, spec(sizes, x.spec.dtype), sizes)
    if len(sizes) == 4 and x.ndim == 3 and sizes == (*x.shape[:2], 1, x.shape[2]):
        return view(RESHAPE, x, spec(sizes, x.spec.dtype, CHANNELS_LAST), sizes)
    if len(sizes) == 3 and x.ndim == 4 and x.shape[2] == 1 and sizes == (*x.shape[:2], x.shape[3]):
        return view(RESHAPE, x, spec(sizes, x.spec.dtype, CHANNELS_LAST), sizes)
    if same_memory(x.spec, CONTIGUOUS):
        return view(RESHAPE, x, spec(sizes, x.spec.dtype), sizes)
    return call(RESHAPE, (x,), sizes)


EXPAND = Op(
    "expand",
    lambda attrs, x: spec(attrs, x.dtype, x.layout if len(attrs) == x.ndim else CONTIGUOUS),
    lambda attrs, x: np.broadcast_to(x, attrs),
    lambda node, g: unbroadcast(g, node.specs[0]),
    lambda: [
        Sample((Arg((1, 3, 1)),), (2, 3, 4)),
        Sample((Arg(()),), (2,)),
        Sample((Arg((1, 3, 1, 1), layout=CHANNELS_LAST),), (2, 3, 4, 5)),
        Sample((Arg((1, 2)),), (0, 2)),
    ],
    lambda: [
        ErrorSample(
            lambda: expand(zeros(2, 3), 4, 3), ShapeError, "expand: (2, 3) cannot become (4, 3); only axes of size 1 grow, and new axes come first"
        )
    ],
    saves=(),
)


def expand(x: Tensor, *shape: Any) -> Tensor:
    """`x` repeated along axes of size 1 (and new leading axes) up to `shape`; -1 keeps a size. Raises ShapeError."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    extra = len(sizes) - x.ndim
    sizes = tuple(x.shape[i - extra] if s == -1 and i >= extra else s for i, s in enumerate(sizes))
    if extra < 0 or any(a not in (1, b) for a, b in zip(x.shape, sizes[extra:], strict=True)):
        raise ShapeError(f"expand: {x.shape} cannot become {sizes}; only axes of size 1 grow, and new axes come first")
    return x if sizes == x.spec.shape else call(EXPAND, (x,), sizes)


def flatten(x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    """Axes `start` to `end` (inclusive) as one, in logical order."""
    if x.ndim == 0:
        return reshape(x, (1,))
    a, b = axis_of("flatten", start, x.ndim), axis_of("flatten", end, x.ndim)
    if a > b:
        raise ShapeError(f"flatten: axis {start} lies after axis {end} in shape {x.shape}; give them in order")
    return reshape(x, (*x.shape[:a], prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))


def axis_of(name: str, axis: Any, ndim: int) -> int:
    """An axis as a non-negative integer. Raises ShapeError when it is out of range."""
    if not isinstance(axis, (int, np.integer)) or not -ndim <= axis < ndim:
        raise ShapeError(f"{name}: axis {axis} must be an integer from {-ndim} to {ndim - 1} for a tensor with {ndim} axes")
    return int(axis) % ndim


def squeeze(x: Tensor, axis: Any = None) -> Tensor:
    """Without axes of size 1: all of them, or those named (which must have size 1)."""
    if axis is None:
        drop = {i for i, s in enumerate(x.shape) if s == 1}
    else:
        drop = {axis_of("squeeze", a, x.ndim) for a in ((axis,) if isinstance(axis, (int, np.integer)) else axis)}
        if any(x.shape[a] != 1 for a in drop):
            raise ShapeError(f"squeeze: axis {axis} of shape {x.shape} has a size other than 1; only axes of size 1 can go")
    return reshape(x, tuple(s for i, s in enumerate(x.shape) if i not in drop))


def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """With a new axis of size 1 at `axis`."""
    at = axis_of("unsqueeze", axis, x.ndim + 1)
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


# -- axes --------------------------------------------------------------------------------------------------------------


def _permute_vjp(node: Any, g: Tensor) -> Tensor:
    return permute(g, tuple(int(i) for i in np.argsort(node.attrs)))


PERMUTE = Op(
    "permute",
    lambda attrs, x: spec((x.shape[i] for i in attrs), x.dtype),
    lambda attrs, x: x.transpose(attrs),
    _permute_vjp,
    lambda: [
        Sample((Arg((2, 3, 4)),), (2, 0, 1)),
        Sample((Arg(()),), ()),
        Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST),), (0, 2, 1, 3)),
        Sample((Arg((0, 3)),), (1, 0)),
        *[Sample((Arg((30, 7, 40), t),), (1, 2, 0), grad=False) for t in ("float32", "float16", "uint8", "int64")],
        Sample((Arg((3, 16, 12, 14), layout=CHANNELS_LAST),), (1, 0, 3, 2)),
    ],
    lambda: [
        ErrorSample(
            lambda: permute(zeros(2, 3), (0, 0)),
            ShapeError,
            "permute: axes (0, 0) must name each of the 2 axes of shape (2, 3) once",
        )
    ],
    saves=(),
)


def permute(x: Tensor, *axes: Any) -> Tensor:
    """Axes in another order. NHWC to NCHW and back share memory."""
    order = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    n = x.ndim
    order = tuple(a + n if a < 0 else a for a in order)
    if sorted(order) != list(range(n)):
        raise ShapeError(f"permute: axes {order} must name each of the {n} axes of shape {x.shape} once")
    if order == tuple(range(n)):
        return x
    if 3 <= n <= 5:
        to_first = (0, n - 1, *range(1, n - 1))  # channels from last to first
        if x.layout == CONTIGUOUS and order == to_first:
            return view(PERMUTE, x, spec((x.shape[i] for i in order), x.dtype, CHANNELS_LAST), order)
        if x.layout == CHANNELS_LAST and order == (0, *range(2, n), 1):
            return view(PERMUTE, x, spec((x.shape[i] for i in order), x.dtype), order)
    return call(PERMUTE, (x,), order)


def transpose(x: Tensor, a: int = -2, b: int = -1) -> Tensor:
    """Two axes exchanged."""
    order = list(range(x.ndim))
    a, b = axis_of("transpose", a, x.ndim), axis_of("transpose", b, x.ndim)
    order[a], order[b] = b, a
    return permute(x, tuple(order))


# -- joining and cutting -----------------------------------------------------------------------------------------------


def _concat_infer(axis: int, *xs: Spec) -> Spec:
    first = xs[0]
    for x in xs:
        if x.dtype is not first.dtype:
            raise DTypeError(f"concat: operands are {first.dtype.name} and {x.dtype.name}; convert with .to(dtype=)")
        if x.ndim != first.ndim or any(i != axis and s != t for i, (s, t) in enumerate(zip(x.shape, first.shape, strict=False))):
            raise ShapeError(f"concat: shapes {first.shape} and {x.shape} must agree but for axis {axis}")
    shape = tuple(sum(x.shape[axis] for x in xs) if i == axis else s for i, s in enumerate(first.shape))
    return first.like(shape=shape)


def _concat_vjp(node: Any, g: Tensor) -> Any:
    out, at = [], 0
    for need, x in zip(node.needs, node.specs, strict=True):
        size = x.shape[node.attrs]
        out.append(narrow(g, node.attrs, at, size) if need else None)
        at += size
    return tuple(out)


CONCAT = Op(
    "concat",
    _concat_infer,
    lambda axis, *xs: np.concatenate(xs, axis),
    _concat_vjp,
    lambda: [
        Sample((Arg((2, 3)), Arg((2, 1)), Arg((2, 0))), 1),
        Sample((Arg((4,)),), 0),
        Sample((Arg((2, 3, 2, 2), layout=CHANNELS_LAST), Arg((2, 1, 2, 2), layout=CHANNELS_LAST)), 1),
    ],
    lambda: [
        ErrorSample(
            lambda: concat([zeros(2, 3), zeros(3, 4)], 1),
            ShapeError,
            "concat: shapes (2, 3) and (3, 4) must agree but for axis 1",
        )
    ],
    saves=(),
)


def concat(tensors: Any, axis: int = 0) -> Tensor:
    """Tensors joined along an axis, in the type that holds all of theirs and the layout of the first."""
    tensors = list(tensors)
    if not tensors:
        raise ArgumentError("concat: no tensors were given; there must be at least one")
    need_tensor("concat", **{f"operand {i}": t for i, t in enumerate(tensors)})
    layout, dtype = tensors[0].layout, tensors[0].dtype
    for t in tensors:
        dtype = promote(dtype, t.dtype)
    return call(CONCAT, tuple([t.to(dtype=dtype, layout=layout) for t in tensors]), axis_of("concat", axis, tensors[0].ndim))


def stack(tensors: Any, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    tensors = list(tensors)
    for i, t in enumerate(tensors):
        if t.shape != tensors[0].shape:
            raise ShapeError(f"stack: operand 0 has shape {tensors[0].shape} and operand {i} {t.shape}; all must be equal")
    return concat([unsqueeze(t, axis) for t in tensors], axis)


class Cut(NamedTuple):
    """Per axis: first index, number of elements, step (may be negative)."""

    axes: tuple[tuple[int, int, int], ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        out = []
        for start, count, step in self.axes:
            stop = start + count * step
            out.append(slice(start, None if stop < 0 else stop, step) if count else slice(0, 0))
        return tuple(out)


class Put(NamedTuple):
    cut: Cut
    shape: tuple[int, ...]


def _put(a: Put, g: np.ndarray) -> np.ndarray:
    out = np.zeros(a.shape, g.dtype)
    out[a.cut.slices] = g
    return out


_CUTS = (((5, 4), ((1, 2, 2), (3, 4, -1))), ((3,), ((0, 0, 1),)), ((2, 3), ((0, 2, 1), (2, 1, 1))))
SLICE = Op(
    "slice",
    lambda a, x: x.like(shape=tuple(n for _, n, _ in a.axes)),
    lambda a, x: x[a.slices],
    lambda node, g: call(SLICE_PUT, (g,), Put(node.attrs, node.specs[0].shape)),
    lambda: (
        [Sample((Arg(s),), Cut(c)) for s, c in _CUTS]
        + [Sample((Arg((2, 3, 4, 4), layout=CHANNELS_LAST),), Cut(((0, 2, 1), (1, 2, 1), (0, 4, 1), (3, 2, -2))))]
    ),
    lambda: [
        ErrorSample(lambda: zeros(2, 3)[2], ArgumentError, "index 2 is outside axis 0 of shape (2, 3); it must be from -2 to 1"),
        ErrorSample(lambda: zeros(2, 3)[0, 0, 0], ShapeError, "3 axes are indexed and the tensor, of shape (2, 3), has 2"),
        ErrorSample(lambda: narrow(zeros(4), 0, 3, 2), ShapeError, "narrow: 2 elements from 3 do not lie in axis 0 of shape (4,)"),
    ],
    saves=(),
)
SLICE_PUT = Op(
    "slice_put",
    lambda a, g: g.like(shape=a.shape),
    _put,
    lambda node, v: call(SLICE, (v,), node.attrs.cut),
    lambda: [Sample((Arg(tuple(n for _, n, _ in c)),), Put(Cut(c), s)) for s, c in _CUTS],
    saves=(),
)


class Sizes(NamedTuple):
    axis: int
    sizes: tuple[int, ...]


def _split_vjp(node: Any, *gradients: Tensor | None) -> Tensor:
    given = next(g for g in gradients if g is not None)
    layout = node.specs[0].layout
    return concat(
        [
            zeros(s.shape, dtype=s.dtype, device=given.device, layout=layout) if g is None else g.to(layout=layout)
            for g, s in zip(gradients, node.out_specs, strict=True)
        ],
        node.attrs.axis,
    )


SPLIT = Op(
    "split",
    lambda a, x: tuple(x.like(shape=(*x.shape[: a.axis], n, *x.shape[a.axis + 1 :])) for n in a.sizes),
    lambda a, x: tuple(np.split(x, np.cumsum(a.sizes)[:-1], a.axis)),
    _split_vjp,
    lambda: [
        Sample((Arg((2, 7)),), Sizes(1, (3, 0, 4))),
        Sample((Arg((3, 2)),), Sizes(0, (1, 1, 1))),
        Sample((Arg((2, 6, 3, 3), layout=CHANNELS_LAST),), Sizes(1, (2, 4))),
        Sample((Arg((0, 4)),), Sizes(1, (1, 3))),
    ],
    lambda: [
        ErrorSample(
            lambda: split(zeros(5, 2), [2, 2]), ShapeError, "split: sizes [2, 2] must be 0 or more and add up to the 5 of axis 0 of shape (5, 2)"
        ),
        ErrorSample(lambda: split(zeros(5), 0), ArgumentError, "split: size 0 must be at least 1"),
        ErrorSample(lambda: chunk(zeros(5), 0), ArgumentError, "chunk: chunks 0 must be at least 1"),
    ],
    saves=(),
)


def narrow(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """`length` elements from `start` along an axis."""
    axis = axis_of("narrow", axis, x.ndim)
    if start < 0 or length < 0 or start + length > x.shape[axis]:
        raise ShapeError(f"narrow: {length} elements from {start} do not lie in axis {axis} of shape {x.shape}")
    cut = [(0, s, 1) for s in x.shape]
    cut[axis] = (start, length, 1)
    return copy(x) if length == x.shape[axis] else call(SLICE, (x,), Cut(tuple(cut)))


def split(x: Tensor, sizes: Any, axis: int = 0) -> tuple[Tensor, ...]:
    """Pieces along an axis: of one size (the last may be smaller), or of the sizes given (which must add up)."""
    axis = axis_of("split", axis, x.ndim)
    total = x.shape[axis]
    if isinstance(sizes, (int, np.integer)):
        if sizes < 1:
            raise ArgumentError(f"split: size {sizes} must be at least 1")
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)] or [0]
    sizes = tuple(int(n) for n in sizes)
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise ShapeError(f"split: sizes {list(sizes)} must be 0 or more and add up to the {total} of axis {axis} of shape {x.shape}")
    if len(sizes) < 2:
        return tuple([copy(x) for _ in sizes])
    return call(SPLIT, (x,), Sizes(axis, sizes))


def chunk(x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal size along an axis; the last may be smaller."""
    if chunks < 1:
        raise ArgumentError(f"chunk: chunks {chunks} must be at least 1")
    return split(x, max(1, -(-x.shape[axis_of("chunk", axis, x.ndim)] // chunks)), axis)


def unbind(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis, without it."""
    axis = axis_of("unbind", axis, x.ndim)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return tuple([reshape(t, shape) for t in split(x, (1,) * x.shape[axis], axis)])


def flip(x: Tensor, axis: Any) -> Tensor:
    """Reversed along an axis or several."""
    axes = {axis_of("flip", a, x.ndim) for a in ((axis,) if isinstance(axis, (int, np.integer)) else axis)}
    return call(SLICE, (x,), Cut(tuple((s - 1, s, -1) if i in axes and s else (0, s, 1) for i, s in enumerate(x.shape))))


def roll(x: Tensor, shift: Any, axis: Any = None) -> Tensor:
    """Elements moved by `shift` along an axis (one or several), those that leave coming in at the other end.

    Without an axis, in the flattened tensor, as `numpy.roll`.
    """
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, 0), x.shape) if x.size else copy(x)
    many = isinstance(axis, (tuple, list))
    axes, shifts = (tuple(axis), tuple(shift)) if many else ((axis,), (shift,))
    if len(axes) != len(shifts):
        raise ArgumentError(f"roll: shift {shift} and axis {axis} must have one length")
    out = x
    for a, by in zip(axes, shifts, strict=True):
        a = axis_of("roll", a, x.ndim)
        n = x.shape[a]
        k = by % n if n else 0
        if k:
            out = concat([narrow(out, a, n - k, k), narrow(out, a, 0, n - k)], a)
    return copy(x) if out is x else out


def tile(x: Tensor, *reps: Any) -> Tensor:
    """The whole tensor repeated along each axis, as `numpy.tile`."""
    times = tuple(reps[0]) if len(reps) == 1 and isinstance(reps[0], (tuple, list)) else reps
    rank = max(len(times), x.ndim)
    times = (1,) * (rank - len(times)) + tuple(times)
    shape = (1,) * (rank - x.ndim) + x.shape
    if prod(times) == 1:
        return reshape(copy(x), shape)
    spread = expand(reshape(x, tuple(v for s in shape for v in (1, s))), tuple(v for t, s in zip(times, shape, strict=True) for v in (t, s)))
    return reshape(spread, tuple(t * s for t, s in zip(times, shape, strict=True)))


class PadAttrs(NamedTuple):
    widths: tuple[tuple[int, int], ...]  # per axis, before and after; negative crops
    value: float


def _pad_reference(a: PadAttrs, x: np.ndarray) -> np.ndarray:
    y = x[tuple(slice(max(-b, 0), s - max(-e, 0)) for (b, e), s in zip(a.widths, x.shape, strict=True))]
    return np.pad(y, [(max(b, 0), max(e, 0)) for b, e in a.widths], constant_values=a.value)


PAD = Op(
    "pad",
    lambda a, x: x.like(shape=tuple(s + b + e for s, (b, e) in zip(x.shape, a.widths, strict=True))),
    _pad_reference,
    lambda node, g: call(PAD, (g,), PadAttrs(tuple((-b, -e) for b, e in node.attrs.widths), 0.0)),
    lambda: [
        Sample((Arg((2, 3)),), PadAttrs(((1, 0), (2, 3)), 1.5)),
        Sample((Arg((2, 3, 4, 4), layout=CHANNELS_LAST),), PadAttrs(((0, 0), (0, 0), (1, 2), (0, -1)), 0.0)),
        Sample((Arg((0, 2)),), PadAttrs(((1, 1), (0, 0)), 0.0)),
    ],
    saves=(),
)


class BorderAttrs(NamedTuple):
    widths: tuple[tuple[int, int], ...]  # per axis, before and after; 0 or more
    mode: str  # "reflect" or "replicate"


def _border_grad_reference(a: BorderAttrs, g: np.ndarray) -> np.ndarray:
    sizes = tuple(s - b - e for s, (b, e) in zip(g.shape, a.widths, strict=True))
    places = _border_reference(a, np.arange(math.prod(sizes)).reshape(sizes))
    out = np.zeros(math.prod(sizes), g.dtype)
    for place, value in zip(places.reshape(-1), g.reshape(-1), strict=True):
        out[place] += value
    return out.reshape(sizes)


def _border_reference(a: BorderAttrs, x: np.ndarray) -> np.ndarray:
    return np.pad(x, a.widths, "edge" if a.mode == "replicate" else "reflect")


_BORDERS = (
    ((5,), CONTIGUOUS, ((4, 3),)),
    ((2, 3, 4), CONTIGUOUS, ((0, 0), (2, 1), (3, 0))),
    ((2, 3, 4, 5), CHANNELS_LAST, ((0, 0), (0, 0), (1, 3), (2, 4))),
    ((0, 3), CONTIGUOUS, ((0, 0), (1, 1))),
)
_MODES = ("reflect", "replicate")


def _wider(shape: tuple[int, ...], widths: Any) -> tuple[int, ...]:
    return tuple(s + b + e for s, (b, e) in zip(shape, widths, strict=True))


PAD_BORDER = Op(
    "pad_border",
    lambda a, x: x.like(shape=_wider(x.shape, a.widths)),
    _border_reference,
    lambda node, g: call(PAD_BORDER_GRAD, (g,), node.attrs),
    lambda: [Sample((Arg(s, layout=lay),), BorderAttrs(w, m)) for s, lay, w in _BORDERS for m in _MODES],
    lambda: [
        ErrorSample(
            lambda: pad(zeros(1, 4), (4, 0), "reflect"),
            ShapeError,
            "pad: reflect by (4, 0) does not fit axis 1 of shape (1, 4); it takes at most size - 1, here 3",
        ),
        ErrorSample(
            lambda: pad(zeros(1, 0), (1, 0), "replicate"),
            ShapeError,
            "pad: replicate by (1, 0) does not fit axis 1 of shape (1, 0); there is nothing to repeat",
        ),
        ErrorSample(lambda: pad(zeros(4), (1, 1), "wrap"), ArgumentError, "pad: mode 'wrap' must be 'constant', 'reflect' or 'replicate'"),
    ],
    saves=(),
)
PAD_BORDER_GRAD = Op(
    "pad_border_grad",
    lambda a, g: g.like(shape=tuple(s - b - e for s, (b, e) in zip(g.shape, a.widths, strict=True))),
    _border_grad_reference,
    lambda node, v: call(PAD_BORDER, (v,), node.attrs),
    lambda: [Sample((Arg(_wider(s, w), layout=lay),), BorderAttrs(w, m)) for s, lay, w in _BORDERS for m in _MODES],
    terms=lambda a, g: math.prod(1 + b + e for b, e in a.widths),
    saves=(),
)


def pad(x: Tensor, widths: Any, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Padding, widths as PyTorch's: (before, after) of the last axis, then of the one before it, and so on.

    mode: "constant" (with `value`), "reflect" (without repeating the edge; at most size - 1) or "replicate". Negative
    widths crop. Raises ArgumentError for widths that are no pairs, ShapeError for those that do not fit.
    """
    flat = tuple(int(w) for w in widths)
    if len(flat) % 2 or len(flat) > 2 * x.ndim:
        raise ArgumentError(f"pad: widths {flat} must be pairs, at most one for each of the {x.ndim} axes")
    pairs = ((0, 0),) * (x.ndim - len(flat) // 2) + tuple((flat[i], flat[i + 1]) for i in range(len(flat) - 2, -1, -2))
    kept = [s + min(b, 0) + min(e, 0) for s, (b, e) in zip(x.shape, pairs, strict=True)]
    if min(kept, default=0) < 0:
        raise ShapeError(f"pad: widths {flat} crop more than shape {x.shape} has")
    if mode == "constant":
        if not x.dtype.is_floating and not float(value).is_integer():
            raise ArgumentError(f"pad: the value {value} is not a {x.dtype.name}; convert the tensor to a floating dtype first")
        return call(PAD, (x,), PadAttrs(pairs, float(value)))
    if mode not in _MODES:
        raise ArgumentError(f"pad: mode {mode!r} must be 'constant', 'reflect' or 'replicate'")
    grown = tuple((max(b, 0), max(e, 0)) for b, e in pairs)
    for axis, (b, e) in enumerate(grown):
        n = x.shape[axis]  # of what is there before the crop, as the mirror sees it
        if (b or e) and n == 0:
            raise ShapeError(f"pad: {mode} by ({b}, {e}) does not fit axis {axis} of shape {x.shape}; there is nothing to repeat")
        if mode == "reflect" and max(b, e) >= max(n, 1):
            raise ShapeError(f"pad: reflect by ({b}, {e}) does not fit axis {axis} of shape {x.shape}; it takes at most size - 1, here {n - 1}")
    out = call(PAD_BORDER, (x,), BorderAttrs(grown, mode)) if any(b or e for b, e in grown) else x
    for axis, (b, e) in enumerate(pairs):
        out = narrow(out, axis, max(-b, 0), out.shape[axis] + min(b, 0) + min(e, 0))
    return out


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two axes up to a diagonal (0 the main one, positive above it); zeros elsewhere."""
    return _triangle("tril", x, np.tri(x.shape[-2], x.shape[-1], diagonal, dtype=bool) if x.ndim > 1 else None)


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two axes from a diagonal on (0 the main one, positive above it); zeros elsewhere."""
    return _triangle("triu", x, ~np.tri(x.shape[-2], x.shape[-1], diagonal - 1, dtype=bool) if x.ndim > 1 else None)


def _triangle(name: str, x: Tensor, keep: np.ndarray | None) -> Tensor:
    from tilewright.ops.pointwise import where

    if keep is None:
        raise ShapeError(f"{name}: a tensor of shape {x.shape} has no triangle; it must have 2 axes or more")
    return where(tensor(keep, device=x.device), x, 0)


def masked_fill(x: Tensor, mask: Any, value: Any) -> Tensor:
    """`value` where the bool mask (broadcast to x) is true, x elsewhere."""
    from tilewright.ops.pointwise import where

    return where(mask, value, x)


# -- indices -----------------------------------------------------------------------------------------------------------


def _take_infer(axis: int, x: Spec, index: Spec) -> Spec:
    if index.dtype.kind not in "iu":
        raise DTypeError(f"take: the index is {index.dtype.name}; it must be integers")
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return x.like(shape=shape) if index.ndim == 1 else spec(shape, x.dtype)


def _take_vjp(node: Any, g: Tensor) -> Any:
    x = node.specs[0]
    axis = node.attrs
    flat = reshape(g, (*x.shape[:axis], node.specs[1].size, *x.shape[axis + 1 :]))
    start = zeros(x.shape, dtype=x.dtype, device=g.device, layout=x.layout)
    return index_add(start, axis, reshape(node.inputs[1], (-1,)) if node.specs[1].ndim != 1 else node.inputs[1], flat), None


def _index(shape: tuple[int, ...], high: int) -> Arg:
    return Arg(shape, "int64", fill="int", low=0, high=max(high, 2))


TAKE = Op(
    "take",
    _take_infer,
    lambda axis, x, i: np.take(x, i, axis),
    _take_vjp,
    lambda: [
        Sample((Arg((4, 3)), _index((5,), 4)), 0),
        Sample((Arg((2, 4)), _index((2, 2), 4)), 1),
        Sample((Arg((4,)), _index((), 4)), 0),
        Sample((Arg((4, 3)), _index((0,), 4)), 0),
        Sample((Arg((2, 4, 3, 3), layout=CHANNELS_LAST), _index((2,), 4)), 1),
    ],
    saves=(1,),
)


def take(x: Tensor, index: Any, axis: int = 0) -> Tensor:
    """Elements at integer positions (negative ones count from the end) along an axis; the index may have any shape.

    Raises ArgumentError for a position outside the axis.
    """
    index = as_tensor(index).to(device=x.device)
    return call(TAKE, (x, index), axis_of("take", axis, x.ndim))


def index_select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """`take` along an axis with a 1-D index."""
    return take(x, index, axis)


def _index_add_infer(axis: int, x: Spec, index: Spec, source: Spec) -> Spec:
    if index.dtype.kind not in "iu":
        raise DTypeError(f"index_add: the index is {index.dtype.name}; it must be integers")
    wanted = (*x.shape[:axis], index.size, *x.shape[axis + 1 :])
    if index.ndim != 1 or source.shape != wanted:
        raise ShapeError(f"index_add: index {index.shape} must be 1-D and source {source.shape} must be {wanted} for {x.shape} along axis {axis}")
    return x


def _index_add_reference(axis: int, x: np.ndarray, index: np.ndarray, source: np.ndarray) -> np.ndarray:
    out = x.copy()
    for k, i in enumerate(index):
        at = (slice(None),) * axis
        out[(*at, i)] += source[(*at, k)]
    return out


INDEX_ADD = Op(
    "index_add",
    _index_add_infer,
    _index_add_reference,
    lambda node, g: (g if node.needs[0] else None, None, take(g, node.inputs[1], node.attrs) if node.needs[2] else None),
    lambda: [Sample((Arg((4, 3)), _index((5,), 4), Arg((5, 3))), 0), Sample((Arg((2, 4)), _index((3,), 4), Arg((2, 3))), 1)],
    saves=(1,),
)


def index_add(x: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """x with `source`'s slices added at the positions of a 1-D index along an axis; repeated positions add up."""
    return call(INDEX_ADD, (x, index, source.to(layout=x.layout)), axis_of("index_add", axis, x.ndim))


def _along(name: str, axis: int, x: Spec, index: Spec) -> None:
    if index.ndim != x.ndim or any(i != axis and s > t for i, (s, t) in enumerate(zip(index.shape, x.shape, strict=False))):
        raise ShapeError(f"{name}: index {index.shape} must have the axes of {x.shape} and be no larger but along axis {axis}")
    if index.dtype.kind not in "iu":
        raise DTypeError(f"{name}: the index is {index.dtype.name}; it must be integers")


def _gather_infer(axis: int, x: Spec, index: Spec) -> Spec:
    _along("gather", axis, x, index)
    return spec(index.shape, x.dtype, x.layout)


def _gather_reference(axis: int, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.empty(index.shape, x.dtype)
    for at in np.ndindex(*index.shape):
        out[at] = x[(*at[:axis], index[at], *at[axis + 1 :])]
    return out


def _gather_vjp(node: Any, g: Tensor) -> Any:
    x = node.specs[0]
    return scatter_add(zeros(x.shape, dtype=x.dtype, device=g.device), node.attrs, node.inputs[1], g), None


GATHER = Op(
    "gather",
    _gather_infer,
    _gather_reference,
    _gather_vjp,
    lambda: [
        Sample((Arg((4, 3)), _index((2, 3), 4)), 0),
        Sample((Arg((2, 4)), _index((2, 2), 4)), 1),
        Sample((Arg((4,)), _index((0,), 4)), 0),
    ],
    saves=(1,),
)


def gather(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """out[i, j] = x[index[i, j], j] for axis 0, and so on; the result has the index's shape."""
    return call(GATHER, (x, index), axis_of("gather", axis, x.ndim))


def _scatter_infer(axis: int, x: Spec, index: Spec, source: Spec) -> Spec:
    _along("scatter_add", axis, x, index)
    if source.shape != index.shape:
        raise ShapeError(f"scatter_add: source {source.shape} and index {index.shape} must have one shape")
    return x


def _scatter_reference(axis: int, x: np.ndarray, index: np.ndarray, source: np.ndarray) -> np.ndarray:
    out = x.copy()
    for at in np.ndindex(*index.shape):
        out[(*at[:axis], index[at], *at[axis + 1 :])] += source[at]
    return out


SCATTER_ADD = Op(
    "scatter_add",
    _scatter_infer,
    _scatter_reference,
    lambda node, g: (g if node.needs[0] else None, None, gather(g, node.attrs, node.inputs[1]) if node.needs[2] else None),
    lambda: [Sample((Arg((4, 3)), _index((2, 3), 4), Arg((2, 3))), 0), Sample((Arg((2, 4)), _index((2, 5), 4), Arg((2, 5))), 1)],
    saves=(1,),
)


def scatter_add(x: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """x with source[i, j] added at [index[i, j], j] for axis 0, and so on; repeated positions add up."""
    return call(SCATTER_ADD, (x, index, source), axis_of("scatter_add", axis, x.ndim))


def _is_mask(item: Any) -> bool:
    return isinstance(item, (Tensor, np.ndarray)) and item.dtype.name == "bool"


def _nonzero(mask: Any, axis: int, x: Tensor) -> list[Any]:
    """A mask as one integer array for each axis that it covers."""
    mask = np.asarray(mask)
    if mask.ndim == 0:
        raise ArgumentError("a single bool is not an index; use where, or an if")
    if mask.shape != x.shape[axis : axis + mask.ndim]:
        raise ShapeError(f"a mask of shape {mask.shape} does not fit the axes of {x.shape} from axis {axis} on; it must have their sizes")
    return list(np.nonzero(mask))


def _listed(item: list[Any]) -> np.ndarray:
    array = np.asarray(item)
    return array if array.size else array.astype(np.int64)


def _flat_index(indices: list[Any], sizes: list[int]) -> np.ndarray:
    """Several index arrays, broadcast against each other, as positions in their axes flattened."""
    try:
        arrays = np.broadcast_arrays(*[np.asarray(i) for i in indices])
    except ValueError:
        raise ShapeError(f"index arrays of shapes {[tuple(np.shape(i)) for i in indices]} do not broadcast against each other") from None
    flat = np.zeros(arrays[0].shape, np.int64)
    for a, size in zip(arrays, sizes, strict=True):
        if a.dtype.kind not in "iu":
            raise DTypeError(f"take: the index is {a.dtype}; it must be integers")
        if a.size and not (-size <= a.min() and a.max() < size):
            raise ArgumentError(
                f"index {a.max() if a.max() >= size else a.min()} is outside an axis of size {size}; it must be from {-size} to {size - 1}"
            )
        flat = flat * size + np.where(a < 0, a + size, a)
    return flat


def getitem(x: Tensor, index: Any) -> Tensor:
    """NumPy's indexing: integers, slices with any step, Ellipsis, None, bool masks, and integer tensors, arrays or lists.

    The result is a copy. Masks and pairs of index arrays are read by the host. Raises ArgumentError for an index out of
    range and ShapeError for too many.
    """
    items: list[Any] = []
    axis = 0
    spread = -1  # where the Ellipsis stands
    given = tuple([_listed(i) if isinstance(i, list) else i for i in (index if isinstance(index, tuple) else (index,))])
    after = builtins.sum(i.ndim if _is_mask(i) else 1 for i in given if i is not None and i is not Ellipsis)
    if after > x.ndim:
        raise ShapeError(f"{after} axes are indexed and the tensor, of shape {x.shape}, has {x.ndim}")
    for item in given:
        if item is Ellipsis:
            if spread >= 0:
                raise ArgumentError("an index can have one Ellipsis; write the other axes as ':'")
            spread = len(items)
            items += [slice(None)] * (x.ndim - after)
            axis += x.ndim - after
        elif _is_mask(item):
            items += _nonzero(item, axis, x)
            axis += item.ndim
        else:
            items.append(item)
            axis += item is not None
    items += [slice(None)] * (x.ndim - axis)

    cuts: list[tuple[int, int, int]] = []
    shape: list[int] = []
    taken: list[tuple[int, Any]] = []  # axis of what is cut, index
    advanced: list[int] = []  # places of integers and arrays in the index
    for place, item in enumerate(items):
        if item is None:
            shape.append(1)
            continue
        axis = len(cuts)
        size = x.shape[axis]
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            count = len(range(start, stop, step))
            cuts.append((start if count else 0, count, step))
            shape.append(count)
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            if not -size <= item < size:
                raise ArgumentError(f"index {item} is outside axis {axis} of shape {x.shape}; it must be from {-size} to {size - 1}")
            cuts.append((int(item) % size, 1, 1))
            advanced.append(place)
        elif isinstance(item, (Tensor, np.ndarray)):
            cuts.append((0, size, 1))
            taken.append((len(shape), item))
            shape.append(size)
            advanced.append(place)
        else:
            raise ArgumentError(f"an index of type {type(item).__name__} is not an integer, slice, None, Ellipsis, mask or integer tensor")
    if after == x.ndim and spread >= 0:  # an Ellipsis of no axes stands between what is on its two sides as well
        advanced = [place + (place >= spread) for place in advanced]
    whole = builtins.all(c == (0, s, 1) for c, s in zip(cuts, x.shape, strict=True))
    if not taken:  # a copy also where all is asked for: else it would depend on the sizes whether memory is shared
        return reshape(copy(x) if whole else call(SLICE, (x,), Cut(tuple(cuts))), tuple(shape))
    out = reshape(x if whole else call(SLICE, (x,), Cut(tuple(cuts))), tuple(shape))
    axes = [a for a, _ in taken]
    if advanced[-1] - advanced[0] >= len(advanced):  # NumPy's rule: apart from each other, their axes come first
        out = permute(out, (*axes, *(i for i in range(out.ndim) if i not in axes)))
        axes = list(range(len(axes)))
    if len(taken) == 1:
        return take(out, taken[0][1], axes[0])
    sizes = [out.shape[a] for a in axes]
    flat = _flat_index([i for _, i in taken], sizes)
    return take(reshape(out, (*out.shape[: axes[0]], prod(sizes), *out.shape[axes[-1] + 1 :])), tensor(flat, int64, x.device), axes[0])


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write into memory, `x[index] = value`, as NumPy does. Gradients do not see it.

    Raises AutogradError where a gradient would be wrong or lost: x was computed for one, x or the value requires one
    (outside `no_grad`). A tensor that an earlier op saved is noticed at backward.
    """
    if x._node is not None or (mode.enabled and x.requires_grad):
        raise AutogradError("x[...] = value would change a tensor that gradients depend on; use where, or write into x.detach()")
    if mode.enabled and isinstance(value, Tensor) and value.requires_grad:
        raise AutogradError("x[...] = value would lose the value's gradient; use where or index_add, or write value.detach()")
    values = np.asarray(value)
    key = tuple(np.asarray(i) if isinstance(i, Tensor) else i for i in (index if isinstance(index, tuple) else (index,)))
    shared = hasattr(x.buffer, "array")
    array = x.numpy(writable=True) if shared else x.numpy()
    try:
        with np.errstate(all="ignore"):
            array[key] = values
    except IndexError as error:
        raise ArgumentError(f"x[...] = value: {error} (x has shape {x.shape})") from None
    except ValueError as error:
        raise ShapeError(f"x[...] = value: {error} (x has shape {x.shape})") from None
    if not shared:
        x.copy_(array)
