"""Products: one work-item for each element of the result, any strides, batches and types."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._expr import activation_source
from tilewright.devices.opencl._group import offset
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher


def launch_of(
    device: Any,
    problem: Problem,
    x: Spec,
    y: Spec,
    out: Spec,
    steps: tuple[tuple[int, int], tuple[int, int]],
    k: int,
    *,
    bias: bool = False,
    activation: str | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> Any:
    """out (..., M, N) from x at (m, k) and y at (k, n), each with its two strides in `steps`; leading axes broadcast."""
    index = index_type(problem)
    kind: Any = np.int32 if index == "int" else np.int64
    double, whole = x.dtype.name == "float64", not x.dtype.is_floating
    batch = out.shape[:-2]
    lead = [
        [0] * (len(batch) - s.ndim + 2) + [0 if n == 1 else st // s.dtype.itemsize for n, st in zip(s.shape[:-2], s.strides[:-2], strict=True)]
        for s in (x, y)
    ]
    rank = max(len(batch), 1)
    lead = [v or [0] for v in lead]
    code, names, step_names = offset("b", "b", rank, ("x", "y"))
    arguments = [*names, *step_names[0], *step_names[1]]
    values = [*batch[1:], *lead[0], *lead[1]]
    act = activation_source(activation, alpha, beta, double) if not whole else ""
    source = (
        prelude(x.dtype)
        + types(x=x)
        + f"#define INDEX {index}\n#define ACC {'long' if whole else 'double' if double else 'float'}\n{act}"
        + f"""
__kernel void product(__global const T_x *restrict x, __global const T_x *restrict y, __global const T_x *restrict bias, __global T_x *restrict out,
    const int has_bias, const INDEX B, const INDEX M, const INDEX N, const INDEX K, const INDEX xm, const INDEX xk, const INDEX yk, const INDEX yn,
    {", ".join(f"const INDEX {a}" for a in arguments)}) {{
  const INDEX i = get_global_id(0);
  if (i >= B * M * N) return;
  const INDEX n = i % N, m = i / N % M, b = i / N / M;
  {code}
  INDEX p = b_x + m * xm, q = b_y + n * yn;
  ACC acc = 0;
  for (INDEX k = 0; k < K; ++k, p += xk, q += yk) acc += (ACC)LOAD_x(x, p) * (ACC)LOAD_x(y, q);
  if (has_bias) acc += LOAD_x(bias, n);
  STORE_x(out, i, {"(C_x)acc" if whole else "tw_activation(acc)"});
}}
"""
    )
    m, n = out.shape[-2:]
    scalars = [np.int32(bias), *[kind(v) for v in (out.size // max(m * n, 1), m, n, k, *steps[0], *steps[1], *values)]]
    define = {} if double else {"-cl-single-precision-constant": None}
    return launcher(device, source, "product", size=(out.size,), group=(64,), define=define, scalars=scalars, buffers=4)


def _two(s: Spec, turned: bool) -> tuple[int, int]:
    rows, columns = (st // s.dtype.itemsize for st in s.strides[-2:])
    return (columns, rows) if turned else (rows, columns)


@kernel
class Matmul(ClKernel):
    id, op, rank = "opencl.matmul.direct", "matmul", 100

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        return ["it reads operands with channels last in memory only as contiguous"] if any(s.layout != "contiguous" for s in problem.outputs) else []

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, y), out, a = problem.inputs, problem.outputs[0], problem.attrs
        assert x is not None
        assert y is not None
        k = x.shape[-2 if a.ta else -1]
        run = launch_of(device, problem, x, y, out, (_two(x, a.ta), _two(y, a.tb)), k)
        return lambda inputs, outputs: run(inputs[0], inputs[1], None, outputs[0])


@kernel
class Linear(ClKernel):
    id, op, rank = "opencl.linear.direct", "linear", 100

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, w, bias), out, a = problem.inputs, problem.outputs[0], problem.attrs
        assert x is not None
        assert w is not None
        steps = (_two(x, False), _two(w, True))
        run = launch_of(
            device, problem, x, w, out, steps, x.shape[1], bias=bias is not None, activation=a.activation, alpha=a.alpha, beta=a.beta
        )  # fmt: skip
        return lambda inputs, outputs: run(inputs[0], inputs[1], inputs[2], outputs[0])
