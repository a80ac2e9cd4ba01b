"""Along an axis in order: cumulative sums, and the k largest. A work-item does a line."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import offset
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.movement import steps
from tilewright.devices.opencl.program import launcher


class _Lines(ClKernel):
    rank = 10

    def lines(self, problem: Problem, device: Any, axis: int, body: str, acc: str, extra: tuple[int, ...] = ()) -> Launch:
        """One work-item for each line of x along the axis: x at r_x + d * xd, the first output at r_y + d * yd, for d below D."""
        x, y = problem.inputs[0], problem.outputs[0]
        assert x is not None
        others = [k for k in range(x.ndim) if k != axis]
        code, names, (x_names, y_names) = offset("o", "r", max(len(others), 1), ("x", "y"))
        name = index_type(problem)
        kind: Any = np.int32 if name == "int" else np.int64
        outputs = ", ".join(f"__global {'T_y' if k == 0 else 'long'} *restrict y{k}" for k in range(len(problem.outputs)))
        parameters = ["lines", "D", "xd", "yd", "K", *names, *x_names, *y_names]
        source = (
            prelude(x.dtype, y.dtype)
            + types(x=x, y=y)
            + f"#define INDEX {name}\n#define ACC {acc}\n__kernel void scan(__global const T_x *restrict x, {outputs}, "
            + ", ".join(f"const INDEX {v}" for v in parameters)
            + f") {{\n  const INDEX o = get_global_id(0);\n  if (o >= lines) return;\n  {code}\n  {body}\n}}\n"
        )
        count = x.size // max(x.shape[axis], 1) if y.size else 0
        sx, sy = steps(x), steps(y)
        rest = [x.shape[k] for k in others]
        k = extra[0] if extra else 0
        values = [count, x.shape[axis], sx[axis], sy[axis], k, *rest[1:], *([sx[j] for j in others] or [0]), *([sy[j] for j in others] or [0])]
        run = launcher(device, source, "scan", size=(count,), group=(64,), scalars=[kind(v) for v in values], buffers=1 + len(problem.outputs))
        return lambda inputs, outs: run(inputs[0], *outs)


@kernel
class Cumsum(_Lines):
    id, op = "opencl.cumsum.line", "cumsum"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        acc = ("double" if x.dtype.name == "float64" else "float") if x.dtype.is_floating else "long"
        body = "ACC acc = 0; for (INDEX d = 0; d < D; ++d) { acc += LOAD_x(x, r_x + d * xd); STORE_y(y0, r_y + d * yd, acc); }"
        return self.lines(problem, device, problem.attrs, body, acc)


@kernel
class Topk(_Lines):
    """Selection: each next one is the best of those after the last in (value, place). Order K * D; NaN counts as the largest."""

    id, op = "opencl.topk.line", "topk"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, x = problem.attrs, problem.inputs[0]
        assert x is not None
        acc = ("double" if x.dtype.name == "float64" else "float") if x.dtype.is_floating else "long"
        # BEFORE(a, i, b, j): does (a at i) come before (b at j)?
        higher = "((a) != (a) ? (b) == (b) : (b) == (b) && (a) > (b))"
        lower = "((b) != (b) ? (a) == (a) : (a) == (a) && (a) < (b))"
        body = f"""
#define AHEAD(a, b) {higher if a.largest else lower}
#define BEFORE(a, i, b, j) (AHEAD(a, b) || (!AHEAD(b, a) && (i) < (j)))
  ACC last = 0;
  INDEX at = -1;
  for (INDEX k = 0; k < K; ++k) {{
    ACC best = 0;
    INDEX place = -1;
    for (INDEX d = 0; d < D; ++d) {{
      const ACC v = LOAD_x(x, r_x + d * xd);
      if (at >= 0 && !BEFORE(last, at, v, d)) continue;
      if (place < 0 || BEFORE(v, d, best, place)) {{ best = v; place = d; }}
    }}
    STORE_y(y0, r_y + k * yd, best);
    y1[r_y + k * yd] = place;
    last = best;
    at = place;
  }}
"""
        return self.lines(problem, device, a.axis, body, acc, (a.k,))
