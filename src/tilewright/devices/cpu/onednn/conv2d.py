"""Convolution and its two gradients by oneDNN, on channels-last activations.

The library picks the layout of the weights ("any"): they are packed once per version in forward and input gradient,
and the weight gradient is brought back to ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Packer, Reorder, add_epilogue, attempt, describe, refuse
from tilewright.devices.cpu.onednn.capi import (
    ARG_BIAS,
    ARG_DIFF_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    BINARY,
    CONVOLUTION,
    FORWARD_TRAINING,
    Attr,
    MemoryDesc,
    PrimitiveDesc,
)

_DIRECT = CONVOLUTION["direct"]


def _weights(w: Spec, groups: int) -> MemoryDesc:
    """Our (F, C/groups, kh, kw) weights, as oneDNN's (G, F/G, C/G, kh, kw) where there are groups."""
    item = w.dtype.itemsize
    strides = [s // item for s in w.strides]
    code = "f32" if w.dtype.name == "float32" else "bf16"
    if groups == 1:
        return MemoryDesc(w.shape, code, strides)
    f = w.shape[0] // groups
    return MemoryDesc((groups, f, *w.shape[1:]), code, [f * strides[0], *strides])


def _any(md: MemoryDesc) -> MemoryDesc:
    return MemoryDesc(md.dims, md.dtype, "any")


def _window(a: Any) -> dict[str, Any]:
    t, le, b, r = a.padding
    return {"stride": a.stride, "dilation": a.dilation, "padding_l": (t, le), "padding_r": (b, r)}


def _refuse(problem: Problem) -> list[str]:
    reasons = refuse(problem, ("float32", "bfloat16"))
    if not reasons and any(s is not None and s.ndim == 4 and s.layout != CHANNELS_LAST for s in problem.inputs):
        reasons = ["operands must lie channels-last"]
    return reasons


@lru_cache(maxsize=16)
def _forward(a: Any, x: Spec, w: Spec, y: Spec, bias: bool, residual: bool, threads: int) -> PrimitiveDesc:
    with runtime.denormals_kept():
        return _describe(a, x, w, y, bias, residual)


def _describe(a: Any, x: Spec, w: Spec, y: Spec, bias: bool, residual: bool) -> PrimitiveDesc:
    attr = Attr()
    if residual:
        attr.append_binary(BINARY["add"], describe(y))
    add_epilogue(attr, a.activation, a.alpha, a.beta)
    weights = _any(_weights(w, a.groups))
    b = MemoryDesc((y.shape[1],), weights.dtype, "a") if bias else None
    return capi.convolution_forward(FORWARD_TRAINING, _DIRECT, describe(x), weights, b, describe(y), attr=attr, **_window(a))


def _hint(c: Any, x: Spec, w: Spec, y: Spec) -> PrimitiveDesc:
    return _forward(c, x, w, y, False, False, runtime.get_num_threads())


@kernel
class Conv2d(Kernel):
    id = "cpu.conv2d.onednn"
    op = "conv2d"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x, w, b, residual = problem.inputs
        assert x is not None and w is not None
        return _forward(problem.attrs, x, w, problem.outputs[0], b is not None, residual is not None, runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return _refuse(problem) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, w, b, residual = problem.inputs
        assert x is not None and w is not None
        pd = self._pd(problem)
        arguments = [(ARG_SRC, pd.src_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DST, pd.dst_md())]
        if b is not None:
            arguments.append((ARG_BIAS, pd.weights_md(1)))
        if residual is not None:
            arguments.append((capi.arg_post_op(0), describe(residual)))
        with runtime.denormals_kept():
            run = runtime.bind(pd, arguments).run
        pack = Packer(_weights(w, problem.attrs.groups), pd.weights_md(), device.pool)
        if b is None and residual is None:

            def launch(inputs: Any, outputs: Any) -> None:
                packed = pack(inputs[1])
                run(inputs[0].ptr, packed.ptr, outputs[0].ptr)
        else:
            used = [i for i in (2, 3) if problem.inputs[i] is not None]

            def launch(inputs: Any, outputs: Any) -> None:
                packed = pack(inputs[1])
                run(inputs[0].ptr, packed.ptr, outputs[0].ptr, *[inputs[i].ptr for i in used])

        return launch


@lru_cache(maxsize=16)
def _backward_data(c: Any, x: Spec, w: Spec, g: Spec, threads: int) -> PrimitiveDesc:
    weights = _any(_weights(w, c.groups))
    return capi.convolution_backward_data(_DIRECT, describe(x), weights, describe(g), hint=_hint(c, x, w, g), **_window(c))


@kernel
class Conv2dInputGrad(Kernel):
    id = "cpu.conv2d_input_grad.onednn"
    op = "conv2d_input_grad"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        g, w = problem.inputs
        assert g is not None and w is not None
        return _backward_data(problem.attrs.conv, problem.outputs[0], w, g, runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return _refuse(problem) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        w = problem.inputs[1]
        assert w is not None
        pd = self._pd(problem)
        arguments = [(ARG_DIFF_DST, pd.diff_dst_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DIFF_SRC, pd.diff_src_md())]
        run = runtime.bind(pd, arguments).run
        pack = Packer(_weights(w, problem.attrs.conv.groups), pd.weights_md(), device.pool)

        def launch(inputs: Any, outputs: Any) -> None:
            packed = pack(inputs[1])
            run(inputs[0].ptr, packed.ptr, outputs[0].ptr)

        return launch


@lru_cache(maxsize=16)
def _backward_weights(c: Any, x: Spec, w: Spec, g: Spec, bias: bool, threads: int) -> PrimitiveDesc:
    weights = _any(_weights(w, c.groups))
    b = MemoryDesc((g.shape[1],), weights.dtype, "a") if bias else None
    return capi.convolution_backward_weights(_DIRECT, describe(x), weights, b, describe(g), hint=_hint(c, x, w, g), **_window(c))


@kernel
class Conv2dWeightGrad(Kernel):
    id = "cpu.conv2d_weight_grad.onednn"
    op = "conv2d_weight_grad"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x, g = problem.inputs
        a = problem.attrs
        assert x is not None and g is not None
        return _backward_weights(a.conv, x, problem.outputs[0], g, a.bias, runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = _refuse(problem) or attempt(lambda: self._pd(problem))
        if not reasons and "jit_1x1:avx2" in self._pd(problem).impl and max(problem.attrs.conv.stride) > 1:
            x = problem.inputs[0]
            if x is not None and x.shape[1] < 8:
                reasons = ["oneDNN's AVX2 1x1 weight gradient is wrong with a stride and fewer than 8 input channels"]
        return reasons

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a = problem.attrs
        pd = self._pd(problem)
        diff = pd.diff_weights_md()
        arguments = [(ARG_SRC, pd.src_md()), (ARG_DIFF_DST, pd.diff_dst_md()), (ARG_DIFF_WEIGHTS, diff)]
        if a.bias:
            arguments.append((ARG_DIFF_BIAS, pd.diff_weights_md(1)))
        run = runtime.bind(pd, arguments).run
        back = Reorder(diff, _weights(problem.outputs[0], a.conv.groups))
        take, nbytes = device.pool.take, diff.nbytes

        def launch(inputs: Any, outputs: Any) -> None:
            target = take(nbytes) if back.needed else outputs[0]
            addresses = [b.ptr for b in (*inputs, target, *outputs[1:])]
            run(*addresses)
            if back.needed:
                back.run(target.ptr, outputs[0].ptr)

        return launch
