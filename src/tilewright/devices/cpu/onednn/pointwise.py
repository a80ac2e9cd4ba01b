"""Pointwise ops on large tensors by oneDNN: one pass through memory on all cores. Small ones are quicker in NumPy."""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, register
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse, relu_slope
from tilewright.devices.cpu.onednn.capi import (
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_SRC,
    ARG_SRC_1,
    BINARY,
    ELTWISE,
    FORWARD_TRAINING,
    MemoryDesc,
    PrimitiveDesc,
)

SMALL = 1 << 14  # elements up to which a NumPy call costs less


def _flat(x: Spec) -> MemoryDesc:
    """Elements in memory order: the layout does not matter to an elementwise op."""
    return MemoryDesc((x.size,), "f32", "a")


def _refuse(problem: Problem) -> list[str]:
    reasons = refuse(problem)
    out = problem.outputs[0]
    if not reasons and out.size <= SMALL:
        reasons = [f"{out.size} elements are too few to be worth a primitive"]
    return reasons


class Eltwise(Kernel):
    """A function of one operand."""

    device = "cpu"
    rank = 10
    tolerance = 4.0

    def __init__(self, op: str, alg: str) -> None:
        self.op, self.alg = op, alg
        self.id = f"cpu.{op}.onednn"

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        md = _flat(problem.outputs[0])
        alpha = relu_slope() if self.alg == "relu" else 0.0
        with runtime.denormals_kept():
            return capi.eltwise_forward(FORWARD_TRAINING, ELTWISE[self.alg], md, md, alpha, 0.0)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        if not (reasons := _refuse(problem)) and self.alg == "relu" and relu_slope() == 0.0:
            reasons = ["oneDNN's relu would turn NaN into 0 on this machine"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        md = _flat(problem.outputs[0])
        with runtime.denormals_kept():
            run = runtime.bind(self._pd(problem), [(ARG_SRC, md), (ARG_DST, md)]).run
        return lambda inputs, outputs: run(inputs[0].ptr, outputs[0].ptr)


class EltwiseGrad(Kernel):
    """The gradient of an activation from its output."""

    device = "cpu"
    rank = 10
    tolerance = 4.0

    def __init__(self, op: str, alg: str, alpha: float, beta: float) -> None:
        self.op, self.alg, self.alpha, self.beta = op, alg, alpha, beta
        self.id = f"cpu.{op}.onednn"

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        md = _flat(problem.outputs[0])
        hint = capi.eltwise_forward(FORWARD_TRAINING, ELTWISE[self.alg], md, md, self.alpha, self.beta)
        return capi.eltwise_backward(ELTWISE[self.alg], md, md, md, hint, self.alpha, self.beta)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        g, y = problem.inputs
        reasons = _refuse(problem)
        if not reasons and g is not y:
            reasons = ["operands must lie alike"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        md = _flat(problem.outputs[0])
        run = runtime.bind(self._pd(problem), [(ARG_DIFF_DST, md), (ARG_DST, md), (ARG_DIFF_SRC, md)]).run
        return lambda inputs, outputs: run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)


class Binary(Kernel):
    """A function of two operands: alike, or the second one per channel."""

    device = "cpu"
    rank = 10

    def __init__(self, op: str) -> None:
        self.op = op
        self.id = f"cpu.{op}.onednn"

    def _mds(self, problem: Problem) -> tuple[MemoryDesc, MemoryDesc]:
        a, b = problem.inputs
        assert a is not None and b is not None
        if a is b:
            return _flat(a), _flat(b)
        return describe(a), describe(b)

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        a, b = self._mds(problem)
        return capi.binary(BINARY[self.op], a, b, a)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = _refuse(problem)
        a, b = problem.inputs
        out = problem.outputs[0]
        assert a is not None and b is not None
        if not reasons and a is not out:
            reasons = ["the first operand must have the result's shape and layout"]
        if not reasons and a is not b and (a.ndim != 4 or b.ndim != 4 or a.layout != b.layout):
            reasons = ["only a second operand alike, or of 4 axes in the same layout, is given to oneDNN"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, b = self._mds(problem)
        run = runtime.bind(self._pd(problem), [(ARG_SRC, a), (ARG_SRC_1, b), (ARG_DST, a)]).run
        return lambda inputs, outputs: run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)


for _op in ("add", "sub", "mul", "div"):
    register(Binary(_op))
# Those whose oneDNN form keeps NaN and is as exact as NumPy's.
for _op, _alg in {"relu": "relu", "abs": "abs", "sqrt": "sqrt"}.items():
    register(Eltwise(_op, _alg))
register(EltwiseGrad("relu_grad", "relu_use_dst", 0.0, 0.0))
register(EltwiseGrad("relu6_grad", "clip_v2_use_dst", 0.0, 6.0))
