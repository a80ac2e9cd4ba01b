"""Batch norm and its gradient, running averages, and rows of mean 0 and variance 1.

Statistics take two passes, the second about the mean, and correct it for its own rounding (Chan, Golub and LeVeque, The American
Statistician 37(3), 1983). A work-group reduces one channel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import TREE, groups
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

# Element r of channel c: image r / S, place r % S, at n * sn + s * ss + c * sc. R = N * S of them.
_ARGS = "const INDEX N, const INDEX C, const INDEX S, const INDEX sn, const INDEX sc, const INDEX ss, const REAL eps"
_HEAD = """
#define AT(r, c) ((r) / S * sn + (r) % S * ss + (c) * sc)
#if L > 1
#define GROUP const INDEX c = get_group_id(0); const int lid = get_local_id(0);
#else
#define GROUP const INDEX c = get_global_id(0); const int lid = 0; if (c >= C) return;
#endif
#define BIT(mask, i) (((mask)[(i) >> 3] >> ((i) & 7)) & 1)
"""
_STATS = """
__kernel void stats(__global const T_x *restrict x, __global REAL *restrict mean, __global REAL *restrict var, ARGS) {
  GROUP
  SHARED_OF(REAL, share)
  const INDEX R = N * S;
  REAL acc = 0, rest = 0;
  for (INDEX r = lid; r < R; r += L) acc += LOAD_x(x, AT(r, c));
  TREE(acc, share, ADD)
  REAL m = R ? acc / (REAL)R : 0;
  acc = 0;
  for (INDEX r = lid; r < R; r += L) { const REAL d = (REAL)LOAD_x(x, AT(r, c)) - m; acc += d * d; rest += d; }
  TREE(acc, share, ADD)
  TREE(rest, share, ADD)
  if (lid == 0) {
    mean[c] = R ? (isfinite(rest) ? m + rest / (REAL)R : m) : 0;  // an infinite mean stays infinite
    var[c] = R ? (acc - rest * rest / (REAL)R < 0 ? 0 : acc - rest * rest / (REAL)R) : 0;
    if (R) var[c] /= (REAL)R;
  }
}
"""
_APPLY = """
__kernel void apply(__global const T_x *restrict x, __global const REAL *restrict mean, __global const REAL *restrict var,
    __global const T_x *restrict weight, __global const T_x *restrict bias, __global T_x *restrict y, __global uchar *restrict mask,
    const int flags, const INDEX total, ARGS) {
  const INDEX first = (INDEX)get_global_id(0) * 8;
  if (first >= total) return;
  uint bits = 0;
  for (int k = 0; k < 8 && first + k < total; ++k) {
    const INDEX i = first + k, c = i / CSTEP % C;
    const REAL m = mean[c], v = var[c];
    REAL t = ((REAL)LOAD_x(x, i) - m) / sqrt(v + eps);
    if (flags & 1) t *= LOAD_x(weight, c);
    if (flags & 2) t += LOAD_x(bias, c);
#if ACTIVATION
#if ACTIVATION == 6
    bits |= (uint)(t > 0 && t < 6) << k;
    t = t < 0 ? 0 : (t > 6 ? 6 : t);
#else
    bits |= (uint)(t > 0) << k;
    t = t <= 0 ? 0 : t;
#endif
#endif
    STORE_x(y, i, t);
  }
  if (flags & 4) mask[first >> 3] = (uchar)bits;
}
"""
_SUMS = """
__kernel void sums(__global const T_x *restrict g, __global const T_x *restrict x, __global const REAL *restrict mean,
    __global const REAL *restrict var, __global const uchar *restrict mask, __global T_x *restrict dw, __global T_x *restrict db,
    __global REAL *restrict sw, __global REAL *restrict sb, const int flags, ARGS) {
  GROUP
  SHARED_OF(REAL, share)
  const INDEX R = N * S;
  const REAL m = mean[c], scale = 1 / sqrt(var[c] + eps);
  REAL a = 0, b = 0;
  for (INDEX r = lid; r < R; r += L) {
    const INDEX i = AT(r, c);
    REAL v = LOAD_x(g, i);
    if ((flags & 4) && !BIT(mask, i)) v = 0;
    b += v;
    a += v * (((REAL)LOAD_x(x, i) - m) * scale);
  }
  TREE(a, share, ADD)
  TREE(b, share, ADD)
  if (lid == 0) { STORE_x(dw, c, a); STORE_x(db, c, b); sw[c] = a; sb[c] = b; }
}
"""
_BACK = """
__kernel void back(__global const T_x *restrict g, __global const T_x *restrict x, __global const REAL *restrict mean,
    __global const REAL *restrict var, __global const T_x *restrict weight, __global const uchar *restrict mask,
    __global const REAL *restrict sw, __global const REAL *restrict sb, __global T_x *restrict dx, const int flags, const INDEX total, ARGS) {
  const INDEX i = get_global_id(0);
  if (i >= total) return;
  const INDEX c = i / CSTEP % C;
  const REAL scale = 1 / sqrt(var[c] + eps), count = (REAL)(N * S);
  REAL v = LOAD_x(g, i);
  if ((flags & 4) && !BIT(mask, i)) v = 0;
  REAL d = (v - sb[c] / count - ((REAL)LOAD_x(x, i) - mean[c]) * scale * sw[c] / count) * scale;
  if (flags & 1) d *= LOAD_x(weight, c);
  STORE_x(dx, i, d);
}
"""
_ROWS = """
__kernel void rows(__global const T_x *restrict x, __global T_x *restrict y, __global REAL *restrict rstd, ARGS) {
  GROUP
  SHARED_OF(REAL, share)
  REAL acc = 0, rest = 0;
  for (INDEX r = lid; r < S; r += L) acc += LOAD_x(x, c * S + r);
  TREE(acc, share, ADD)
  const REAL m = acc / (REAL)S;
  acc = 0;
  for (INDEX r = lid; r < S; r += L) { const REAL d = (REAL)LOAD_x(x, c * S + r) - m; acc += d * d; rest += d; }
  TREE(acc, share, ADD)
  TREE(rest, share, ADD)
  const REAL off = rest / (REAL)S, v = (acc - rest * off) / (REAL)S, scale = 1 / sqrt((v < 0 ? 0 : v) + eps);
  for (INDEX r = lid; r < S; r += L) STORE_x(y, c * S + r, ((REAL)LOAD_x(x, c * S + r) - m - off) * scale);
  if (lid == 0) rstd[c] = scale;
}
"""


class _Norm(ClKernel):
    """What its kernels share: the geometry of (N, C, ...) in either layout."""

    rank = 10

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return groups(device)

    def make(self, problem: Problem, config: Config, device: Any, x: Spec, eps: float, activation: str | None = None) -> Any:
        """(launch of an entry of a body, real type of statistics)."""
        n, c = x.shape[:2]
        s = math.prod(x.shape[2:])
        last = x.layout == "channels_last"
        steps = (s * c, 1, c) if last else (s * c, s, 1)
        double = x.dtype.name == "float64"
        index = index_type(problem)
        kind: Any = np.int32 if index == "int" else np.int64
        number: Any = np.float64 if double else np.float32
        head = prelude(x.dtype) + types(x=x) + f"#define INDEX {index}\n#define REAL {'double' if double else 'float'}\n#define ARGS {_ARGS}\n"
        define: dict[str, Any] = {"ACTIVATION": {None: 0, "relu": 1, "relu6": 6}[activation]}
        if not double:
            define["-cl-single-precision-constant"] = None
        geometry = [kind(v) for v in (n, c, s, *steps)] + [number(eps)]
        group = dict(config).get("group", 1)

        def entry(body: str, name: str, buffers: int, scalars: list[Any], *, over: int | None = None, channels: int = c) -> Any:
            step = 1 if last else s
            source = head + f"#define CSTEP ((INDEX){max(step, 1)})\n" + TREE + _HEAD + body
            size, local, shared = ((over,), (64,), 1) if over is not None else ((channels * group,), (group if group > 1 else 64,), group)
            extra = {**define, "L": shared}
            return launcher(device, source, name, size=size, group=local, define=extra, scalars=scalars + geometry, buffers=buffers)

        return entry, kind, 8 if double else 4


@kernel
class BatchNormTrain(_Norm):
    id, op = "opencl.batch_norm_train.group", "batch_norm_train"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, w, b = problem.inputs
        assert x is not None
        a = problem.attrs
        entry, kind, _ = self.make(problem, config, device, x, a.eps, a.activation)
        stats = entry(_STATS, "stats", 3, [])
        flags = (w is not None) | (b is not None) << 1 | (a.activation is not None) << 2
        apply = entry(_APPLY, "apply", 7, [np.int32(flags), kind(x.size)], over=-(-x.size // 8))

        def run(inputs: Any, outputs: Any) -> None:
            y, mean, var = outputs[:3]
            stats(inputs[0], mean, var)
            apply(inputs[0], mean, var, inputs[1], inputs[2], y, outputs[3] if len(outputs) > 3 else None)

        return run


@kernel
class BatchNormGrad(_Norm):
    id, op = "opencl.batch_norm_grad.group", "batch_norm_grad"

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        mean = problem.inputs[2]
        return ["it takes statistics in float32 or float64"] if mean is not None and mean.dtype.itemsize < 4 else []

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        _, x, _, _, w, mask = problem.inputs
        assert x is not None
        entry, kind, item = self.make(problem, config, device, x, problem.attrs.eps)
        flags = np.int32((w is not None) | (mask is not None) << 2)
        sums = entry(_SUMS, "sums", 9, [flags])
        back = entry(_BACK, "back", 9, [flags, kind(x.size)], over=x.size)
        room = x.shape[1] * item

        def run(inputs: Any, outputs: Any) -> None:
            g, x, mean, var, w, mask = inputs
            dx, dw, db = outputs
            sw, sb = device.allocate(room), device.allocate(room)
            sums(g, x, mean, var, mask, dw, db, sw, sb)
            back(g, x, mean, var, w, mask, sw, sb, dx)

        return run

    def workspace(self, problem: Problem, config: Config) -> int:
        return 16 * problem.outputs[1].size


@kernel
class BatchNormInfer(_Norm):
    id, op = "opencl.batch_norm_infer.item", "batch_norm_infer"

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return ((),)

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        mean = problem.inputs[1]
        return ["it takes statistics in float32 or float64"] if mean is not None and mean.dtype.itemsize < 4 else []

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, _, _, w, b = problem.inputs
        assert x is not None
        a = problem.attrs
        entry, kind, _ = self.make(problem, config, device, x, a.eps, a.activation)
        flags = np.int32((w is not None) | (b is not None) << 1)
        apply = entry(_APPLY, "apply", 7, [flags, kind(x.size)], over=-(-x.size // 8))
        return lambda inputs, outputs: apply(*inputs, outputs[0], None)


@kernel
class Standardize(_Norm):
    id, op = "opencl.standardize.group", "standardize"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        # A row is a channel of one image, so that the geometry's S is its length.
        entry, _, _ = self.make(problem, config, device, x.like(shape=(1, x.shape[0], x.shape[1]), layout="contiguous"), problem.attrs)
        rows = entry(_ROWS, "rows", 3, [])
        return lambda inputs, outputs: rows(inputs[0], outputs[0], outputs[1])
