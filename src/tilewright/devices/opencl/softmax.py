"""Softmax, its logarithm and their gradients along an axis: a work-group, or a work-item, for each line."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import TREE, groups
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

# Line o begins at (o / I) * D * I + o % I in memory, where D elements lie I apart.
FRAME = """
#if L > 1
#define LINE const INDEX o = get_group_id(0); const int lid = get_local_id(0);
#else
#define LINE const INDEX o = get_global_id(0); const int lid = 0; if (o >= lines) return;
#endif
#define AT(d) (o / I * D * I + o % I + (d) * I)
"""
_FORWARD = """
__kernel void forward(__global const T_x *restrict x, __global T_x *restrict y, const INDEX lines, const INDEX D, const INDEX I) {
  LINE
  SHARED_OF(REAL, share)
  REAL top = -INFINITY;
  for (INDEX d = lid; d < D; d += L) { const REAL v = LOAD_x(x, AT(d)); top = HIGHER(v, top); }
  TREE(top, share, HIGHER)
  REAL acc = 0;
  for (INDEX d = lid; d < D; d += L) acc += exp((REAL)LOAD_x(x, AT(d)) - top);
  TREE(acc, share, ADD)
#ifdef LOGARITHM
  const REAL shift = log(acc);
  for (INDEX d = lid; d < D; d += L) STORE_x(y, AT(d), (REAL)LOAD_x(x, AT(d)) - top - shift);
#else
  for (INDEX d = lid; d < D; d += L) STORE_x(y, AT(d), exp((REAL)LOAD_x(x, AT(d)) - top) / acc);
#endif
}
"""
_BACKWARD = """
__kernel void backward(__global const T_x *restrict g, __global const T_x *restrict y, __global T_x *restrict out, const INDEX lines,
    const INDEX D, const INDEX I) {
  LINE
  SHARED_OF(REAL, share)
  REAL acc = 0;
#ifdef LOGARITHM
  for (INDEX d = lid; d < D; d += L) acc += LOAD_x(g, AT(d));
  TREE(acc, share, ADD)
  for (INDEX d = lid; d < D; d += L) STORE_x(out, AT(d), (REAL)LOAD_x(g, AT(d)) - exp((REAL)LOAD_x(y, AT(d))) * acc);
#else
  for (INDEX d = lid; d < D; d += L) acc += (REAL)LOAD_x(g, AT(d)) * (REAL)LOAD_x(y, AT(d));
  TREE(acc, share, ADD)
  for (INDEX d = lid; d < D; d += L) STORE_x(out, AT(d), (REAL)LOAD_x(y, AT(d)) * ((REAL)LOAD_x(g, AT(d)) - acc));
#endif
}
"""


def lines(x: Spec, axis: int) -> tuple[int, int, int]:
    """(lines, elements of one, elements between neighbours) along an axis of a dense tensor."""
    length = x.shape[axis]
    return x.size // max(length, 1), length, x.strides[axis] // x.dtype.itemsize


class SoftmaxKernel(ClKernel):
    rank = 10

    def __init__(self, op: str, body: str, entry: str) -> None:
        self.op, self.id, self.body, self.entry = op, f"opencl.{op}.line", body, entry

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return groups(device)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        count, length, apart = lines(x, problem.attrs)
        double = x.dtype.name == "float64"
        index = index_type(problem)
        kind: Any = np.int32 if index == "int" else np.int64
        group = dict(config)["group"]
        define: dict[str, Any] = {"L": group, **({"LOGARITHM": 1} if self.op.startswith("log") else {})}
        if not double:
            define["-cl-single-precision-constant"] = None
        source = prelude(x.dtype) + types(x=x) + f"#define INDEX {index}\n#define REAL {'double' if double else 'float'}\n{TREE}{FRAME}{self.body}"
        scalars = [kind(v) for v in (count, length, apart)]
        size = count * group if x.size else 0
        run = launcher(
            device, source, self.entry, size=(size,), group=(group if group > 1 else 64,), define=define, scalars=scalars,
            buffers=len(problem.inputs) + 1,
        )  # fmt: skip
        return lambda inputs, outputs: run(*inputs, outputs[0])


for _name in ("softmax", "log_softmax"):
    register(SoftmaxKernel(_name, _FORWARD, "forward"))
    register(SoftmaxKernel(f"{_name}_grad", _BACKWARD, "backward"))
