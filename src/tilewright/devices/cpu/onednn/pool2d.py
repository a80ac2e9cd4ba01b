"""Pooling and its gradients by oneDNN.

Its maximum drops NaN and starts from the lowest finite number, so a window of -inf would give that; an input that
holds either is done in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.numpy._blas import alone
from tilewright.devices.cpu.numpy.pool2d import max_pool
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse
from tilewright.devices.cpu.onednn.capi import (
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_SRC,
    ARG_WORKSPACE,
    FORWARD_TRAINING,
    POOLING,
    PrimitiveDesc,
)

_dot = alone(np.dot)


def _reasons(problem: Problem, a: Any) -> list[str]:
    reasons = refuse(problem)
    if not reasons and (a.divisor or a.ceil_mode or a.dilation != (1, 1)):
        reasons = ["oneDNN has no divisor of its own, ceil_mode or dilation in average pooling"]
    if not reasons and a.count_include_pad and a.padding[:2] != a.padding[2:]:
        reasons = ["oneDNN's average with counted padding is used only where the padding is symmetric"]
    return reasons


def _forward(a: Any, x: Spec, y: Spec) -> PrimitiveDesc:
    alg = POOLING["avg_include_padding" if a.count_include_pad else "avg_exclude_padding"]
    t, le, b, r = a.padding
    return capi.pooling_forward(FORWARD_TRAINING, alg, describe(x), describe(y), a.stride, a.kernel, a.dilation, (t, le), (b, r))


@kernel
class AvgPool(Kernel):
    id = "cpu.avg_pool2d.onednn"
    op = "avg_pool2d"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x = problem.inputs[0]
        assert x is not None
        return _forward(problem.attrs, x, problem.outputs[0])

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return _reasons(problem, problem.attrs) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd = self._pd(problem)
        run = runtime.bind(pd, [(ARG_SRC, pd.src_md()), (ARG_DST, pd.dst_md())]).run
        return lambda inputs, outputs: run(inputs[0].ptr, outputs[0].ptr)


@kernel
class AvgPoolGrad(Kernel):
    id = "cpu.avg_pool2d_grad.onednn"
    op = "avg_pool2d_grad"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        g, a, x = problem.inputs[0], problem.attrs.pool, problem.outputs[0]
        assert g is not None
        alg = POOLING["avg_include_padding" if a.count_include_pad else "avg_exclude_padding"]
        t, le, b, r = a.padding
        hint = _forward(a, x, g)
        return capi.pooling_backward(alg, describe(x), describe(g), a.stride, a.kernel, a.dilation, (t, le), (b, r), hint)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return _reasons(problem, problem.attrs.pool) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd = self._pd(problem)
        run = runtime.bind(pd, [(ARG_DIFF_DST, pd.diff_dst_md()), (ARG_DIFF_SRC, pd.diff_src_md())]).run
        return lambda inputs, outputs: run(inputs[0].ptr, outputs[0].ptr)


def _max_forward(a: Any, x: Spec, y: Spec) -> PrimitiveDesc:
    t, le, b, r = a.padding
    return capi.pooling_forward(FORWARD_TRAINING, POOLING["max"], describe(x), describe(y), a.stride, a.kernel, a.dilation, (t, le), (b, r))


def _max_backward(a: Any, x: Spec, g: Spec) -> PrimitiveDesc:
    t, le, b, r = a.padding
    hint = _max_forward(a, x, g)
    return capi.pooling_backward(POOLING["max"], describe(x), describe(g), a.stride, a.kernel, a.dilation, (t, le), (b, r), hint)


def _max_reasons(problem: Problem, a: Any) -> list[str]:
    reasons = refuse(problem, ("float32", "uint8"))
    if not reasons and (a.ceil_mode or a.dilation != (1, 1)):
        reasons = ["oneDNN's pooling is used without ceil_mode and dilation only"]
    if not reasons and any(s is not None and s.layout != CHANNELS_LAST for s in problem.inputs):
        reasons = ["operands must lie channels-last"]
    return reasons


def _taps_kept(pd: PrimitiveDesc, tap: Spec) -> list[str]:
    """Its workspace is used as the chosen taps, so it must be a byte an element, lying as the output."""
    held = pd.workspace_md
    if held is None or held.nbytes != tap.size or held.strides != tap.strides or held.inner_blocks:
        return ["its workspace is not one byte an element in the output's layout"]
    return []


@kernel
class MaxPool(Kernel):
    id = "cpu.max_pool2d.onednn"
    op = "max_pool2d"
    device = "cpu"
    rank = 10

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x = problem.inputs[0]
        assert x is not None
        return _max_forward(problem.attrs, x, problem.outputs[0])

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = _max_reasons(problem, problem.attrs) or attempt(lambda: self._pd(problem))
        return reasons or _taps_kept(self._pd(problem), problem.outputs[1])

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd, x, a = self._pd(problem), problem.inputs[0], problem.attrs
        y, tap = problem.outputs
        assert x is not None and pd.workspace_md is not None
        run = runtime.bind(pd, [(ARG_SRC, pd.src_md()), (ARG_DST, pd.dst_md()), (ARG_WORKSPACE, pd.workspace_md)]).run
        nbytes = x.nbytes

        def launch(inputs: Any, outputs: Any) -> None:
            values = inputs[0].raw[:nbytes].view(np.float32)
            with np.errstate(all="ignore"):
                square = _dot(values, values)  # NaN or infinite when an element is (or when very large ones overflow)
            if not square < np.inf:
                max_pool(a, outputs[0].array(y), outputs[1].array(tap), inputs[0].array(x))
            else:
                run(inputs[0].ptr, outputs[0].ptr, outputs[1].ptr)

        return launch


@kernel
class MaxPoolGrad(Kernel):
    id = "cpu.max_pool2d_grad.onednn"
    op = "max_pool2d_grad"
    device = "cpu"
    rank = 10

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        g = problem.inputs[0]
        assert g is not None
        return _max_backward(problem.attrs.pool, problem.outputs[0], g)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = _max_reasons(problem, problem.attrs.pool) or attempt(lambda: self._pd(problem))
        tap = problem.inputs[1]
        assert tap is not None
        return reasons or _taps_kept(self._pd(problem), tap)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd = self._pd(problem)
        assert pd.workspace_md is not None
        arguments = [(ARG_DIFF_DST, pd.diff_dst_md()), (ARG_WORKSPACE, pd.workspace_md), (ARG_DIFF_SRC, pd.diff_src_md())]
        run = runtime.bind(pd, arguments).run
        return lambda inputs, outputs: run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)
