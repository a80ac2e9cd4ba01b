"""Pointwise ops: kernels made from the expressions in `_expr.py`, over any broadcasting and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, memory_order, register
from tilewright.devices.opencl import _expr
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

NAMES = "abc"
VECTOR = 4  # elements a work-item takes of operands that lie alike


def strides_of(s: Spec, shape: Sequence[int]) -> list[int]:
    """Of an operand broadcast to `shape`: elements between neighbours along each axis, 0 where it repeats."""
    missing = len(shape) - s.ndim
    steps = [step // s.dtype.itemsize for step in s.strides]
    return [0] * missing + [0 if n == 1 else step for n, step in zip(s.shape, steps, strict=True)]


def merged(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Axes, slowest first, joined where every operand steps through two of them as through one; axes of one element go."""
    out: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(sizes):
        if n == 1:
            continue
        here = [s[axis] for s in strides]
        if out and all(st[-1] == h * n for st, h in zip(steps, here, strict=True)):
            out[-1] *= n
            for st, h in zip(steps, here, strict=True):
                st[-1] = h
        else:
            out.append(n)
            for st, h in zip(steps, here, strict=True):
                st.append(h)
    return out or [1], [st or [0] for st in steps]


def function(expression: str, operands: str, result: str) -> str:
    """C: `C_y tw_f(operands..., p, q)`."""
    arguments = ", ".join(f"const C_{n} {n}" for n in operands)
    return f"static C_y tw_f({arguments}, const P p, const P q) {{ return (C_y)({expression}); }}\n"


def flat_source(operands: str, repeats: str, vector: bool) -> str:
    """y[i] = f(operands[i]); those in `repeats` have one element. A work-item takes VECTOR neighbours, as one where all are float32."""
    pointers = ", ".join(f"__global const T_{n} *{n}" for n in operands)
    loads = ", ".join(f"LOAD_{n}({n}, {'0' if n in repeats else 'i'})" for n in operands)
    whole = f"for (int k = 0; k < {VECTOR}; ++k) {{ const INDEX i = first + k; STORE_y(y, i, tw_f({loads}, p, q)); }}"
    if vector:
        reads = "".join(
            f"const float4 v_{n} = {f'(float4)({n}[0])' if n in repeats else f'*(__global const float4 *)({n} + first)'}; " for n in operands
        )
        parts = ", ".join(f"tw_f({', '.join(f'v_{n}.{k}' for n in operands)}, p, q)" for k in "xyzw")
        whole = f"{reads}*(__global float4 *)(y + first) = (float4)({parts});"
    return f"""
__kernel void flat({pointers}, __global T_y *y, const P p, const P q, const INDEX n) {{
  const INDEX first = (INDEX)get_global_id(0) * {VECTOR};
  if (first + {VECTOR} <= n) {{
    {whole}
  }} else {{
    for (INDEX i = first; i < n; ++i) STORE_y(y, i, tw_f({loads}, p, q));
  }}
}}
"""


def strided_source(operands: str, rank: int) -> str:
    """y in its own order, from operands with a stride for each of `rank` axes (slowest first)."""
    pointers = ", ".join(f"__global const T_{n} *{n}" for n in operands)
    sizes = ", ".join(f"const INDEX d{k}" for k in range(1, rank))
    steps = ", ".join(f"const INDEX {n}{k}" for n in operands for k in range(rank))
    split = "".join(f"  const INDEX x{k} = rest % d{k}; rest /= d{k};\n" for k in range(rank - 1, 0, -1))
    loads = ", ".join(f"LOAD_{n}({n}, {' + '.join(f'x{k} * {n}{k}' for k in range(rank))})" for n in operands)
    tail = "".join(f", {part}" for part in (sizes, steps) if part)
    return f"""
__kernel void strided({pointers}, __global T_y *y, const P p, const P q, const INDEX n{tail}) {{
  const INDEX i = get_global_id(0);
  if (i >= n) return;
  INDEX rest = i;
{split}  const INDEX x0 = rest;
  STORE_y(y, i, tw_f({loads}, p, q));
}}
"""


def launch_of(
    device: Any,
    problem: Problem,
    expression: str,
    *,
    numbers: tuple[Any, Any] = (0, 0),
    strides: Sequence[Sequence[int]] | None = None,
    double: bool | None = None,
) -> Launch:
    """The launch of a pointwise kernel for one output. `strides`: of each operand along the output's axes, where it does not simply broadcast."""
    out = problem.outputs[0]
    ins = [s for s in problem.inputs if s is not None]
    operands = NAMES[: len(ins)]
    order = memory_order(out.ndim, out.layout)
    sizes = [out.shape[a] for a in order]
    own = strides if strides is not None else [strides_of(s, out.shape) for s in ins]
    sizes, steps = merged(sizes, [[s[a] for a in order] for s in own])
    index = index_type(problem)
    kind: Any = np.int32 if index == "int" else np.int64
    double = any(s.dtype.name == "float64" for s in (*ins, out)) if double is None else double
    whole = not any(s.dtype.is_floating for s in ins)
    number, parameter = (np.int64, "long") if whole else (np.float64, "double") if double else (np.float32, "float")
    named = dict(zip(operands, ins, strict=True))
    head = (
        prelude(*[s.dtype for s in (*ins, out)])
        + types(**named, y=out)
        + f"#define INDEX {index}\n#define P {parameter}\n"
        + _expr.real(double, expression)
        + function(expression, operands, "y")
    )
    n = out.size
    scalars: list[Any] = [number(numbers[0]), number(numbers[1]), kind(n)]
    if len(sizes) == 1 and all(st[0] in (0, 1) for st in steps):
        repeats = "".join(o for o, st in zip(operands, steps, strict=True) if st[0] == 0 and n > 1)
        source = head + flat_source(operands, repeats, all(s.dtype.name == "float32" for s in (*ins, out)))
        entry, size = "flat", -(-n // VECTOR)
    else:
        source = head + strided_source(operands, len(sizes))
        scalars += [kind(d) for d in sizes[1:]] + [kind(st) for one in steps for st in one]
        entry, size = "strided", n
    group = (256,) if device.is_gpu else (64,)
    define = {} if double else {"-cl-single-precision-constant": None}
    run = launcher(device, source, entry, size=(size,), group=group, define=define, scalars=scalars, buffers=len(ins) + 1)
    if len(ins) == 1:
        return lambda inputs, outputs: run(inputs[0], outputs[0])
    if len(ins) == 2:
        return lambda inputs, outputs: run(inputs[0], inputs[1], outputs[0])
    return lambda inputs, outputs: run(*inputs, outputs[0])


class PointwiseKernel(ClKernel):
    """An op by its expression, which may depend on the problem. In place it reads each element before it writes it."""

    rank = 10

    def __init__(
        self, op: str, expression: str | tuple[str, str] | Callable[[Problem], str], numbers: Callable[[Problem], tuple[Any, Any]] | None = None
    ) -> None:
        self.op, self.id = op, f"opencl.{op}.pointwise"
        self.expression, self.numbers = expression, numbers

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        expression: Any = self.expression(problem) if callable(self.expression) else self.expression
        if isinstance(expression, tuple):
            first = next(s for s in problem.inputs if s is not None)
            expression = expression[0 if first.dtype.is_floating else 1]
        numbers = (0, 0) if self.numbers is None else self.numbers(problem)
        return launch_of(device, problem, expression, numbers=numbers)


def _bounds(problem: Problem) -> tuple[Any, Any]:
    """Of clamp: one that is not given is one that nothing passes."""
    low, high = problem.attrs
    dtype = problem.inputs[0].dtype  # type: ignore[union-attr]
    least, most = (-math.inf, math.inf) if dtype.is_floating else (dtype.min, dtype.max)
    return least if low is None else low, most if high is None else high


def _integer(s: Spec) -> bool:
    return not s.dtype.is_floating


def _cast(problem: Problem) -> str:
    """Numbers beyond an integer type, and NaN, become what x86 makes of them, as in NumPy there."""
    x, y = problem.inputs[0], problem.outputs[0]
    assert x is not None
    if y.dtype.name == "bool":
        return "a != 0"
    if _integer(x) or not _integer(y):
        return "a"
    wide, limit, least = ("long", "9223372036854775808.0", "LONG_MIN") if y.dtype.itemsize == 8 else ("int", "2147483648.0", "INT_MIN")
    return f"(a >= R(-{limit}) && a < R({limit}) ? ({wide})a : {least})"


for _name, _text in (_expr.UNARY | _expr.BINARY).items():
    if _name not in ("copy", "clamp_grad"):
        register(PointwiseKernel(_name, _text))
for _name, _text in _expr.ACTIVATIONS.items():
    register(PointwiseKernel(_name, _text, lambda problem: problem.attrs))
for _name, _text in _expr.DERIVATIVES.items():
    register(PointwiseKernel(f"{_name}_grad", f"a * {_text}", lambda problem: problem.attrs))
register(PointwiseKernel("clamp", "(a < p ? p : (a > q ? q : a))", _bounds))
register(PointwiseKernel("clamp_grad", _expr.BINARY["clamp_grad"], _bounds))
register(PointwiseKernel("where", "(a ? b : c)"))
register(
    PointwiseKernel(
        "running_average", "((R(1) - p) * a + q * b)", lambda problem: (problem.attrs.momentum, problem.attrs.momentum * problem.attrs.scale)
    )
)
register(PointwiseKernel("cast", _cast))
