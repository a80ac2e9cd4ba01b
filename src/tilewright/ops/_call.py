"""One call of an op: find or make its plan, allocate the outputs, launch, and record for the gradient.

This is the path every eager op takes, so it is written for the host's time: a plan found again costs one dict lookup.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tilewright import devices
from tilewright.autograd import Node, mode
from tilewright.devices.api import Config, Device, Kernel, Problem, Spec, spec
from tilewright.dtypes import DType, promote, promote_scalar
from tilewright.errors import ArgumentError, DeviceError, DTypeError, TilewrightError
from tilewright.ops._op import Op
from tilewright.tensor import Tensor, full, tensor
from tilewright.tune.select import Choice, choose

_tensor_new = Tensor.__new__


class Plan:
    """A problem with the kernel chosen for it, ready to launch."""

    __slots__ = ("choice", "launch", "op", "out_specs", "problem", "single", "used")

    def __init__(self, op: Op, problem: Problem, choice: Choice) -> None:
        self.op = op
        self.problem = problem
        self.choice = choice
        self.launch = choice.launch
        self.out_specs = problem.outputs
        self.single = len(problem.outputs) == 1
        self.used = True

    @property
    def kernel(self) -> Kernel:
        return self.choice.kernel

    @property
    def config(self) -> Config:
        return self.choice.config


def call(op: Op, inputs: tuple[Tensor | None, ...], attrs: Any = None, device: Device | None = None) -> Any:
    """Run `op` on `inputs` (all on one device; None for an absent optional operand). A Tensor, or a tuple of them.

    `device` is needed only by ops that take no tensor. Raises DeviceError when devices differ, and what the op's
    shape rule raises.
    """
    specs = []
    buffers = []
    needs = False
    for t in inputs:
        if t is None:
            specs.append(None)
            buffers.append(None)
        else:
            if t.device is not device:
                if device is not None:
                    raise DeviceError(f"{op.name}: operands lie on {device.name} and {t.device.name}; move one with .to(device)")
                device = t.device
            specs.append(t.spec)
            buffers.append(t.buffer)
            if t.requires_grad:
                needs = True
    key = (op, attrs, *specs)
    plans = device.plans  # type: ignore[union-attr]
    plan = plans.get(key)
    if plan is None:
        plan = make_plan(op, attrs, specs, device)  # type: ignore[arg-type]
        plans.put(key, plan)
    plan.used = True
    if plan.single:
        out_spec = plan.out_specs[0]
        buffer = device.allocate(out_spec.nbytes)  # type: ignore[union-attr]
        results = (buffer,)
        plan.launch(buffers, results)
        out = Tensor(buffer, out_spec, device)  # type: ignore[arg-type]
        if needs and mode.enabled and op.vjp is not None and out_spec.dtype.kind == "f":
            out._node = Node(op, attrs, device, inputs, specs, plan.out_specs, results)
            out.requires_grad = True
        return out
    results = tuple([device.allocate(s.nbytes) for s in plan.out_specs])  # type: ignore[union-attr]
    plan.launch(buffers, results)
    outs = tuple([Tensor(b, s, device) for b, s in zip(results, plan.out_specs, strict=True)])  # type: ignore[arg-type]
    if needs and mode.enabled and op.vjp is not None:
        node = Node(op, attrs, device, inputs, specs, plan.out_specs, results)
        for i, out in enumerate(outs):
            if out.spec.dtype.kind == "f":
                out._node, out._index, out.requires_grad = node, i, True
    return outs


def call_inplace(op: Op, inputs: tuple[Tensor | None, ...], attrs: Any = None) -> None:
    """Run an op whose outputs overwrite inputs as `op.inplace` says; every output must be so mapped. Not recorded."""
    device = next(t.device for t in inputs if t is not None)
    specs = [None if t is None else t.spec for t in inputs]
    key = (op, attrs, *specs)
    plan = device.plans.get(key)
    if plan is None:
        plan = make_plan(op, attrs, specs, device)
        device.plans.put(key, plan)
    plan.used = True
    targets = [inputs[op.inplace[i]] for i in range(len(plan.out_specs))]
    plan.launch([None if t is None else t.buffer for t in inputs], [t.buffer for t in targets])  # type: ignore[union-attr]
    for t in targets:
        t.buffer.touch()  # type: ignore[union-attr]


def make_plan(op: Op, attrs: Any, specs: Any, device: Device) -> Plan:
    out_specs = op.outputs(attrs, *specs)
    problem = Problem(op.name, attrs, tuple(specs), out_specs)
    return Plan(op, problem, choose(problem, device, op))


# -- operands ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _constant(value: Any, kind: type, dtype: DType, device: Device, negative_zero: bool) -> Tensor:
    if dtype.kind in "iu" and not dtype.min <= value <= dtype.max:
        raise ArgumentError(f"the number {value} does not fit {dtype.name} ({dtype.min} to {dtype.max}); convert the tensor to a wider type")
    with np.errstate(over="ignore"):  # beyond a floating type's range lies infinity
        return full((), value, dtype=dtype, device=device)


def scalar(value: Any, dtype: DType, device: Device) -> Tensor:
    """A 0-d tensor for a Python number, kept for the next call that uses it."""
    return _constant(value, type(value), dtype, device, value == 0 and str(value)[0] == "-")


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """`value` itself if it is a Tensor, else a new tensor on `like`'s device (numbers take `like`'s dtype, weakly)."""
    if isinstance(value, Tensor):
        return value
    if like is not None and isinstance(value, (bool, int, float)):
        return scalar(value, promote_scalar(like.spec.dtype, value), like.device)
    if isinstance(value, (bool, int, float, list, tuple, np.ndarray, np.generic)):
        return tensor(value, device=None if like is None else like.device)
    raise DTypeError(f"an operand of type {type(value).__name__} is not a tensor, an array or a number")


def _beside(t: Tensor, value: Any) -> tuple[Tensor, Tensor]:
    """A tensor and the other operand, of one dtype; a number takes the tensor's, or both the number's higher kind."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        dtype = promote_scalar(t.spec.dtype, value)
        return t if dtype is t.spec.dtype else t.to(dtype=dtype), scalar(value, dtype, t.device)
    return t, as_tensor(value, t)


def operands(name: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands as tensors of one dtype (promoted, see `tilewright.dtypes`)."""
    if not isinstance(b, Tensor):
        a, b = _beside(as_tensor(a), b)
    elif not isinstance(a, Tensor):
        b, a = _beside(b, a)
    da, db = a.spec.dtype, b.spec.dtype
    if da is not db:
        wide = promote(da, db)
        a, b = a.to(dtype=wide), b.to(dtype=wide)
    return a, b


def need_tensor(name: str, **values: Any) -> None:
    for key, value in values.items():
        if not isinstance(value, Tensor):
            raise DTypeError(f"{name}: {key} must be a Tensor and is {type(value).__name__}; make one with tensor(...)")


__all__ = [
    "Plan",
    "Spec",
    "TilewrightError",
    "as_tensor",
    "call",
    "call_inplace",
    "devices",
    "make_plan",
    "need_tensor",
    "operands",
    "scalar",
    "spec",
]
