"""Convolution by im2col and oneDNN's matrix products, in pieces of bounded size.

The windows of some images, or of some rows of one, are laid out as the rows of a matrix of kh kw C columns (Chellapilla,
Puri and Simard, "High performance convolutional neural networks for document processing", 2006):

    Y = columns(X) W^T,    dW = dY^T columns(X),    dX = the sum of dY W's entries at the places that they came from.

Copying costs little beside a product with many output channels, and the product of two plain matrices is what a library
does best: measured, it beats the direct kernels in gradients of weights where the output is small and its channels are many,
and where a stride makes them read few values of each cache line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.numpy._blocks import share
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Packer, add_epilogue, attempt, refuse
from tilewright.devices.cpu.onednn._ways import Operand, bind, planned, thread_configs
from tilewright.devices.cpu.onednn.capi import (
    ARG_BIAS,
    ARG_DIFF_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    BINARY,
    FORWARD_TRAINING,
    Attr,
    MemoryDesc,
    PrimitiveDesc,
)

PIECE = 16 << 20  # bytes of the matrix of windows held at once
SHARED = 2 << 20  # bytes from which the cores copy together
ITEM = 4  # bytes of a float32


class Geometry(NamedTuple):
    """One convolution, and how it is cut into pieces."""

    attrs: Any
    x: tuple[int, int, int, int]  # N, H, W, C
    kernel: tuple[int, int]
    y: tuple[int, int, int, int]  # N, OH, OW, F

    @property
    def depth(self) -> int:
        """Columns of the matrix of windows."""
        return prod(self.kernel) * self.x[3]

    @property
    def piece(self) -> tuple[int, int]:
        """Images, and output rows of each, in one piece: several whole images or a part of one."""
        n, oh, ow, _ = self.y
        row = ow * self.depth * ITEM
        images = min(n, PIECE // (row * oh))
        return (images, oh) if images else (1, max(1, PIECE // row))

    @property
    def work(self) -> int:
        return prod(self.y) * self.depth

    @property
    def zeros(self) -> tuple[int, int, int, int]:
        """Rows and columns of zeros around the input; negative padding only moves the first window."""
        top, left, bottom, right = (max(p, 0) for p in self.attrs.padding)
        return top, left, bottom, right

    @property
    def padded(self) -> tuple[int, int]:
        top, left, bottom, right = self.zeros
        return self.x[1] + top + bottom, self.x[2] + left + right

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        images, rows = self.piece
        for i in range(0, self.y[0], images):
            for r in range(0, self.y[1], rows):
                yield slice(i, min(i + images, self.y[0])), slice(r, min(r + rows, self.y[1]))

    def places(self, images: slice, rows: slice) -> int:
        """Rows of a piece's matrix."""
        return (images.stop - images.start) * (rows.stop - rows.start) * self.y[2]

    def first(self, images: slice, rows: slice) -> int:
        """Place of a piece's first output among all of them."""
        return (images.start * self.y[1] + rows.start) * self.y[2]


def _geometry(c: Any, x: Spec, w: Spec, y: Spec) -> Geometry:
    (n, ch, h, wd), (_, f, oh, ow) = x.shape, y.shape
    return Geometry(c, (n, h, wd, ch), w.shape[2:], (n, oh, ow, f))  # type: ignore[arg-type]


def _array(buffer: Any, shape: Sequence[int]) -> np.ndarray:
    return np.ndarray(shape, np.float32, buffer.raw)


def _pad(x: np.ndarray, zeros: Any, out: np.ndarray) -> None:
    """Images (N, H, W, C) between zeros."""
    t, le, _, _ = zeros
    h, w = x.shape[1:3]
    out[:, :t] = 0
    out[:, t + h :] = 0
    out[:, t : t + h, :le] = 0
    out[:, t : t + h, le + w :] = 0
    out[:, t : t + h, le : le + w] = x


def _gather(g: Geometry, x: np.ndarray, rows: slice, out: np.ndarray) -> None:
    """The windows of some output rows of padded images (N, H, W, C), as out (N, rows, OW, kh, kw, C)."""
    n, h, w, c = x.strides
    (sh, sw), (dh, dw), (top, left, _, _) = g.attrs.stride, g.attrs.dilation, g.attrs.padding
    strides = (n, h * sh, w * sw, h * dh, w * dw, c)
    start = (rows.start * sh + max(-top, 0)) * h + max(-left, 0) * w
    np.copyto(out, np.ndarray(out.shape, x.dtype, x, start, strides))


def _met(size: int, out: slice, stride: int, offset: int) -> tuple[slice, slice]:
    """Of the outputs in `out`, those whose input at stride * o + offset lies within `size`; and those inputs."""
    low = max(out.start, -(offset // stride))
    high = min(out.stop, (size - 1 - offset) // stride + 1)
    high = max(high, low)
    return slice(low - out.start, high - out.start), slice(low * stride + offset, max((high - 1) * stride + offset + 1, 0), stride)


def _scatter(g: Geometry, columns: np.ndarray, rows: slice, into: np.ndarray) -> None:
    """Add columns (N, rows, OW, kh, kw, C) to the places (N, H, W, C) of the input that they came from."""
    (sh, sw), (dh, dw), (top, left, _, _) = g.attrs.stride, g.attrs.dilation, g.attrs.padding
    across = [_met(g.x[2], slice(0, g.y[2]), sw, j * dw - left) for j in range(g.kernel[1])]
    with np.errstate(all="ignore"):
        for i in range(g.kernel[0]):
            down, h = _met(g.x[1], rows, sh, i * dh - top)
            for j, (columns_met, w) in enumerate(across):
                if down.stop > down.start and columns_met.stop > columns_met.start:
                    into[:, h, w] += columns[:, down, columns_met, i, j]


class _Im2col(Kernel):
    device = "cpu"
    rank = 40
    tolerance = 4.0

    @abstractmethod
    def geometry(self, problem: Problem) -> Geometry:
        """The convolution that this problem is, or is a gradient of."""

    @abstractmethod
    def product(self, problem: Problem, places: int) -> PrimitiveDesc:
        """A new descriptor of the product of a piece of so many places."""

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem)
        if reasons:
            return reasons
        c = getattr(problem.attrs, "conv", problem.attrs)
        if c.groups != 1:
            return [f"its {c.groups} groups are products of their own"]
        if any(s is not None and s.ndim == 4 and s.layout != CHANNELS_LAST for s in (*problem.inputs, *problem.outputs)):
            return ["operands must lie channels-last"]
        g = self.geometry(problem)
        if c.padding == (0, 0, 0, 0) and (g.x[1:3] == g.kernel or (g.kernel == (1, 1) and c.stride == (1, 1))):
            return ["the windows lie as a matrix already: a plain product needs no copy"]
        if g.y[2] * g.depth * ITEM > 4 * PIECE:
            return [f"the windows of one row of the output take more than {4 * PIECE >> 20} MiB"]
        return attempt(lambda: self.pd(problem, (), g.places(*next(g.pieces()))))

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        return thread_configs(self.geometry(problem).work)

    def pd(self, problem: Problem, config: Config, places: int) -> PrimitiveDesc:
        with planned(config), runtime.denormals_kept():
            return _product(self, problem, places, runtime.get_num_threads())

    def workspace(self, problem: Problem, config: Config) -> int:
        g = self.geometry(problem)
        images, rows = g.piece
        places = images * rows * g.y[2]
        scratch = self.pd(problem, config, places).scratchpad_md
        padded = images * prod(g.padded) * g.x[3] * ITEM if any(g.zeros) else 0
        return places * g.depth * ITEM + padded + (scratch.nbytes if scratch is not None else 0)

    def runs(self, problem: Problem, config: Config, device: Any, operands: Any) -> dict[int, Any]:
        """For each size of piece, its product bound to `operands(descriptor, places)`."""
        g = self.geometry(problem)
        out = {}
        for places in {g.places(*piece) for piece in g.pieces()}:
            pd = self.pd(problem, config, places)
            with planned(config), runtime.denormals_kept():
                out[places] = bind(pd, operands(pd, places), device.pool)
        return out


@lru_cache(maxsize=64)
def _product(kernel: _Im2col, problem: Problem, places: int, threads: int) -> PrimitiveDesc:
    return kernel.product(problem, places)


def _sharer(config: Config, nbytes: int) -> Callable[[int, Callable[[int, int], None]], None]:
    """How to copy images: by all cores where a piece is large, unless the config wants one thread."""
    return share if nbytes >= SHARED and "threads" not in dict(config) else lambda n, run: run(0, n)


def _columns(g: Geometry, config: Config, pool: Any) -> Any:
    """A generator over the pieces of an input: places, place of the first, and the address of the matrix of windows."""
    images, rows = g.piece
    zeros = g.zeros if any(g.zeros) else None
    take, c, (hp, wp), (kh, kw), ow = pool.take, g.x[3], g.padded, g.kernel, g.y[2]
    nbytes, padded_bytes = images * rows * ow * g.depth * ITEM, images * hp * wp * c * ITEM
    pieces, copy = [(i, r, g.places(i, r), g.first(i, r)) for i, r in g.pieces()], _sharer(config, nbytes)

    def columns(buffer: Any) -> Iterator[tuple[int, int, int]]:
        x = _array(buffer, g.x)
        matrix, padded = take(nbytes), take(padded_bytes) if zeros else None
        last = None
        for i, r, places, first in pieces:
            part, fresh, last = x[i], i != last, i
            source = part if padded is None else _array(padded, (len(part), hp, wp, c))
            out = _array(matrix, (len(part), r.stop - r.start, ow, kh, kw, c))

            def lay(a: int, b: int, part: Any = part, source: Any = source, out: Any = out, r: slice = r, fresh: bool = fresh) -> None:
                if fresh and padded is not None:
                    _pad(part[a:b], zeros, source[a:b])
                _gather(g, source[a:b], r, out[a:b])

            copy(len(part), lay)
            yield places, first, matrix.ptr

    return columns


@kernel
class Conv2dIm2col(_Im2col):
    id = "cpu.conv2d.onednn_im2col"
    op = "conv2d"

    def geometry(self, problem: Problem) -> Geometry:
        x, w = problem.inputs[:2]
        assert x is not None and w is not None
        return _geometry(problem.attrs, x, w, problem.outputs[0])

    def product(self, problem: Problem, places: int) -> PrimitiveDesc:
        _, w, b, residual = problem.inputs
        a = problem.attrs
        assert w is not None
        f, k = w.shape[0], w.size // w.shape[0]
        attr = Attr()
        if residual is not None:
            attr.append_binary(BINARY["add"], MemoryDesc((places, f)))
        add_epilogue(attr, a.activation, a.alpha, a.beta)
        return capi.matmul(
            MemoryDesc((places, k)), MemoryDesc((k, f), "f32", "any"), None if b is None else MemoryDesc((1, f)), MemoryDesc((places, f)), attr
        )

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        _, w, b, residual = problem.inputs
        g = self.geometry(problem)
        assert w is not None

        def operands(pd: PrimitiveDesc, places: int) -> list[Operand]:
            out = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_WEIGHTS, pd.weights_md()), Operand(ARG_DST, pd.dst_md())]
            if b is not None:
                out.append(Operand(ARG_BIAS, pd.weights_md(1)))
            if residual is not None:
                out.append(Operand(capi.arg_post_op(0), MemoryDesc((places, w.shape[0]))))
            return out

        runs = self.runs(problem, config, device, operands)
        packs = {p: Packer(MemoryDesc((g.depth, g.y[3]), "f32", (1, g.depth)), self.pd(problem, config, p).weights_md(), device.pool) for p in runs}
        columns, step = _columns(g, config, device.pool), g.y[3] * ITEM

        def launch(inputs: Any, outputs: Any) -> None:
            for places, first, matrix in columns(inputs[0]):
                packed = packs[places](inputs[1])
                more = () if b is None else (inputs[2].ptr,)
                if residual is not None:
                    more = (*more, inputs[3].ptr + first * step)
                runs[places](matrix, packed.ptr, outputs[0].ptr + first * step, *more)

        return launch


@kernel
class Conv2dInputGradCol2im(_Im2col):
    id = "cpu.conv2d_input_grad.onednn_col2im"
    op = "conv2d_input_grad"

    def geometry(self, problem: Problem) -> Geometry:
        y, w = problem.inputs
        assert y is not None and w is not None
        return _geometry(problem.attrs.conv, problem.outputs[0], w, y)

    def product(self, problem: Problem, places: int) -> PrimitiveDesc:
        w = problem.inputs[1]
        assert w is not None
        f, k = w.shape[0], w.size // w.shape[0]
        return capi.matmul(MemoryDesc((places, f)), MemoryDesc((f, k), "f32", "any"), None, MemoryDesc((places, k)))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        g = self.geometry(problem)

        def operands(pd: PrimitiveDesc, places: int) -> list[Operand]:
            return [Operand(ARG_SRC, pd.src_md()), Operand(ARG_WEIGHTS, pd.weights_md()), Operand(ARG_DST, pd.dst_md())]

        runs = self.runs(problem, config, device, operands)
        packs = {p: Packer(MemoryDesc((g.y[3], g.depth)), self.pd(problem, config, p).weights_md(), device.pool) for p in runs}
        pieces = [(i, r, g.places(i, r), g.first(i, r) * g.y[3] * ITEM) for i, r in g.pieces()]
        take, nbytes, (kh, kw) = device.pool.take, max(runs) * g.depth * ITEM, g.kernel
        add = _sharer(config, nbytes)

        def launch(inputs: Any, outputs: Any) -> None:
            matrix, dx = take(nbytes), _array(outputs[0], g.x)
            dx[...] = 0
            for i, r, places, first in pieces:
                runs[places](inputs[0].ptr + first, packs[places](inputs[1]).ptr, matrix.ptr)
                columns, into = _array(matrix, (i.stop - i.start, r.stop - r.start, g.y[2], kh, kw, g.x[3])), dx[i]
                add(len(into), lambda a, b, columns=columns, into=into, r=r: _scatter(g, columns[a:b], r, into[a:b]))

        return launch


@kernel
class Conv2dWeightGradIm2col(_Im2col):
    id = "cpu.conv2d_weight_grad.onednn_im2col"
    op = "conv2d_weight_grad"

    def geometry(self, problem: Problem) -> Geometry:
        x, y = problem.inputs
        assert x is not None and y is not None
        return _geometry(problem.attrs.conv, x, problem.outputs[0], y)

    def product(self, problem: Problem, places: int) -> PrimitiveDesc:
        w = problem.outputs[0]
        f, k = w.shape[0], w.size // w.shape[0]
        rows, upper, weights = MemoryDesc((places, k)), MemoryDesc((places, f)), MemoryDesc((f, k))
        bias = MemoryDesc((f,)) if problem.attrs.bias else None
        hint = capi.inner_product_forward(FORWARD_TRAINING, rows, weights, bias, upper)
        return capi.inner_product_backward_weights(rows, weights, bias, upper, hint)

    def workspace(self, problem: Problem, config: Config) -> int:
        return super().workspace(problem, config) + sum(s.nbytes for s in problem.outputs)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        g, bias = self.geometry(problem), problem.attrs.bias

        def operands(pd: PrimitiveDesc, places: int) -> list[Operand]:
            out = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_DIFF_DST, pd.diff_dst_md()), Operand(ARG_DIFF_WEIGHTS, pd.diff_weights_md())]
            return [*out, Operand(ARG_DIFF_BIAS, pd.diff_weights_md(1))] if bias else out

        runs = self.runs(problem, config, device, operands)
        columns, step, take, sizes = _columns(g, config, device.pool), g.y[3] * ITEM, device.pool.take, [s.nbytes for s in problem.outputs]
        several = len(list(g.pieces())) > 1

        def launch(inputs: Any, outputs: Any) -> None:
            parts = [take(n) for n in sizes] if several else []
            for places, first, matrix in columns(inputs[0]):
                target = parts if first else outputs
                runs[places](matrix, inputs[1].ptr + first * step, *[b.ptr for b in target])
                if not first:
                    continue
                with np.errstate(all="ignore"):
                    for total, part, n in zip(outputs, parts, sizes, strict=True):
                        _array(total, (n // ITEM,))[...] += _array(part, (n // ITEM,))

        return launch
