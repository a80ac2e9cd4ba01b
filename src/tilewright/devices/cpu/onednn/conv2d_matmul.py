"""Convolutions that are matrix products as their operands lie, by oneDNN's matmul.

With a 1x1 window, stride 1 and no padding, every place of the channels-last input is a row of a matrix:

    Y (N H W, F) = X (N H W, C) W^T,    dX = dY W,    dW = dY^T X.

A window as large as the input makes one row of each image, with C kh kw columns. With a 1x1 window a contiguous input is
a matrix (C, H W) of each image, which matmul reads turned.

Weights are taken as they lie or packed once per version of their memory. The gradient of the weights is a product over
many rows, for which the primitive of the inner product's gradient is another way; it alone gives the bias's too.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Why a convolution of such input and weight is not one matrix product, if it is not."""
    if c.groups != 1:
        return [f"its {c.groups} groups are products of their own"]
    if any(c.padding):
        return ["padding adds rows that the input does not have"]
    if w.shape[2:] == (1, 1):
        return [] if c.stride == (1, 1) else [f"stride {c.stride} skips rows of the input"]
    if w.shape[2:] != x.shape[2:] or c.dilation != (1, 1):
        return [f"the window of {w.shape[2]}x{w.shape[3]} is neither 1x1 nor the whole input"]
    if x.layout != CHANNELS_LAST or w.layout != CHANNELS_LAST:
        return ["a window as large as the input must lie channels-last, as its weight does"]
    return []


def _whole(w: Spec) -> bool:
    return w.shape[2:] != (1, 1)


def _rows(s: Spec, whole: bool, batched: bool) -> MemoryDesc:
    """Activations (N, C, H, W) as a matrix of rows (N H W, C), or (N, H W, C) where `batched`; (N, C H W) where `whole`."""
    n, c, h, w = s.shape
    if whole:
        return MemoryDesc((n, c * h * w), _code(s), (c * h * w, 1))
    place, channel = (c, 1) if s.layout == CHANNELS_LAST else (1, h * w)
    if batched:
        return MemoryDesc((n, h * w, c), _code(s), (c * h * w, place, channel))
    return MemoryDesc((n * h * w, c), _code(s), (place, channel))


def _matrix(w: Spec, turned: bool, packed: bool, batched: bool) -> MemoryDesc:
    """Weights (F, K), or (K, F) where `turned`; after an axis of 1 where `batched`."""
    f, k = w.shape[0], w.size // w.shape[0]
    dims, strides = ((k, f), (1, k)) if turned else ((f, k), (k, 1))
    if batched:
        dims, strides = (1, *dims), (f * k, *strides)
    return MemoryDesc(dims, _code(w), "any" if packed else strides)


def _batched(*activations: Spec | None) -> bool:
    return any(s is not None and s.layout != CHANNELS_LAST and s.shape[2] * s.shape[3] > 1 for s in activations)


class _Product(Kernel):
    device = "cpu"
    rank = 30
    tolerance = 4.0

    def workspace(self, problem: Problem, config: Config) -> int:
        scratch = self.pd(problem, config).scratchpad_md
        return scratch.nbytes if scratch is not None else 0

    def pd(self, problem: Problem, config: Config) -> PrimitiveDesc:
        raise NotImplementedError

    def _reject(self, problem: Problem, c: Any, x: Spec | None, w: Spec | None) -> list[str]:
        assert x is not None and w is not None
        reasons = refuse(problem, ("float32", "bfloat16")) or _not_a_product(c, x, w)
        return reasons or attempt(lambda: self.pd(problem, next(iter(self.configs(problem, None)))))


class _OnWeights(_Product):
    """A product with the weights: the convolution, or the gradient of its input."""

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        w = problem.inputs[1]
        assert w is not None
        for threads in thread_configs(w.size * (problem.outputs[0].size // max(problem.outputs[0].shape[1], 1))):
            yield (*_PACKED, *threads)
            yield (*_PLAIN, *threads)

    def pd(self, problem: Problem, config: Config) -> PrimitiveDesc:
        with planned(config), runtime.denormals_kept():
            return _forward(self, problem, dict(config)["weights"] == "packed", runtime.get_num_threads())

    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        raise NotImplementedError

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd, plain = self.pd(problem, config), self.pd(problem, _PLAIN)
        _, _, b, residual = (*problem.inputs, None, None)[:4]
        operands = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_WEIGHTS, pd.weights_md()), Operand(ARG_DST, pd.dst_md())]
        if b is not None:
            operands.append(Operand(ARG_BIAS, pd.weights_md(1)))
        if residual is not None:
            operands.append(Operand(capi.arg_post_op(0), _rows(residual, _whole(problem.inputs[1]), pd.dst_md().ndims == 3)))  # type: ignore[arg-type]
        with planned(config), runtime.denormals_kept():
            run = bind(pd, operands, device.pool)
        pack = Packer(plain.weights_md(), pd.weights_md(), device.pool)
        used = [i for i in range(2, len(problem.inputs)) if problem.inputs[i] is not None]

        def launch(inputs: Any, outputs: Any) -> None:
            packed = pack(inputs[1])
            run(inputs[0].ptr, packed.ptr, outputs[0].ptr, *[inputs[i].ptr for i in used])

        return launch


@lru_cache(maxsize=32)
def _forward(kernel: _OnWeights, problem: Problem, packed: bool, threads: int) -> PrimitiveDesc:
    return kernel.describe(problem, packed)


@kernel
class Conv2dMatmul(_OnWeights):
    id = "cpu.conv2d.onednn_matmul"
    op = "conv2d"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return self._reject(problem, problem.attrs, problem.inputs[0], problem.inputs[1])

    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        x, w, b, residual = problem.inputs
        y, a = problem.outputs[0], problem.attrs
        assert x is not None and w is not None
        whole, batched = _whole(w), _batched(x, y, residual)
        attr = Attr()
        if residual is not None:
            attr.append_binary(BINARY["add"], _rows(residual, whole, batched))
        add_epilogue(attr, a.activation, a.alpha, a.beta)
        bias = None if b is None else MemoryDesc((1, 1, w.shape[0]) if batched else (1, w.shape[0]), _code(w))
        return capi.matmul(_rows(x, whole, batched), _matrix(w, True, packed, batched), bias, _rows(y, whole, batched), attr)


@kernel
class Conv2dInputGradMatmul(_OnWeights):
    id = "cpu.conv2d_input_grad.onednn_matmul"
    op = "conv2d_input_grad"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return self._reject(problem, problem.attrs.conv, problem.outputs[0], problem.inputs[1])

    def describe(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        g, w = problem.inputs
        x = problem.outputs[0]
        assert g is not None and w is not None
        whole, batched = _whole(w), _batched(g, x)
        return capi.matmul(_rows(g, whole, batched), _matrix(w, False, packed, batched), None, _rows(x, whole, batched))


@lru_cache(maxsize=32)
def _weight_grad(problem: Problem, primitive: str, threads: int) -> PrimitiveDesc:
    x, g = problem.inputs
    w = problem.outputs[0]
    assert x is not None and g is not None
    rows, upper, weights = _rows(x, _whole(w), False), _rows(g, _whole(w), False), _matrix(w, False, False, False)
    if primitive == "matmul":
        turned = MemoryDesc(upper.dims[::-1], upper.dtype, upper.strides[::-1])
        return capi.matmul(turned, rows, None, weights)
    bias = MemoryDesc((w.shape[0],), _code(w)) if problem.attrs.bias else None
    hint = capi.inner_product_forward(FORWARD_TRAINING, rows, weights, bias, upper)
    return capi.inner_product_backward_weights(rows, weights, bias, upper, hint)


@kernel
class Conv2dWeightGradMatmul(_Product):
    id = "cpu.conv2d_weight_grad.onednn_matmul"
    op = "conv2d_weight_grad"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, g = problem.inputs
        reasons = [] if x is None or g is None else self._reject(problem, problem.attrs.conv, x, problem.outputs[0])
        if not reasons and _batched(x, g):
            reasons = ["the sum over images needs rows that lie channels-last"]
        return reasons

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        g, w = problem.inputs[1], problem.outputs[0]
        assert g is not None
        for threads in thread_configs(g.size * w.size // max(w.shape[0], 1)):
            yield (("primitive", "inner_product"), *threads)
            if not problem.attrs.bias:
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
