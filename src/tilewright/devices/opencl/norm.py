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

        def entry(body: str, name: str, buffers: int, scalars: list[Any], *, over: int | None = None, grid: Any = None) -> Any:
            step = 1 if last else s
            source = head + f"#define CSTEP ((INDEX){max(step, 1)})\n" + TREE + _HEAD + body
            size, local, shared = ((over,), (64,), 1) if over is not None else ((c * group,), (group if group > 1 else 64,), group)
            if grid is not None:
                size, local = grid
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


# Channels last, where a group of neighbouring channels is read together: LC work-items over channels, LP over the pixels of a strip of P.
_STRIPS = """
#define PLACE const int lid = get_local_id(0), lc = lid % LC, lp = lid / LC; const INDEX c = get_group_id(0) * LC + lc, strip = get_group_id(1); \\
  const INDEX start = strip * P, stop = min(start + P, N * S);
#define ACROSS(v, share) { barrier(CLK_LOCAL_MEM_FENCE); share[lid] = v; barrier(CLK_LOCAL_MEM_FENCE); \\
  for (int half_ = LP / 2; half_ > 0; half_ >>= 1) { if (lp < half_) share[lid] += share[lid + half_ * LC]; barrier(CLK_LOCAL_MEM_FENCE); } \\
  v = share[lc]; }
__kernel __attribute__((reqd_work_group_size(LC * LP, 1, 1)))
void strip_stats(__global const T_x *restrict x, __global REAL *restrict means, __global REAL *restrict squares, ARGS) {
  __local REAL share[LC * LP];
  PLACE
  REAL a = 0, b = 0, shift = 0;
  if (c < C) {
    shift = LOAD_x(x, start * C + c);
    shift = isfinite(shift) ? shift : 0;
    for (INDEX r = start + lp; r < stop; r += LP) { const REAL d = (REAL)LOAD_x(x, r * C + c) - shift; a += d; b += d * d; }
  }
  ACROSS(a, share)
  ACROSS(b, share)
  if (lp == 0 && c < C) {
    const REAL count = (REAL)(stop - start), m2 = b - a * a / count;
    means[strip * C + c] = shift + a / count;
    squares[strip * C + c] = m2 < 0 ? 0 : m2;
  }
}
__kernel void join_stats(__global const REAL *restrict means, __global const REAL *restrict squares, __global REAL *restrict mean,
    __global REAL *restrict var, ARGS) {
  GROUP
  SHARED_OF(REAL, share)
  const INDEX R = N * S;
  const REAL first = means[c], base = isfinite(first) ? first : 0;
  REAL a = 0, b = 0;
  for (INDEX k = lid; k < STRIPS; k += L) a += (REAL)(min((k + 1) * P, R) - k * P) * (means[k * C + c] - base);
  TREE(a, share, ADD)
  const REAL off = a / (REAL)R;
  for (INDEX k = lid; k < STRIPS; k += L) {
    const REAL d = means[k * C + c] - base - off;
    b += squares[k * C + c] + (REAL)(min((k + 1) * P, R) - k * P) * d * d;
  }
  TREE(b, share, ADD)
  if (lid == 0) { mean[c] = base + off; var[c] = b / (REAL)R; }
}
__kernel __attribute__((reqd_work_group_size(LC * LP, 1, 1)))
void strip_sums(__global const T_x *restrict g, __global const T_x *restrict x, __global const REAL *restrict mean,
    __global const REAL *restrict var, __global const uchar *restrict mask, __global REAL *restrict pw, __global REAL *restrict pb,
    const int flags, ARGS) {
  __local REAL share[LC * LP];
  PLACE
  REAL a = 0, b = 0;
  if (c < C) {
    const REAL m = mean[c], scale = 1 / sqrt(var[c] + eps);
    for (INDEX r = start + lp; r < stop; r += LP) {
      const INDEX i = r * C + c;
      REAL v = LOAD_x(g, i);
      if ((flags & 4) && !BIT(mask, i)) v = 0;
      b += v;
      a += v * (((REAL)LOAD_x(x, i) - m) * scale);
    }
  }
  ACROSS(a, share)
  ACROSS(b, share)
  if (lp == 0 && c < C) { pw[strip * C + c] = a; pb[strip * C + c] = b; }
}
__kernel void join_sums(__global const REAL *restrict pw, __global const REAL *restrict pb, __global T_x *restrict dw, __global T_x *restrict db,
    __global REAL *restrict sw, __global REAL *restrict sb, ARGS) {
  GROUP
  SHARED_OF(REAL, share)
  REAL a = 0, b = 0;
  for (INDEX k = lid; k < STRIPS; k += L) { a += pw[k * C + c]; b += pb[k * C + c]; }
  TREE(a, share, ADD)
  TREE(b, share, ADD)
  if (lid == 0) { STORE_x(dw, c, a); STORE_x(db, c, b); sw[c] = a; sb[c] = b; }
}
"""


class _Strips(_Norm):
    rank = 5

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return ((),)

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        x = problem.inputs[1 if self.op == "batch_norm_grad" else 0]
        assert x is not None
        if x.layout != "channels_last" and x.ndim > 2:
            return ["it is for channels last, where neighbouring channels are read together"]
        return ["there is nothing to reduce"] if x.size == 0 else []

    def _cut(self, x: Spec, device: Any) -> dict[str, int]:
        channels, pixels = x.shape[1], x.size // x.shape[1]
        over_c = 32 if device.is_gpu else 8
        over_p = 8 if device.is_gpu else 2
        blocks = -(-channels // over_c)
        strips = max(1, min(-(-8 * device.units // blocks), -(-pixels // (4 * over_p))))
        strip = -(-pixels // strips)
        return {"LC": over_c, "LP": over_p, "P": strip, "STRIPS": -(-pixels // strip)}

    def workspace(self, problem: Problem, config: Config) -> int:
        return 1 << 20

    def parts(self, problem: Problem, device: Any, x: Spec, eps: float, activation: str | None = None) -> Any:
        cut = self._cut(x, device)
        shared = 64 if device.is_gpu else 1
        entry, kind, item = self.make(problem, (("group", shared),), device, x, eps, activation)
        head = "".join(f"#define {name} ((INDEX){v})\n" if name in ("P", "STRIPS") else f"#define {name} {v}\n" for name, v in cut.items())
        blocks, group = -(-x.shape[1] // cut["LC"]), cut["LC"] * cut["LP"]
        room = cut["STRIPS"] * x.shape[1] * item

        def strips(name: str, buffers: int, scalars: list[Any]) -> Any:
            return entry(head + _STRIPS, name, buffers, scalars, grid=((blocks * group, cut["STRIPS"]), (group, 1)))

        def join(name: str, buffers: int) -> Any:
            return entry(head + _STRIPS, name, buffers, [])

        return strips, join, entry, kind, room, x.shape[1] * item


@kernel
class BatchNormTrainStrips(_Strips):
    """Reads x twice and writes it once: the statistics in one pass over strips, merged as Chan et al. do, then the result."""

    id, op = "opencl.batch_norm_train.strips", "batch_norm_train"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, w, b = problem.inputs
        assert x is not None
        a = problem.attrs
        strips, join, entry, kind, room, _ = self.parts(problem, device, x, a.eps, a.activation)
        part, merge = strips("strip_stats", 3, []), join("join_stats", 4)
        flags = (w is not None) | (b is not None) << 1 | (a.activation is not None) << 2
        apply = entry(_APPLY, "apply", 7, [np.int32(flags), kind(x.size)], over=-(-x.size // 8))

        def run(inputs: Any, outputs: Any) -> None:
            y, mean, var = outputs[:3]
            means, squares = device.allocate(room), device.allocate(room)
            part(inputs[0], means, squares)
            merge(means, squares, mean, var)
            apply(inputs[0], mean, var, inputs[1], inputs[2], y, outputs[3] if len(outputs) > 3 else None)

        return run


@kernel
class BatchNormGradStrips(_Strips):
    id, op = "opencl.batch_norm_grad.strips", "batch_norm_grad"

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        mean = problem.inputs[2]
        if mean is not None and mean.dtype.itemsize < 4:
            return ["it takes statistics in float32 or float64"]
        return super().refuse(problem, device)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        _, x, _, _, w, mask = problem.inputs
        assert x is not None
        strips, join, entry, kind, room, vector = self.parts(problem, device, x, problem.attrs.eps)
        flags = np.int32((w is not None) | (mask is not None) << 2)
        part, merge = strips("strip_sums", 7, [flags]), join("join_sums", 6)
        back = entry(_BACK, "back", 9, [flags, kind(x.size)], over=x.size)

        def run(inputs: Any, outputs: Any) -> None:
            g, x, mean, var, w, mask = inputs
            dx, dw, db = outputs
            pw, pb, sw, sb = device.allocate(room), device.allocate(room), device.allocate(vector), device.allocate(vector)
            part(g, x, mean, var, mask, pw, pb)
            merge(pw, pb, dw, db, sw, sb)
            back(g, x, mean, var, w, mask, sw, sb, dx)

        return run
