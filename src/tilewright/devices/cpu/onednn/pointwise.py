"""Pointwise ops by oneDNN: one pass through memory on all cores. Small tensors are quicker in NumPy.

Only what keeps NaN and infinities and is as exact as an op's bound is here. Measured with oneDNN 3.2: eltwise clip,
hardsigmoid and exp and binary max and min lose NaN; relu does too, unless its slope is so small that it turns -inf into
NaN; log is off by 3e-6 near 1 and soft_relu by 4e-6 below -20. These ops stay with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, register, registered, spec
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse
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

SMALL = 1 << 10  # elements up to which a primitive, made anew for each size, is not worth its making

Parameters = Callable[[Any], tuple[float, float]]  # (alpha, beta) of the primitive from the op's attributes


def _flat(x: Spec) -> MemoryDesc:
    """Elements in memory order: the layout does not matter to an elementwise op."""
    return MemoryDesc((x.size,), "f32", "a")


def _refuse(problem: Problem) -> list[str]:
    reasons = refuse(problem)
    size = problem.outputs[0].size
    if not reasons and size <= SMALL:
        reasons = [f"{size} elements are too few to be worth a primitive"]
    return reasons


def _where_finite(run: Launch, which: int, problem: Problem, device: Any) -> Launch:
    """`run` where operand `which` is finite, else NumPy's kernel."""
    plain = next(k for k in registered("cpu", problem.op) if k.id == f"cpu.{problem.op}.numpy").prepare(problem, (), device)
    size = problem.outputs[0].size

    def launch(inputs: Any, outputs: Any) -> None:
        # A NaN or an infinity makes the sum one too; so may an overflow, which does no harm.
        with np.errstate(all="ignore"):
            usual = np.isfinite(np.add.reduce(np.ndarray((size,), np.float32, inputs[which].raw)))
        (run if usual else plain)(inputs, outputs)

    return launch


class Eltwise(Kernel):
    """A function of one operand. With `guard`, it is wrong at infinity, so an operand that holds one goes to NumPy."""

    device = "cpu"
    rank = 10
    tolerance = 4.0

    def __init__(self, op: str, alg: str, parameters: Parameters, guard: bool = False) -> None:
        self.op, self.alg, self.parameters, self.guard = op, alg, parameters, guard
        self.id = f"cpu.{op}.onednn"

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        md = _flat(problem.outputs[0])
        return capi.eltwise_forward(FORWARD_TRAINING, ELTWISE[self.alg], md, md, *self.parameters(problem.attrs))

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = _refuse(problem)
        if not reasons and self.alg == "relu" and self.parameters(problem.attrs)[0] == 0.0:
            reasons = ["oneDNN's relu turns NaN into 0 where its slope is 0"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        md = _flat(problem.outputs[0])
        run = runtime.bind(self._pd(problem), [(ARG_SRC, md), (ARG_DST, md)]).run

        def launch(inputs: Any, outputs: Any) -> None:
            run(inputs[0].ptr, outputs[0].ptr)

        return _where_finite(launch, 0, problem, device) if self.guard else launch


class EltwiseGrad(Kernel):
    """The gradient of an activation from its output (`_use_dst`) or its input; `guard` as in Eltwise."""

    device = "cpu"
    rank = 10
    tolerance = 4.0

    def __init__(self, name: str, alg: str, parameters: Parameters, guard: bool = False) -> None:
        self.op, self.alg, self.parameters, self.guard = f"{name}_grad", alg, parameters, guard
        self.id = f"cpu.{self.op}.onednn"

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        md = _flat(problem.outputs[0])
        alg, values = ELTWISE[self.alg], self.parameters(problem.attrs)
        hint = capi.eltwise_forward(FORWARD_TRAINING, alg, md, md, *values)
        return capi.eltwise_backward(alg, md, md, md, hint, *values)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        g, s = problem.inputs
        reasons = _refuse(problem)
        if not reasons and g is not s:
            reasons = ["operands must lie alike"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        md = _flat(problem.outputs[0])
        from_ = ARG_DST if self.alg.endswith("_use_dst") else ARG_SRC
        run = runtime.bind(self._pd(problem), [(ARG_DIFF_DST, md), (from_, md), (ARG_DIFF_SRC, md)]).run

        def launch(inputs: Any, outputs: Any) -> None:
            run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)

        return _where_finite(launch, 1, problem, device) if self.guard else launch


def _ranked(a: Spec, b: Spec, layout: str) -> Spec:
    """b with as many axes as a."""
    return spec((1,) * (a.ndim - b.ndim) + b.shape, b.dtype, layout)


def _steps(a: Spec, b: Spec) -> Any:
    """(size, stride, stride if it lay as a does) along the axes of b: one memory may be both layouts."""
    return zip(_ranked(a, b, b.layout).shape, _ranked(a, b, b.layout).strides, _ranked(a, b, a.layout).strides, strict=True)


class Binary(Kernel):
    """A function of two operands: alike, or the second one broadcast."""

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
        return describe(a), describe(_ranked(a, b, a.layout))

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
        if not reasons and any(s > 1 and i != j for s, i, j in _steps(a, b)):
            reasons = ["operands of two layouts are not given to oneDNN"]
        return reasons or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, b = self._mds(problem)
        run = runtime.bind(self._pd(problem), [(ARG_SRC, a), (ARG_SRC_1, b), (ARG_DST, a)]).run
        return lambda inputs, outputs: run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)


def _none(attrs: Any) -> tuple[float, float]:
    return 0.0, 0.0


def _one(attrs: Any) -> tuple[float, float]:
    return 1.0, 0.0


def _alpha(attrs: Any) -> tuple[float, float]:
    return attrs[0], 0.0


def _both(attrs: Any) -> tuple[float, float]:
    return attrs


for _op in ("add", "sub", "mul", "div"):
    register(Binary(_op))
for _kernel in (
    Eltwise("abs", "abs", _none),
    Eltwise("sqrt", "sqrt", _none),
    Eltwise("leaky_relu", "relu", _alpha),
    Eltwise("tanh", "tanh", _none),
    Eltwise("sigmoid", "logistic", _none),
    Eltwise("elu", "elu", _alpha),
    Eltwise("silu", "swish", _one),
    Eltwise("gelu", "gelu_erf", _none, guard=True),
    Eltwise("gelu_tanh", "gelu_tanh", _none),
    Eltwise("hard_swish", "hardswish", _both),
    Eltwise("mish", "mish", _none),
    EltwiseGrad("relu", "relu_use_dst", _none),
    EltwiseGrad("relu6", "clip_v2_use_dst", lambda attrs: (0.0, 6.0)),
    EltwiseGrad("hard_tanh", "clip_v2_use_dst", _both),
    EltwiseGrad("tanh", "tanh_use_dst", _none),
    EltwiseGrad("sigmoid", "logistic_use_dst", _none),
    EltwiseGrad("leaky_relu", "relu", _alpha),
    EltwiseGrad("elu", "elu", _alpha),
    EltwiseGrad("silu", "swish", _one),
    EltwiseGrad("gelu", "gelu_erf", _none, guard=True),
    EltwiseGrad("gelu_tanh", "gelu_tanh", _none),
    EltwiseGrad("hard_sigmoid", "hardsigmoid", _both),
    EltwiseGrad("hard_swish", "hardswish", _both),
    EltwiseGrad("softplus", "soft_relu", _one),
    EltwiseGrad("mish", "mish", _none, guard=True),
):
    register(_kernel)
