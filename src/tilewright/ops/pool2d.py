"""Pooling in two dimensions and one.

Output sizes as in `conv2d`; with ceil_mode they round up, and a last window that would start in the padding after the
input is dropped (PyTorch's rule). NaN in a window makes its maximum NaN, and the first NaN is where it was found.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Spec, spec
from tilewright.dtypes import int32, uint8
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops._call import call, need_tensor
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.conv2d import pair
from tilewright.ops.movement import reshape
from tilewright.tensor import Tensor, tensor

SHARED = ("out_size",)


class PoolAttrs(NamedTuple):
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    count_include_pad: bool = True  # average only
    divisor: int = 0  # average only; 0: the window's own count


class PoolGradAttrs(NamedTuple):
    pool: PoolAttrs
    size: tuple[int, int]


def _size(size: int, kernel: int, stride: int, before: int, after: int, dilation: int, ceil_mode: bool) -> int:
    span = size + before + after - dilation * (kernel - 1) - 1  # negative: ceil_mode may still cut one window short
    out = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (out - 1) * stride >= size + before:
        out -= 1
    return out


def out_size(name: str, a: PoolAttrs, shape: tuple[int, ...]) -> tuple[int, int]:
    """Output height and width. Raises ShapeError when no window fits."""
    if len(shape) != 4:
        raise ShapeError(f"{name}: input {shape} must have 4 axes (N,C,H,W)")
    t, le, b, r = a.padding
    oh = _size(shape[2], a.kernel[0], a.stride[0], t, b, a.dilation[0], a.ceil_mode)
    ow = _size(shape[3], a.kernel[1], a.stride[1], le, r, a.dilation[1], a.ceil_mode)
    if oh < 1 or ow < 1:
        raise ShapeError(
            f"{name}: the window of {a.kernel[0]}x{a.kernel[1]} with dilation {a.dilation} does not fit the input {shape} padded by {a.padding}"
        )
    return oh, ow


def _infer(name: str) -> Any:
    def infer(a: PoolAttrs, x: Spec) -> Spec:
        return spec((*x.shape[:2], *out_size(name, a, x.shape)), x.dtype, x.layout)

    return infer


def _lowest(dtype: np.dtype) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _windows(a: PoolAttrs, x: np.ndarray, fill: Any) -> Any:
    """(place in the padded input, elements (N, C)) of every tap of every window, with `fill` outside."""
    oh, ow = out_size("pool", a, x.shape)
    t, le, _, _ = a.padding
    h, w = x.shape[2:]
    for i in range(oh):
        for j in range(ow):
            taps = []
            for k in range(a.kernel[0]):
                for m in range(a.kernel[1]):
                    y, z = i * a.stride[0] - t + k * a.dilation[0], j * a.stride[1] - le + m * a.dilation[1]
                    inside = 0 <= y < h and 0 <= z < w
                    taps.append((y, z, x[:, :, y, z] if inside else np.full(x.shape[:2], fill, x.dtype), inside))
            yield i, j, taps


def _max_reference(a: PoolAttrs, x: np.ndarray) -> Any:
    oh, ow = out_size("max_pool2d", a, x.shape)
    y = np.empty((*x.shape[:2], oh, ow), x.dtype)
    tap = np.empty(y.shape, _tap_dtype(a).np)
    for i, j, taps in _windows(a, x, _lowest(x.dtype)):
        inside = [(v, k) for k, (_, _, v, ok) in enumerate(taps) if ok]
        if not inside:
            y[:, :, i, j], tap[:, :, i, j] = _lowest(x.dtype), 0
            continue
        values = np.stack([v for v, _ in inside])
        best = np.argmax(values, 0)  # the first NaN, else the first largest
        y[:, :, i, j] = np.take_along_axis(values, best[None], 0)[0]
        tap[:, :, i, j] = np.array([k for _, k in inside])[best]
    return y, tap


def _tap_dtype(a: PoolAttrs) -> Any:
    return uint8 if a.kernel[0] * a.kernel[1] <= 256 else int32


def _max_infer(a: PoolAttrs, x: Spec) -> Any:
    y = _infer("max_pool2d")(a, x)
    return y, y.like(dtype=_tap_dtype(a))


def _max_vjp(node: Any, g: Tensor | None, _: Any) -> Any:
    if g is None:
        return None
    x = node.specs[0]
    return call(MAX_GRAD, (g.to(layout=x.layout), node.outputs[1]), PoolGradAttrs(node.attrs, x.shape[2:]))


def _place(a: PoolAttrs, tap: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Position in the H x W plane of each window's chosen tap."""
    oh, ow = tap.shape[2:]
    rows = (np.arange(oh) * a.stride[0] - a.padding[0])[:, None] + tap.astype(np.int64) // a.kernel[1] * a.dilation[0]
    cols = np.arange(ow) * a.stride[1] - a.padding[1] + tap.astype(np.int64) % a.kernel[1] * a.dilation[1]
    return np.clip(rows, 0, size[0] - 1) * size[1] + np.clip(cols, 0, size[1] - 1)


def _grad_infer(a: PoolGradAttrs, g: Spec, index: Spec | None = None) -> Spec:
    return g.like(shape=(*g.shape[:2], *a.size))


def _max_grad_reference(a: PoolGradAttrs, g: np.ndarray, tap: np.ndarray) -> np.ndarray:
    dx = np.zeros((*g.shape[:2], a.size[0] * a.size[1]), g.dtype)
    place = _place(a.pool, tap, a.size)
    for n, c, i, j in np.ndindex(*g.shape):
        dx[n, c, place[n, c, i, j]] += g[n, c, i, j]
    return dx.reshape(*g.shape[:2], *a.size)


def _pick_infer(a: PoolAttrs, v: Spec, tap: Spec) -> Spec:
    return v.like(shape=tap.shape)


def _pick_reference(a: PoolAttrs, v: np.ndarray, tap: np.ndarray) -> np.ndarray:
    place = _place(a, tap, v.shape[2:])  # type: ignore[arg-type]
    out = np.empty(tap.shape, v.dtype)
    for n, c, i, j in np.ndindex(*tap.shape):
        out[n, c, i, j] = v[n, c].reshape(-1)[place[n, c, i, j]]
    return out


def _avg_divisors(a: PoolAttrs, shape: tuple[int, ...]) -> np.ndarray:
    """What each window's sum is divided by (OH, OW)."""
    oh, ow = out_size("avg_pool2d", a, shape)
    counts = []
    for axis, o in ((0, oh), (1, ow)):
        start = np.arange(o) * a.stride[axis] - a.padding[axis]
        taps = start[:, None] + np.arange(a.kernel[axis]) * a.dilation[axis]
        low, high = (-a.padding[axis], shape[2 + axis] + a.padding[2 + axis]) if a.count_include_pad else (0, shape[2 + axis])
        counts.append(((taps >= low) & (taps < high)).sum(1))
    return np.full((oh, ow), a.divisor) if a.divisor else np.maximum(counts[0][:, None] * counts[1], 1)


def _avg_reference(a: PoolAttrs, x: np.ndarray) -> np.ndarray:
    y = np.empty((*x.shape[:2], *out_size("avg_pool2d", a, x.shape)), x.dtype)
    for i, j, taps in _windows(a, x, 0):
        y[:, :, i, j] = sum(v for _, _, v, _ in taps)
    return y / _avg_divisors(a, x.shape)


def _avg_grad_reference(a: PoolGradAttrs, g: np.ndarray) -> np.ndarray:
    dx = np.zeros((*g.shape[:2], *a.size), g.dtype)
    share = g / _avg_divisors(a.pool, dx.shape)
    for i, j, taps in _windows(a.pool, dx, 0):
        for y, z, _, inside in taps:
            if inside:
                dx[:, :, y, z] += share[:, :, i, j]
    return dx


_CASES = (
    ((2, 3, 6, 6), PoolAttrs((2, 2), (2, 2))),
    ((1, 2, 7, 6), PoolAttrs((3, 3), (2, 2), (1, 1, 1, 1))),
    ((1, 2, 7, 6), PoolAttrs((3, 2), (1, 2), (0, 1, 1, 0))),
    ((1, 2, 9, 9), PoolAttrs((2, 3), (2, 1), (0, 0, 0, 0), (2, 2))),
    ((1, 1, 6, 7), PoolAttrs((1, 1), (2, 2), ceil_mode=True)),
    ((1, 1, 4, 4), PoolAttrs((3, 3), (2, 2), (1, 1, 1, 1), ceil_mode=True)),
    ((1, 3, 5, 5), PoolAttrs((5, 5), (5, 5))),
    ((0, 3, 4, 4), PoolAttrs((2, 2), (2, 2))),
    ((1, 16, 8, 8), PoolAttrs((3, 3), (2, 2), (0, 0, 1, 1))),
    ((1, 2, 4, 3), PoolAttrs((3, 1), (3, 2), dilation=(2, 1), ceil_mode=True)),  # a window longer than the input, cut short
)


def _samples(average: bool) -> Any:
    def samples() -> list[Sample]:
        out = [Sample((Arg(s, layout=lay, fill="distinct"),), a) for s, a in _CASES for lay in ("contiguous", CHANNELS_LAST)]
        if average:
            more = [a._replace(count_include_pad=False) for _, a in _CASES] + [a._replace(divisor=3) for _, a in _CASES]
            out += [Sample((Arg(s, layout=CHANNELS_LAST),), a) for (s, _), a in zip(_CASES * 2, more, strict=True)]
        else:
            out.append(Sample((Arg((1, 1, 4, 4), "int32"),), PoolAttrs((3, 3), (1, 1), (1, 1, 1, 1)), grad=False))
        return out

    return samples


def _grad_samples(average: bool) -> Any:
    def samples() -> list[Sample]:
        out = []
        for s, a in _CASES:
            if a.ceil_mode and any(a.padding):
                continue  # the middle of the last window lies outside, where no forward points
            for lay in ("contiguous", CHANNELS_LAST):
                oh, ow = out_size("sample", a, s)
                g = Arg((*s[:2], oh, ow), layout=lay)
                out.append(Sample((g,) if average else (g, _taps(a, g)), PoolGradAttrs(a, s[2:])))  # type: ignore[arg-type]
        return out

    return samples


def _taps(a: PoolAttrs, g: Arg) -> Arg:
    """Chosen taps that lie inside the input: the middle of the window, whatever the padding."""
    middle = (a.kernel[0] // 2) * a.kernel[1] + a.kernel[1] // 2
    return Arg(g.shape, "uint8", g.layout, fill="int", low=middle, high=middle + 1)


def _taps_inside(a: PoolAttrs, shape: tuple[int, ...], size: tuple[int, ...]) -> np.ndarray:
    """For each output of that shape a tap that meets the input (not the padding), another one from output to output."""
    taps = []
    for axis, outputs in enumerate(shape[2:]):
        met = np.arange(outputs)[:, None] * a.stride[axis] - a.padding[axis] + np.arange(a.kernel[axis]) * a.dilation[axis]
        inside = (met >= 0) & (met < size[axis])
        taps.append(inside.argmax(1) + np.arange(outputs) % np.maximum(inside.sum(1), 1))
    return np.broadcast_to(taps[0][:, None] * a.kernel[1] + taps[1], shape).astype(np.uint8)


def _pick_samples() -> list[Sample]:
    out = []
    for s, a in _CASES:
        if a.ceil_mode and any(a.padding):
            continue
        oh, ow = out_size("sample", a, s)
        v = Arg(s, layout=CHANNELS_LAST)
        out.append(Sample((v, _taps(a, Arg((*s[:2], oh, ow), layout=CHANNELS_LAST))), a))
    return out


def _errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    return [
        ErrorSample(
            lambda: max_pool2d(zeros(1, 1, 3, 3), 4),
            ShapeError,
            "max_pool2d: the window of 4x4 with dilation (1, 1) does not fit the input (1, 1, 3, 3) padded by (0, 0, 0, 0)",
        ),
        ErrorSample(
            lambda: max_pool2d(zeros(1, 1, 3, 3), 2, padding=2),
            ArgumentError,
            "max_pool2d: padding (2, 2, 2, 2) must be less than the window's span (2, 2), or a window could lie wholly outside",
        ),
    ]


MAX_POOL = Op("max_pool2d", _max_infer, _max_reference, _max_vjp, _samples(False), _errors, saves=(), saves_outputs=True)
MAX_GRAD = Op(
    "max_pool2d_grad",
    _grad_infer,
    _max_grad_reference,
    lambda node, v: (call(MAX_PICK, (v.to(layout=node.specs[1].layout), node.inputs[1]), node.attrs.pool), None),
    _grad_samples(False),
    operands=lambda a, g, taps: {1: _taps_inside(a.pool, taps.shape, a.size)},
    saves=(1,),
)
MAX_PICK = Op(
    "max_pool2d_pick",
    _pick_infer,
    _pick_reference,
    lambda node, g: (call(MAX_GRAD, (g, node.inputs[1]), PoolGradAttrs(node.attrs, node.specs[0].shape[2:])), None),
    _pick_samples,
    operands=lambda a, x, taps: {1: _taps_inside(a, taps.shape, x.shape[2:])},
    saves=(1,),
)
AVG_POOL = Op(
    "avg_pool2d",
    _infer("avg_pool2d"),
    _avg_reference,
    lambda node, g: call(AVG_GRAD, (g.to(layout=node.specs[0].layout),), PoolGradAttrs(node.attrs, node.specs[0].shape[2:])),
    _samples(True),
    saves=(),
)
AVG_GRAD = Op(
    "avg_pool2d_grad",
    _grad_infer,
    _avg_grad_reference,
    lambda node, v: call(AVG_POOL, (v,), node.attrs.pool),
    _grad_samples(True),
    saves=(),
)


@lru_cache(maxsize=1024)
def _attrs(name: str, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any, include: Any, divisor: Any) -> PoolAttrs:
    k = pair(name, "kernel_size", kernel)
    s = k if stride is None else pair(name, "stride", stride)
    d = pair(name, "dilation", dilation)
    if isinstance(padding, int):
        padding = (padding,) * 4
    elif len(padding) == 2:
        padding = (padding[0], padding[1], padding[0], padding[1])
    if len(padding) != 4 or min(padding) < 0:
        raise ArgumentError(f"{name}: padding {padding} must be one, two or four integers of at least 0")
    span = (d[0] * (k[0] - 1) + 1, d[1] * (k[1] - 1) + 1)
    if max(padding[0], padding[2]) >= span[0] or max(padding[1], padding[3]) >= span[1]:
        raise ArgumentError(f"{name}: padding {padding} must be less than the window's span {span}, or a window could lie wholly outside")
    return PoolAttrs(k, s, tuple(padding), d, bool(ceil_mode), bool(include), int(divisor or 0))


def _h(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False
) -> Any:  # fmt: skip
    """Largest element of each window of (N, C, H, W); stride None is the window. Padding never wins.

    padding: one integer, (height, width) or (top, left, bottom, right), less than the window's span. With
    return_indices also the positions (int64) in each H x W plane. NaN in a window gives NaN; integers stay integers.
    """
    need_tensor("max_pool2d", x=x)
    attrs = _attrs("max_pool2d", _h(kernel_size), _h(stride), _h(padding), _h(dilation), ceil_mode, True, 0)
    y, tap = call(MAX_POOL, (x,), attrs)
    return (y, tensor(_place(attrs, tap.numpy(), x.shape[2:]), device=x.device)) if return_indices else y  # type: ignore[arg-type]


def avg_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Mean of each window of (N, C, H, W).

    The divisor is the number of taps inside the padded input (count_include_pad) or inside the input, never those past
    the padding that ceil_mode adds; divisor_override replaces it.
    """
    need_tensor("avg_pool2d", x=x)
    attrs = _attrs(
        "avg_pool2d", _h(kernel_size), _h(stride), _h(padding), _h(dilation), ceil_mode, count_include_pad, divisor_override
    )  # fmt: skip
    return call(AVG_POOL, (x,), attrs)


def global_avg_pool2d(x: Tensor) -> Tensor:
    """Mean over H and W: (N, C, 1, 1)."""
    return call(AVG_POOL, (x,), PoolAttrs(x.shape[2:], x.shape[2:]))  # type: ignore[arg-type]


def global_max_pool2d(x: Tensor) -> Tensor:
    """Largest over H and W: (N, C, 1, 1)."""
    return call(MAX_POOL, (x,), PoolAttrs(x.shape[2:], x.shape[2:]))[0]  # type: ignore[arg-type]


def _bins(size: int, out: int) -> list[tuple[int, int]]:
    """Bin i of an adaptive pooling covers floor(i * size / out) up to ceil((i + 1) * size / out)."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive(name: str, x: Tensor, size: Any, pool: Any, whole: Any, fixed: Op) -> Tensor:
    from tilewright.ops.movement import concat, narrow

    need_tensor(name, x=x)
    if x.ndim != 4:
        raise ShapeError(f"{name}: input {x.shape} must have 4 axes (N,C,H,W)")
    two = (size, size) if isinstance(size, int) or size is None else tuple(size)
    oh, ow = (s if o is None else o for o, s in zip(two, x.shape[2:], strict=True))
    if oh < 1 or ow < 1 or 0 in x.shape[2:]:
        raise ShapeError(f"{name}: output {two} and input {x.shape} must have at least one row and column")
    h, w = x.shape[2:]
    if h % oh == 0 and w % ow == 0:
        k = (h // oh, w // ow)
        out = call(fixed, (x,), PoolAttrs(k, k))
        return out[0] if isinstance(out, tuple) else out
    rows = []
    for a, b in _bins(h, oh):
        band = narrow(x, 2, a, b - a)
        rows.append(concat([whole(narrow(band, 3, c, d - c)) for c, d in _bins(w, ow)], 3))
    return concat(rows, 2)


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Mean over bins that cover the input evenly: (N, C, OH, OW). None keeps a size."""
    return _adaptive("adaptive_avg_pool2d", x, output_size, avg_pool2d, global_avg_pool2d, AVG_POOL)


def adaptive_max_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Largest over bins that cover the input evenly: (N, C, OH, OW). None keeps a size."""
    return _adaptive("adaptive_max_pool2d", x, output_size, max_pool2d, global_max_pool2d, MAX_POOL)


def _flat(name: str, x: Tensor) -> Tensor:
    if x.ndim != 3:
        raise ShapeError(f"{name}: input {x.shape} must have 3 axes (N,C,L)")
    return reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))


def max_pool1d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1, ceil_mode: bool = False) -> Tensor:
    """Largest element of each window of (N, C, L)."""
    s = kernel_size if stride is None else stride
    y = max_pool2d(_flat("max_pool1d", x), (1, kernel_size), (1, s), (0, padding), (1, dilation), ceil_mode)
    return reshape(y, (*y.shape[:2], y.shape[3]))


def avg_pool1d(
    x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False, count_include_pad: bool = True
) -> Tensor:  # fmt: skip
    """Mean of each window of (N, C, L)."""
    s = kernel_size if stride is None else stride
    y = avg_pool2d(_flat("avg_pool1d", x), (1, kernel_size), (1, s), (0, padding), ceil_mode, count_include_pad)
    return reshape(y, (*y.shape[:2], y.shape[3]))
