"""Average pooling and its gradient by oneDNN. (Its maximum drops NaN, so NumPy's, or ours below, does that.)"""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse
from tilewright.devices.cpu.onednn.capi import ARG_DIFF_DST, ARG_DIFF_SRC, ARG_DST, ARG_SRC, FORWARD_TRAINING, POOLING, PrimitiveDesc


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
