"""Pooling: one work-item for each element of the result; gradients gather from the windows that hold an element."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

_SIZES = ("N", "C", "H", "W", "OH", "OW", "KH", "KW", "SH", "SW", "PT", "PL", "PB", "PR", "DH", "DW", "INCLUDE", "DIVISOR", "LAST_IN", "LAST_OUT")

# Where element i of a tensor of this height and width lies, channels last or not.
_HEAD = """
#define SPLIT(height, width, last) \\
  INDEX n, c, h, w; \\
  { INDEX i_ = i; if (last) { c = i_ % C; i_ /= C; w = i_ % width; i_ /= width; h = i_ % height; n = i_ / height; } \\
    else { w = i_ % width; i_ /= width; h = i_ % height; i_ /= height; c = i_ % C; n = i_ / C; } }
#define AT(height, width, last, n, c, h, w) \\
  ((last) ? (((n) * (height) + (h)) * (width) + (w)) * C + (c) : (((n) * C + (c)) * (height) + (h)) * (width) + (w))
static INDEX tw_count(const INDEX o, const INDEX k, const INDEX stride, const INDEX before, const INDEX after, const INDEX dilation,
    const INDEX size, const int include) {
  const INDEX low = include ? -before : 0, high = include ? size + after : size;
  INDEX count = 0;
  for (INDEX t = 0; t < k; ++t) { const INDEX p = o * stride - before + t * dilation; count += p >= low && p < high; }
  return count;
}
#define PARTS(oh, ow) (DIVISOR ? DIVISOR : max(tw_count(oh, KH, SH, PT, PB, DH, H, INCLUDE) * tw_count(ow, KW, SW, PL, PR, DW, W, INCLUDE), (INDEX)1))
"""
_MAX = """
__kernel void max_pool(__global const T_x *restrict x, __global T_x *restrict y, __global T_t *restrict tap, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= N * C * OH * OW) return;
  SPLIT(OH, OW, LAST_OUT)
  C_x best = LOWEST;
  int at = 0, first = 1;
  for (int r = 0; r < KH; ++r) for (int s = 0; s < KW; ++s) {
    const INDEX a = h * SH - PT + r * DH, b = w * SW - PL + s * DW;
    if (a < 0 || a >= H || b < 0 || b >= W) continue;
    const C_x v = LOAD_x(x, AT(H, W, LAST_IN, n, c, a, b));
    if (first || v > best || (v != v && best == best)) { best = v; at = r * KW + s; first = 0; }
  }
  STORE_x(y, i, best);
  tap[i] = (T_t)at;
}
"""
_MAX_GRAD = """
__kernel void max_grad(__global const T_x *restrict g, __global const T_t *restrict tap, __global T_x *restrict y, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= N * C * H * W) return;
  SPLIT(H, W, LAST_OUT)
  REAL acc = 0;
  for (int r = 0; r < KH; ++r) {
    const INDEX a = h + PT - r * DH, oh = a / SH;
    if (a < 0 || oh * SH != a || oh >= OH) continue;
    for (int s = 0; s < KW; ++s) {
      const INDEX b = w + PL - s * DW, ow = b / SW;
      if (b < 0 || ow * SW != b || ow >= OW) continue;
      const INDEX o = AT(OH, OW, LAST_IN, n, c, oh, ow);
      if (tap[AT(OH, OW, LAST_TAP, n, c, oh, ow)] == r * KW + s) acc += LOAD_x(g, o);
    }
  }
  STORE_x(y, i, acc);
}
"""
_PICK = """
__kernel void pick(__global const T_x *restrict v, __global const T_t *restrict tap, __global T_x *restrict y, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= N * C * OH * OW) return;
  SPLIT(OH, OW, LAST_OUT)
  const INDEX k = tap[AT(OH, OW, LAST_TAP, n, c, h, w)], a = h * SH - PT + k / KW * DH, b = w * SW - PL + k % KW * DW;
  C_x r = 0;
  if (a >= 0 && a < H && b >= 0 && b < W) r = LOAD_x(v, AT(H, W, LAST_IN, n, c, a, b));
  STORE_x(y, i, r);
}
"""
_AVG = """
__kernel void avg_pool(__global const T_x *restrict x, __global T_x *restrict y, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= N * C * OH * OW) return;
  SPLIT(OH, OW, LAST_OUT)
  REAL acc = 0;
  for (int r = 0; r < KH; ++r) for (int s = 0; s < KW; ++s) {
    const INDEX a = h * SH - PT + r * DH, b = w * SW - PL + s * DW;
    if (a >= 0 && a < H && b >= 0 && b < W) acc += LOAD_x(x, AT(H, W, LAST_IN, n, c, a, b));
  }
  STORE_x(y, i, acc / (REAL)PARTS(h, w));
}
"""
_AVG_GRAD = """
__kernel void avg_grad(__global const T_x *restrict g, __global T_x *restrict y, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= N * C * H * W) return;
  SPLIT(H, W, LAST_OUT)
  REAL acc = 0;
  for (int r = 0; r < KH; ++r) {
    const INDEX a = h + PT - r * DH, oh = a / SH;
    if (a < 0 || oh * SH != a || oh >= OH) continue;
    for (int s = 0; s < KW; ++s) {
      const INDEX b = w + PL - s * DW, ow = b / SW;
      if (b < 0 || ow * SW != b || ow >= OW) continue;
      acc += (REAL)LOAD_x(g, AT(OH, OW, LAST_IN, n, c, oh, ow)) / (REAL)PARTS(oh, ow);
    }
  }
  STORE_x(y, i, acc);
}
"""


def _last(s: Spec) -> int:
    return int(s.layout == "channels_last")


class Pool(ClKernel):
    """`backward`: the result has the size of the pooling's input."""

    rank = 10

    def __init__(self, op: str, body: str, entry: str, backward: bool) -> None:
        self.op, self.id, self.body, self.entry, self.backward = op, f"opencl.{op}.item", body, entry, backward

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, y = problem.inputs[0], problem.outputs[0]
        assert x is not None
        a = problem.attrs.pool if self.backward else problem.attrs
        small, large = (x, y) if self.backward else (y, x)
        n, c, h, w = large.shape
        geometry = [
            n,
            c,
            h,
            w,
            *small.shape[2:],
            *a.kernel,
            *a.stride,
            *a.padding,
            *a.dilation,
            int(a.count_include_pad),
            a.divisor,
            _last(x),
            _last(y),
        ]
        tap = next((s for s in (*problem.inputs[1:], *problem.outputs[1:]) if s is not None), None)
        index = index_type(problem)
        kind: Any = np.int32 if index == "int" else np.int64
        double = x.dtype.name == "float64"
        lowest = "-INFINITY" if x.dtype.is_floating else f"({int(x.dtype.min) + 1} - 1)"
        source = (
            prelude(x.dtype)
            + types(x=x, t=tap)
            + f"#define INDEX {index}\n#define REAL {'double' if double else 'float'}\n#define LOWEST {lowest}\n"
            + f"#define LAST_TAP {0 if tap is None else _last(tap)}\n#define ARGS {', '.join(f'const INDEX {name}' for name in _SIZES)}\n"
            + _HEAD
            + self.body
        )
        count = sum(s is not None for s in problem.inputs) + len(problem.outputs)
        define = {} if double else {"-cl-single-precision-constant": None}
        scalars = [kind(v) for v in geometry]
        run = launcher(device, source, self.entry, size=(y.size,), group=(64,), define=define, scalars=scalars, buffers=count)
        return lambda inputs, outputs: run(*inputs, *outputs)


register(Pool("max_pool2d", _MAX, "max_pool", False))
register(Pool("max_pool2d_grad", _MAX_GRAD, "max_grad", True))
register(Pool("max_pool2d_pick", _PICK, "pick", False))
register(Pool("avg_pool2d", _AVG, "avg_pool", False))
register(Pool("avg_pool2d_grad", _AVG_GRAD, "avg_grad", True))
