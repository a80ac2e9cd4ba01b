"""Convolutions that are matrix products as their operands lie, by oneDNN's matmul.

With a 1x1 window, stride 1 and no padding, every place of the channels-last input is a row of a matrix:

    Y (N H W, F) = X (N H W, C) W^T,    dX = dY W,    dW = dY^T X.

A contiguous input is a turned matrix of each image, and a window as large as the input makes one row of each image, with
C kh kw columns. In the gradient of the input, where a stride skips places, each row of dY is a product of its own, whose
result steps over dX by the stride.

Weights are taken as they lie or packed once per version of their memory. The gradient of the weights is a sum over all
rows, for which the primitive of the inner product's gradient is another way; it alone gives the bias's too.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, kernel
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

_PACKED: Config = (("weights", "packed"),)
_PLAIN: Config = (("weights", "plain"),)


def _code(s: Spec) -> str:
    return "f32" if s.dtype.name == "float32" else "bf16"


def _not_a_product(c: Any, x: Spec, w: Spec) -> list[str]:
    """Why a convolution of such input and weight is not a matrix product, if it is not."""
    top, left, bottom, right = c.padding
    if c.groups != 1:
        return [f"its {c.groups} groups are products of their own"]
    if top or left or bottom > 0 or right > 0:
        return [f"padding {c.padding} moves the window off the input's places"]
    if w.shape[2:] == (1, 1):
        return []
    if w.shape[2:] != x.shape[2:] or c.dilation != (1, 1) or any(c.padding):
        return [f"the window of {w.shape[2]}x{w.shape[3]} is neither 1x1 nor the whole input"]
    if x.layout != CHANNELS_LAST or w.layout != CHANNELS_LAST:
        return ["a window as large as the input must lie channels-last, as its weight does"]
    return []


def _way(x: Spec, w: Spec, y: Spec, *others: Spec | None) -> str:
    """What is one matrix: all places of the `batch`, those of an `image`, those of a `row`, or the `whole` input."""
    if w.shape[2:] != (1, 1):
        return "whole"
    if x.shape[2:] != y.shape[2:]:
        return "row"
    turned = any(s is not None and s.layout != CHANNELS_LAST and s.shape[2] * s.shape[3] > 1 for s in (x, y, *others))
    return "image" if turned else "batch"


def _rows(s: Spec, way: str, places: Sequence[int] = (), step: Sequence[int] = (1, 1)) -> MemoryDesc:
    """Activations (N, C, H, W) as matrices with a column for each channel; by the row, of `places` (OH, OW) `step` apart."""
    n, c, h, w = s.shape
    image, channel, down, across = (b // s.dtype.itemsize for b in s.strides)
    if way == "whole":
        return MemoryDesc((n, c * h * w), _code(s), (c * h * w, 1))
    if way == "row":
        return MemoryDesc((n, *places, c), _code(s), (image, down * step[0], across * step[1], channel))
    if way == "image":
        return MemoryDesc((n, h * w, c), _code(s), (image, across, channel))
    return MemoryDesc((n * h * w, c), _code(s), (c, 1))


def _matrix(w: Spec, turned: bool, packed: bool, ndims: int) -> MemoryDesc:
    """Weights (F, K), or (K, F) where `turned`, after axes of 1 up to `ndims`."""
    f, k = w.shape[0], w.size // w.shape[0]
    dims, strides = ((k, f), (1, k)) if turned else ((f, k), (k, 1))
    lead = ndims - 2
    return MemoryDesc((*[1] * lead, *dims), _code(w), "any" if packed else (*[f * k] * lead, *strides))


class _Product(Kernel):
    device = "cpu"
    rank = 30
    tolerance = 4.0

    @abstractmethod
    def pd(self, problem: Problem, config: Config) -> PrimitiveDesc:
        """The descriptor for a config."""

    def workspace(self, problem: Problem, config: Config) -> int:
        scratch = self.pd(problem, config).scratchpad_md
        return scratch.nbytes if scratch is not None else 0

    def refuse(self, problem: Problem, c: Any, x: Any, w: Any) -> list[str]:
        reasons = refuse(problem, ("float32", "bfloat16")) or _not_a_product(c, x, w)
        return reasons or attempt(lambda: self.pd(problem, next(iter(self.configs(problem, None)))))


class _OnWeights(_Product):
    """A product with the weights: the convolution, or the gradient of its input."""

    @abstractmethod
    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        """A new descriptor."""

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        w, y = problem.inputs[1], problem.outputs[0] if self.op == "conv2d" else problem.inputs[0]
        assert w is not None and y is not None
        for threads in thread_configs(w.size * (y.size // w.shape[0])):
            for weights in self.weights(problem):
                yield (*weights, *threads)

    def weights(self, problem: Problem) -> list[Config]:
        return [_PACKED, _PLAIN]

    def pd(self, problem: Problem, config: Config) -> PrimitiveDesc:
        with planned(config), runtime.denormals_kept():
            return _on_weights(self, problem, dict(config)["weights"] == "packed", runtime.get_num_threads())

    def bind(self, problem: Problem, config: Config, device: Any, extra: Sequence[Operand] = ()) -> tuple[Any, Packer]:
        pd, plain = self.pd(problem, config), self.pd(problem, _PLAIN)
        operands = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_WEIGHTS, pd.weights_md()), Operand(ARG_DST, pd.dst_md()), *extra]
        with planned(config), runtime.denormals_kept():
            return bind(pd, operands, device.pool), Packer(plain.weights_md(), pd.weights_md(), device.pool)


@lru_cache(maxsize=32)
def _on_weights(kernel: _OnWeights, problem: Problem, packed: bool, threads: int) -> PrimitiveDesc:
    return kernel.describe(problem, packed)


@kernel
class Conv2dMatmul(_OnWeights):
    id = "cpu.conv2d.onednn_matmul"
    op = "conv2d"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, w = problem.inputs[:2]
        assert x is not None and w is not None
        if _way(x, w, problem.outputs[0]) == "row":
            return ["a stride or crop skips places: copied together first they make a larger product, see im2col"]
        return self.refuse(problem, problem.attrs, x, w)

    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        x, w, b, residual = problem.inputs
        y, a = problem.outputs[0], problem.attrs
        assert x is not None and w is not None
        way = _way(x, w, y, residual)
        src, dst = _rows(x, way), _rows(y, way)
        attr = Attr()
        if residual is not None:
            attr.append_binary(BINARY["add"], _rows(residual, way))
        add_epilogue(attr, a.activation, a.alpha, a.beta)
        bias = None if b is None else MemoryDesc((*[1] * (src.ndims - 1), w.shape[0]), _code(w))
        return capi.matmul(src, _matrix(w, True, packed, src.ndims), bias, dst, attr)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, w, b, residual = problem.inputs
        y = problem.outputs[0]
        assert x is not None and w is not None
        extra = [] if b is None else [Operand(ARG_BIAS, self.pd(problem, config).weights_md(1))]
        if residual is not None:
            extra.append(Operand(capi.arg_post_op(0), _rows(residual, _way(x, w, y, residual))))
        run, pack = self.bind(problem, config, device, extra)
        used = [i for i in (2, 3) if problem.inputs[i] is not None]

        def launch(inputs: Any, outputs: Any) -> None:
            packed = pack(inputs[1])
            run(inputs[0].ptr, packed.ptr, outputs[0].ptr, *[inputs[i].ptr for i in used])

        return launch


@kernel
class Conv2dInputGradMatmul(_OnWeights):
    id = "cpu.conv2d_input_grad.onednn_matmul"
    op = "conv2d_input_grad"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return self.refuse(problem, problem.attrs.conv, problem.outputs[0], problem.inputs[1])

    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        g, w = problem.inputs
        x = problem.outputs[0]
        assert g is not None and w is not None
        way = _way(x, w, g)
        src, dst = _rows(g, way, g.shape[2:]), _rows(x, way, g.shape[2:], problem.attrs.conv.stride)
        return capi.matmul(src, _matrix(w, False, packed, src.ndims), None, dst)

    def weights(self, problem: Problem) -> list[Config]:
        g, w = problem.inputs
        assert g is not None and w is not None
        return [_PLAIN] if _way(problem.outputs[0], w, g) == "row" else [_PACKED, _PLAIN]

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        g, w = problem.inputs
        x = problem.outputs[0]
        assert g is not None and w is not None
        run, pack = self.bind(problem, config, device)
        # What the stride skips is zero.
        skipped, clear, nbytes = _way(x, w, g) == "row", ctypes.memset, x.nbytes

        def launch(inputs: Any, outputs: Any) -> None:
            packed = pack(inputs[1])
            target = outputs[0].ptr
            if skipped:
                clear(target, 0, nbytes)
            run(inputs[0].ptr, packed.ptr, target)

        return launch


@lru_cache(maxsize=32)
def _weight_grad(problem: Problem, primitive: str, threads: int) -> PrimitiveDesc:
    x, g = problem.inputs
    w = problem.outputs[0]
    assert x is not None and g is not None
    way = _way(x, w, g)
    rows, upper, weights = _rows(x, way), _rows(g, way), _matrix(w, False, False, 2)
    if primitive == "matmul":
        return capi.matmul(MemoryDesc(upper.dims[::-1], upper.dtype, upper.strides[::-1]), rows, None, weights)
    bias = MemoryDesc((w.shape[0],), _code(w)) if problem.attrs.bias else None
    hint = capi.inner_product_forward(FORWARD_TRAINING, rows, weights, bias, upper)
    return capi.inner_product_backward_weights(rows, weights, bias, upper, hint)


@kernel
class Conv2dWeightGradMatmul(_Product):
    id = "cpu.conv2d_weight_grad.onednn_matmul"
    op = "conv2d_weight_grad"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, g = problem.inputs
        w = problem.outputs[0]
        assert x is not None and g is not None
        if _way(x, w, g) not in ("batch", "whole") and not problem.empty:
            return ["the sum over all places needs them to be the rows of one matrix: stride 1, channels-last"]
        return self.refuse(problem, problem.attrs.conv, x, w)

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        g, w = problem.inputs[1], problem.outputs[0]
        assert g is not None
        for threads in thread_configs(w.size * (g.size // w.shape[0])):
            yield (("primitive", "inner_product"), *threads)
            if not problem.attrs.bias and not attempt(lambda: self.pd(problem, (("primitive", "matmul"),))):
                yield (("primitive", "matmul"), *threads)

    def pd(self, problem: Problem, config: Config) -> PrimitiveDesc:
        with planned(config):
            return _weight_grad(problem, dict(config)["primitive"], runtime.get_num_threads())

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd = self.pd(problem, config)
        if dict(config)["primitive"] == "matmul":
            operands = [Operand(ARG_WEIGHTS, pd.weights_md()), Operand(ARG_SRC, pd.src_md()), Operand(ARG_DST, pd.dst_md())]
        else:
            operands = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_DIFF_DST, pd.diff_dst_md()), Operand(ARG_DIFF_WEIGHTS, pd.diff_weights_md())]
            if problem.attrs.bias:
                operands.append(Operand(ARG_DIFF_BIAS, pd.diff_weights_md(1)))
        with planned(config):
            run = bind(pd, operands, device.pool)

        def launch(inputs: Any, outputs: Any) -> None:
            run(*[b.ptr for b in (*inputs, *outputs)])

        return launch
