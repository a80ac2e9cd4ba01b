"""Resizing: each element gathers its few sources along rows and columns, whose places and weights are tables made once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, register, spec
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

_SOURCE = """
__kernel void resize(__global const T_x *restrict x, __global T_x *restrict y, __global const int *restrict rows,
    __global const REAL *restrict row_w,
    __global const int *restrict cols, __global const REAL *restrict col_w, const INDEX N, const INDEX C, const INDEX H, const INDEX W,
    const INDEX OH, const INDEX OW, const INDEX RK, const INDEX CK, const int last) {
  const INDEX g = get_global_id(0);
  if (g >= N * C * OH * OW) return;
  INDEX n, c, h, w, i = g;
  if (last) { c = i % C; i /= C; w = i % OW; i /= OW; h = i % OH; n = i / OH; }
  else { w = i % OW; i /= OW; h = i % OH; i /= OH; c = i % C; n = i / C; }
  REAL acc = 0;
  for (INDEX a = 0; a < RK; ++a) {
    const int r = rows[h * RK + a];
    if (r < 0) break;
    for (INDEX b = 0; b < CK; ++b) {
      const int s = cols[w * CK + b];
      if (s < 0) break;
      const INDEX at = last ? ((n * H + r) * W + s) * C + c : ((n * C + c) * H + r) * W + s;
      acc += (REAL)row_w[h * RK + a] * (REAL)col_w[w * CK + b] * (REAL)LOAD_x(x, at);
    }
  }
  STORE_x(y, g, acc);
}
"""


def table(a: Any, n: int, axis: int, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """(places, weights) of each target's sources along an axis whose input has n elements; -1 ends a list."""
    out = a.size[axis]
    at = np.arange(out, dtype=np.float64)
    ratio = a.scale[axis] or n / out
    if a.mode == "nearest":
        low = np.minimum((at * ratio).astype(np.int64), n - 1)
        pairs = [(o, p, 1.0) for o, p in enumerate(low.tolist())]
    else:
        where = at * ((n - 1) / max(out - 1, 1)) if a.align_corners else np.maximum((at + 0.5) * ratio - 0.5, 0)
        low = np.minimum(where.astype(np.int64), n - 1)
        part = np.minimum(where - low, 1)
        pairs = [(o, int(p), 1 - t) for o, (p, t) in enumerate(zip(low, part, strict=True))]
        pairs += [(o, min(int(p) + 1, n - 1), t) for o, (p, t) in enumerate(zip(low, part, strict=True))]
    lists: list[list[tuple[int, float]]] = [[] for _ in range(n if backward else out)]
    for o, p, t in pairs:
        if t:
            lists[p if backward else o].append((o if backward else p, t))
    longest = max([len(v) for v in lists] + [1])
    places, weights = np.full((len(lists), longest), -1, np.int32), np.zeros((len(lists), longest))
    for k, found in enumerate(lists):
        for j, (p, t) in enumerate(sorted(found)):
            places[k, j], weights[k, j] = p, t
    return places, weights


class Resize(ClKernel):
    rank = 10

    def __init__(self, op: str, backward: bool) -> None:
        self.op, self.id, self.backward = op, f"opencl.{op}.item", backward

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, y = problem.inputs[0], problem.outputs[0]
        assert x is not None
        a = problem.attrs.resize if self.backward else problem.attrs
        full = (y if self.backward else x).shape[2:]
        tables = [table(a, full[k], k, self.backward) for k in (0, 1)]
        double = x.dtype.name == "float64"
        kinds = ("int32", "float64" if double else "float32")
        buffers = [device.upload(t, spec(t.shape, kind)) for pair in tables for t, kind in zip(pair, kinds, strict=True)]
        name = index_type(problem)
        kind: Any = np.int32 if name == "int" else np.int64
        source = prelude(x.dtype) + types(x=x) + f"#define INDEX {name}\n#define REAL {'double' if double else 'float'}\n{_SOURCE}"
        sizes = [*x.shape, *y.shape[2:], tables[0][0].shape[1], tables[1][0].shape[1]]
        scalars = [*[kind(v) for v in sizes], np.int32(x.layout == "channels_last")]
        define = {} if double else {"-cl-single-precision-constant": None}
        run = launcher(device, source, "resize", size=(y.size,), group=(64,), define=define, scalars=scalars, buffers=6)
        return lambda inputs, outputs: run(inputs[0], outputs[0], *buffers)


register(Resize("resize2d", False))
register(Resize("resize2d_grad", True))
