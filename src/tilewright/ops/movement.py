"""Ops that move elements without changing them: shape, layout, dtype, device."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilewright.autograd import Node, mode
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, Spec, spec
from tilewright.dtypes import DType
from tilewright.errors import ShapeError
from tilewright.ops._call import call
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, Op, Sample
from tilewright.tensor import Tensor


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
    lambda: [
        Sample((Arg(s, layout=a),), b)
        for s in ((2, 3, 4, 5), (2, 3, 4), (1, 2, 2, 3, 2), (0, 3, 2, 2))
        for a, b in ((CONTIGUOUS, CHANNELS_LAST), (CHANNELS_LAST, CONTIGUOUS))
    ],
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
    list,
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
    lambda: [Sample((Arg((2, 3)),)), Sample((Arg((0,)),))],
    saves=(),
)


def copy(x: Tensor) -> Tensor:
    """A copy with memory of its own."""
    return call(COPY, (x,))


TRANSFER = Op("transfer", lambda attrs, x: x, lambda attrs, x: x, lambda node, g: transfer(g, node.attrs), saves=())


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
