"""What an op is: one object that says what is computed, with its reference, gradient, samples and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilewright.devices.api import Spec, spec
from tilewright.dtypes import DType, as_dtype
from tilewright.errors import ArgumentError


@dataclass(frozen=True)
class Arg:
    """A random operand of a sample. `fill`: "normal", "uniform" (low..high), "positive", "int" (low..high-1), "bool",
    "distinct" (a shuffled ramp, for max and sorting) or "kinked" (normal, kept 0.1 away from multiples of 1/2)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    fill: str = "normal"
    low: float = 0.0
    high: float = 1.0

    @property
    def spec(self) -> Spec:
        return spec(self.shape, self.dtype, self.layout)

    def array(self, rng: np.random.Generator, dtype: DType | None = None) -> np.ndarray:
        kind = as_dtype(self.dtype)
        kind = dtype if dtype is not None and kind.is_floating else kind
        shape = self.shape
        if self.fill == "bool" or kind.kind == "b":
            values: Any = rng.integers(0, 2, shape)
        elif self.fill == "int" or not kind.is_floating:
            low, high = (self.low, self.high) if self.fill == "int" else (max(-9, kind.min), 10)
            values = rng.integers(int(low), int(high), shape)
        elif self.fill == "uniform":
            values = rng.uniform(self.low, self.high, shape)
        elif self.fill == "positive":
            values = rng.uniform(0.2, 2.0, shape)
        elif self.fill == "distinct":
            n = prod(shape)
            values = (rng.permutation(n).reshape(shape) - n / 2) * 0.25
        elif self.fill == "kinked":
            values = rng.integers(-8, 8, shape) * 0.5 + rng.uniform(0.1, 0.4, shape)
        elif self.fill == "normal":
            values = rng.standard_normal(shape)
        else:
            raise ArgumentError(f"sample fill {self.fill!r} is not known")
        return np.asarray(values).astype(kind.np)


@dataclass(frozen=True)
class Sample:
    """A problem worth testing. `grad=False` where differences do not apply (a kink, an integer result)."""

    inputs: tuple[Arg | None, ...]
    attrs: Any = None
    grad: bool = True
    note: str = ""


@dataclass(frozen=True)
class ErrorSample:
    """A bad call, and the exact error it must give."""

    call: Callable[[], Any]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating-point operations, and bytes that must move if every operand moves once."""

    flops: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Op:
    """What is computed. Registered on creation; `name` is unique.

    infer(attrs, *specs) -> Spec or tuple of Specs: the only shape rule; raises ShapeError or DTypeError.
    reference(attrs, *arrays) -> array or tuple: NumPy, any float dtype, written for clarity; independent of kernels.
    vjp(node, *gradients) -> a gradient (or None) per input, in public ops; honours node.needs. None: no gradient.
    saves: indices of the inputs vjp reads (None = all). saves_outputs: vjp reads node.outputs.
    terms(attrs, *specs) -> how many products are summed into one output element, for the error bound of tests.
    reference_at(attrs, inputs, output, positions) -> the reference at some elements of output number `output` only, in
        float64 (integers in their own type): `positions` is (P, ndim), the result (P,). For ops whose whole reference
        would take far longer than a kernel does, so that a kernel can be checked on a problem of any size.
    operands(attrs, *specs) -> arrays by number of input, for those inputs of a problem that cannot be drawn at random as
        the most similar sample draws its own.
    inplace: output index -> input index that it may overwrite (optimizer updates).
    """

    name: str
    infer: Callable[..., Any]
    reference: Callable[..., Any]
    vjp: Callable[..., Any] | None = None
    samples: Callable[[], Sequence[Sample]] = tuple
    errors: Callable[[], Sequence[ErrorSample]] = tuple
    flops: Callable[..., float] | None = None
    terms: Callable[..., int] | None = None
    reference_at: Callable[..., np.ndarray] | None = None
    operands: Callable[..., dict[int, np.ndarray]] | None = None
    saves: tuple[int, ...] | None = None
    saves_outputs: bool = False
    inplace: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ArgumentError(f"op {self.name!r} is defined twice; names are unique")
        OPS[self.name] = self

    def outputs(self, attrs: Any, *specs: Spec | None) -> tuple[Spec, ...]:
        out = self.infer(attrs, *specs)
        return out if isinstance(out, tuple) else (out,)

    def cost(self, attrs: Any, *specs: Spec | None) -> Cost:
        outs = self.outputs(attrs, *specs)
        moved = sum(s.nbytes for s in specs if s is not None) + sum(s.nbytes for s in outs)
        return Cost(sum(s.size for s in outs) if self.flops is None else self.flops(attrs, *specs), moved)

    def __repr__(self) -> str:
        return f"Op({self.name})"


OPS: dict[str, Op] = {}


def find(name: str) -> Op:
    """The op of that name. A process that is handed this function has every op of the package loaded."""
    return OPS[name]


def wide(a: np.ndarray) -> np.ndarray:
    """A floating array (bfloat16 too) in float64; integers and bools as they are."""
    return a if a.dtype.kind in "iub" else a.astype(np.float64)
