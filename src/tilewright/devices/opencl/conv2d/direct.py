"""Convolution as it is defined: one work-item for each element of the result (a group for each of the weight's gradient).

It takes every problem, in any layout; sizes and strides are arguments, so that one program serves all shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._expr import activation_source
from tilewright.devices.opencl._group import TREE, groups
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

# y: what is written; g: the output's gradient. C and F count the channels of one group, FF = F * groups.
_SIZES = ("N", "C", "H", "W", "F", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW", "G")

_FORWARD = """
__kernel void forward(__global const T_x *restrict x, __global const T_w *restrict w, __global const T_x *restrict bias,
    __global const T_x *restrict residual, __global T_x *restrict y, const int has_bias, const int has_residual, ARGS) {
  INDEX i = get_global_id(0);
  if (i >= N * F * G * OH * OW) return;
  const INDEX at = i;
  const INDEX f = i % (F * G); i /= F * G;
  const INDEX ow = i % OW; i /= OW;
  const INDEX oh = i % OH;
  const INDEX n = i / OH, c0 = f / F * C;
  REAL acc = 0;
  for (int r = 0; r < KH; ++r) {
    const INDEX h = oh * SH - PH + r * DH;
    if (h < 0 || h >= H) continue;
    for (int s = 0; s < KW; ++s) {
      const INDEX v = ow * SW - PW + s * DW;
      if (v < 0 || v >= W) continue;
      const INDEX xo = n * x0 + c0 * x1 + h * x2 + v * x3, wo = f * w0 + r * w2 + s * w3;
      for (INDEX c = 0; c < C; ++c) acc += (REAL)LOAD_x(x, xo + c * x1) * (REAL)LOAD_w(w, wo + c * w1);
    }
  }
  if (has_bias) acc += LOAD_x(bias, f);
  if (has_residual) acc += LOAD_x(residual, n * y0 + f * y1 + oh * y2 + ow * y3);
  STORE_x(y, at, tw_activation(acc));
}
"""
_INPUT = """
__kernel void input_grad(__global const T_x *restrict g, __global const T_w *restrict w, __global T_x *restrict y, ARGS) {
  INDEX i = get_global_id(0);
  if (i >= N * C * G * H * W) return;
  INDEX c, h, v, n;
  if (y1 == 1) { c = i % (C * G); i /= C * G; v = i % W; i /= W; h = i % H; n = i / H; }
  else { v = i % W; i /= W; h = i % H; i /= H; c = i % (C * G); n = i / (C * G); }
  const INDEX f0 = c / C * F, cg = c % C;
  REAL acc = 0;
  for (int r = 0; r < KH; ++r) {
    const INDEX a = h + PH - r * DH, oh = a / SH;
    if (a < 0 || oh * SH != a || oh >= OH) continue;
    for (int s = 0; s < KW; ++s) {
      const INDEX b = v + PW - s * DW, ow = b / SW;
      if (b < 0 || ow * SW != b || ow >= OW) continue;
      const INDEX go = n * x0 + f0 * x1 + oh * x2 + ow * x3, wo = f0 * w0 + cg * w1 + r * w2 + s * w3;
      for (INDEX f = 0; f < F; ++f) acc += (REAL)LOAD_x(g, go + f * x1) * (REAL)LOAD_w(w, wo + f * w0);
    }
  }
  STORE_x(y, n * y0 + c * y1 + h * y2 + v * y3, acc);
}
"""
_WEIGHT = """
__kernel void weight_grad(__global const T_x *restrict x, __global const T_w *restrict g, __global T_x *restrict y, ARGS) {
#if L > 1
  const INDEX o = get_group_id(0);
  const int lid = get_local_id(0);
#else
  const INDEX o = get_global_id(0);
  const int lid = 0;
  if (o >= F * G * C * KH * KW) return;
#endif
  SHARED_OF(REAL, share)
  INDEX i = o;
  const INDEX c = i % C; i /= C;
  const INDEX s = i % KW; i /= KW;
  const INDEX r = i % KH;
  const INDEX f = i / KH, c0 = f / F * C + c;
  REAL acc = 0;
  const INDEX area = OH * OW;
  for (INDEX p = lid; p < N * area; p += L) {
    const INDEX n = p / area, q = p % area, oh = q / OW, ow = q % OW;
    const INDEX h = oh * SH - PH + r * DH, v = ow * SW - PW + s * DW;
    if (h >= 0 && h < H && v >= 0 && v < W)
      acc += (REAL)LOAD_x(x, n * x0 + c0 * x1 + h * x2 + v * x3) * (REAL)LOAD_w(g, n * w0 + f * w1 + oh * w2 + ow * w3);
  }
  TREE(acc, share, ADD)
  if (lid == 0) STORE_x(y, f * y0 + c * y1 + r * y2 + s * y3, acc);
}
"""
_BIAS = """
__kernel void bias_grad(__global const T_w *restrict g, __global T_x *restrict y, ARGS) {
#if L > 1
  const INDEX f = get_group_id(0);
  const int lid = get_local_id(0);
#else
  const INDEX f = get_global_id(0);
  const int lid = 0;
  if (f >= F * G) return;
#endif
  SHARED_OF(REAL, share)
  REAL acc = 0;
  const INDEX area = OH * OW;
  for (INDEX p = lid; p < N * area; p += L) {
    const INDEX n = p / area, q = p % area;
    acc += LOAD_w(g, n * w0 + f * w1 + q / OW * w2 + q % OW * w3);
  }
  TREE(acc, share, ADD)
  if (lid == 0) STORE_x(y, f, acc);
}
"""


def steps(s: Spec) -> list[int]:
    return [b // s.dtype.itemsize for b in s.strides]


def sizes(conv: Any, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]) -> list[int]:
    """As `_SIZES`, from the shapes of input, weight and output."""
    top, left, _, _ = conv.padding
    return [
        x[0], x[1] // conv.groups, x[2], x[3], w[0] // conv.groups, y[2], y[3], w[2], w[3], *conv.stride, top, left, *conv.dilation, conv.groups,
    ]  # fmt: skip


def launch_of(
    device: Any,
    problem: Problem,
    body: str,
    entry: str,
    geometry: list[int],
    x: Spec,
    w: Spec,
    y: list[int],
    *,
    size: int,
    buffers: int,
    flags: tuple[int, ...] = (),
    activation: str = "",
    group: int = 1,
) -> Any:
    index = index_type(problem)
    kind: Any = np.int32 if index == "int" else np.int64
    double = x.dtype.name == "float64"
    names = [*_SIZES, *[f"{o}{k}" for o in "xwy" for k in range(4)]]
    head = activation or f"#define REAL {'double' if double else 'float'}\n"
    source = prelude(x.dtype, w.dtype) + types(x=x, w=w) + f"#define INDEX {index}\n#define ARGS {', '.join(f'const INDEX {n}' for n in names)}\n"
    source += head + TREE + body
    define: dict[str, Any] = {"L": group}
    if not double:
        define["-cl-single-precision-constant"] = None
    scalars = [np.int32(f) for f in flags] + [kind(v) for v in [*geometry, *steps(x), *steps(w), *y]]
    local = (group,) if group > 1 else (64,)
    return launcher(device, source, entry, size=(size * group,), group=local, define=define, scalars=scalars, buffers=buffers)


class Direct(ClKernel):
    rank = 100


@kernel
class Forward(Direct):
    id, op = "opencl.conv2d.direct", "conv2d"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, (x, w, bias, residual), y = problem.attrs, problem.inputs, problem.outputs[0]
        assert x is not None
        assert w is not None
        act = activation_source(a.activation, a.alpha, a.beta, x.dtype.name == "float64")
        where = steps(residual) if residual is not None else steps(y)
        flags = (int(bias is not None), int(residual is not None))
        run = launch_of(
            device, problem, _FORWARD, "forward", sizes(a, x.shape, w.shape, y.shape), x, w, where,
            size=y.size, buffers=5, flags=flags, activation=act,
        )  # fmt: skip
        return lambda inputs, outputs: run(*inputs, outputs[0])


@kernel
class InputGrad(Direct):
    id, op = "opencl.conv2d_input_grad.direct", "conv2d_input_grad"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, (g, w), y = problem.attrs, problem.inputs, problem.outputs[0]
        assert g is not None
        assert w is not None
        geometry = sizes(a.conv, y.shape, w.shape, g.shape)
        run = launch_of(device, problem, _INPUT, "input_grad", geometry, g, w, steps(y), size=y.size, buffers=3)
        return lambda inputs, outputs: run(inputs[0], inputs[1], outputs[0])


@kernel
class WeightGrad(Direct):
    id, op = "opencl.conv2d_weight_grad.direct", "conv2d_weight_grad"

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return groups(device)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        a, (x, g), y = problem.attrs, problem.inputs, problem.outputs[0]
        assert x is not None
        assert g is not None
        geometry = sizes(a.conv, x.shape, y.shape, g.shape)
        group = dict(config)["group"]
        run = launch_of(device, problem, _WEIGHT, "weight_grad", geometry, x, g, steps(y), size=y.size, buffers=3, group=group)
        if not a.bias:
            return lambda inputs, outputs: run(inputs[0], inputs[1], outputs[0])
        add = launch_of(device, problem, _BIAS, "bias_grad", geometry, x, g, steps(y), size=y.shape[0], buffers=2, group=group)

        def both(inputs: Any, outputs: Any) -> None:
            run(inputs[0], inputs[1], outputs[0])
            add(inputs[1], outputs[1])

        return both
