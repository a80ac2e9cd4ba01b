"""Cross entropy on logits, its gradient, and negative log likelihood: a work-item for each row, then one group that adds the rows up.

A target outside the classes that is not ignore_index makes the loss, or its row of the gradient, NaN: a kernel cannot raise, and to look
at the targets on the host would stop the queue.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import TREE
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

# Row r is (n, s) of (N, C, S); class c of it lies at n * xn + s * xs + c * xc in the logits, and so for the targets that are probabilities.
_ARGS = (
    "const INDEX rows, const INDEX C, const INDEX S, const INDEX xn, const INDEX xc, const INDEX xs, const INDEX tn, const INDEX tc, "
    "const INDEX ts, const REAL smoothing, const long ignore, const int weighted"
)
_HEAD = """
#define ROW const INDEX r = get_global_id(0); if (r >= rows) return; const INDEX n = r / S, s = r % S, at = n * xn + s * xs;
#define X(c) ((REAL)LOAD_x(x, at + (c) * xc))
#define WEIGHT(c) (weighted ? (REAL)LOAD_x(weight, c) : (REAL)1)
#ifdef SOFT
#define TARGET
#define WANTED(c) (((1 - smoothing) * (REAL)LOAD_t(target, n * tn + s * ts + (c) * tc) + smoothing / (REAL)C) * WEIGHT(c))
#define OWN (REAL)1
#define WRONG 0
#else
#define TARGET const long k = target[n * tn + s * ts]; const int kept = k != ignore, wrong = kept && (k < 0 || k >= C);
#define WANTED(c) (kept && !wrong ? (smoothing / (REAL)C + (k == (c) ? 1 - smoothing : (REAL)0)) * WEIGHT(c) : (REAL)0)
#define OWN (kept && !wrong ? WEIGHT(k) : (REAL)0)
#define WRONG wrong
#endif
"""
_LOSS = """
__kernel void loss(__global const T_x *restrict x, __global const T_t *restrict target, __global const T_x *restrict weight,
    __global T_x *restrict p, __global REAL *restrict each, __global REAL *restrict own, ARGS) {
  ROW
  TARGET
#ifdef NLL
  const REAL top = 0, shift = 0;
#else
  REAL top = -INFINITY, acc = 0;
  for (INDEX c = 0; c < C; ++c) { const REAL v = X(c); top = HIGHER(v, top); }
  for (INDEX c = 0; c < C; ++c) acc += exp(X(c) - top);
  const REAL shift = log(acc);
  for (INDEX c = 0; c < C; ++c) STORE_x(p, at + c * xc, exp(X(c) - top) / acc);
#endif
  REAL total = 0;
  for (INDEX c = 0; c < C; ++c) { const REAL w = WANTED(c); if (w != 0) total -= w * (X(c) - top - shift); }
  each[r] = WRONG ? (REAL)NAN : total;
  own[r] = OWN;
}
"""
# Deterministic: one group adds up all rows, in float64 where there is such.
_SUM = """
__kernel void total(__global const REAL *restrict each, __global const REAL *restrict own, __global T_x *restrict y,
    const INDEX rows, const int mode) {
  const int lid = L > 1 ? get_local_id(0) : 0;
  SHARED_OF(REAL, share)
  REAL a = 0, b = 0;
  for (INDEX r = lid; r < rows; r += L) { a += each[r]; b += own[r]; }
  TREE(a, share, ADD)
  TREE(b, share, ADD)
  if (lid == 0) {
    const REAL f = mode == 2 ? (b != 0 ? 1 / b : 0) : 1;
    STORE_x(y, 0, mode == 2 && b == 0 && a == 0 ? 0 : a * f);
  }
}
"""
_PLAIN = """
__kernel void plain(__global const REAL *restrict each, __global T_x *restrict y, const INDEX rows) {
  const INDEX r = get_global_id(0);
  if (r < rows) STORE_x(y, r, each[r]);
}
"""
_OWN = """
__kernel void owned(__global const T_t *restrict target, __global const T_x *restrict weight, __global REAL *restrict own, ARGS) {
  const INDEX r = get_global_id(0);
  if (r >= rows) return;
  const INDEX n = r / S, s = r % S;
  TARGET
  own[r] = OWN;
}
__kernel void factors(__global const REAL *restrict own, __global REAL *restrict factor, const INDEX rows) {
  const int lid = L > 1 ? get_local_id(0) : 0;
  SHARED_OF(REAL, share)
  REAL b = 0;
  for (INDEX r = lid; r < rows; r += L) b += own[r];
  TREE(b, share, ADD)
  if (lid == 0) *factor = b != 0 ? 1 / b : 0;
}
"""
_GRAD = """
__kernel void grad(__global const T_x *restrict g, __global const T_x *restrict x, __global const T_t *restrict target,
    __global const T_x *restrict weight, __global const REAL *restrict factor, __global T_x *restrict y, const int each, const int mean, ARGS) {
  ROW
  TARGET
  const REAL f = (REAL)LOAD_x(g, each ? r : 0) * (mean ? *factor : (REAL)1);
  REAL most = 0;
  for (INDEX c = 0; c < C; ++c) most += WANTED(c);
  for (INDEX c = 0; c < C; ++c) {
    const REAL d = f * ((most != 0 ? X(c) * most : 0) - WANTED(c));
    STORE_x(y, at + c * xc, WRONG ? (REAL)NAN : d);
  }
}
"""


class _Loss(ClKernel):
    rank = 10

    def make(self, problem: Problem, device: Any, x: Spec, target: Spec, weight: Spec | None, a: Any) -> Any:
        """(entry -> launch, rows, item size of REAL, kind of index, work-items that add the rows up)."""
        double = x.dtype.name == "float64"
        n, c = x.shape[:2]
        s = prod(x.shape[2:])

        def places(of: Spec) -> tuple[int, int, int]:
            if of.layout == "channels_last":
                return s * c, 1, c
            return s * c, s, 1

        soft = target.dtype.is_floating
        t = places(target) if soft else (s, 0, 1)
        name = index_type(problem)
        kind: Any = np.int32 if name == "int" else np.int64
        real: Any = np.float64 if double else np.float32
        head = prelude(x.dtype, target.dtype) + types(x=x, t=target) + f"#define INDEX {name}\n#define REAL {'double' if double else 'float'}\n"
        head += f"#define ARGS {_ARGS}\n" + ("#define SOFT\n" if soft else "") + ("#define NLL\n" if self.op == "nll_loss" else "")
        group = 128 if device.is_gpu else 1
        define: dict[str, Any] = {"L": group}
        if not double:
            define["-cl-single-precision-constant"] = None
        geometry = [kind(v) for v in (n * s, c, s, *places(x), *t)]
        geometry += [real(getattr(a, "smoothing", 0.0)), np.int64(a.ignore_index), np.int32(weight is not None)]

        def entry(body: str, which: str, buffers: int, scalars: list[Any], *, size: int, local: int = 64, whole: bool = True) -> Any:
            rest = geometry if whole else []
            return launcher(
                device, head + TREE + _HEAD + body, which, size=(size,), group=(local,), define=define, scalars=scalars + rest, buffers=buffers
            )  # fmt: skip

        return entry, n * s, 8 if double else 4, kind, group


class _Forward(_Loss):
    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, target, weight), a = problem.inputs, problem.attrs
        assert x is not None
        assert target is not None
        entry, rows, item, kind, group = self.make(problem, device, x, target, weight, a)
        loss = entry(_LOSS, "loss", 6, [], size=rows)
        if a.reduction == "none":
            add = entry(_PLAIN, "plain", 2, [kind(rows)], size=rows, whole=False)
        else:
            mode = np.int32(2 if a.reduction == "mean" else 1)
            add = entry(_SUM, "total", 3, [kind(rows), mode], size=group, local=group, whole=False)

        def run(inputs: Any, outputs: Any) -> None:
            each, own = device.allocate(rows * item), device.allocate(rows * item)
            loss(*inputs, outputs[1] if len(outputs) > 1 else None, each, own)
            if a.reduction == "none":
                add(each, outputs[0])
            else:
                add(each, own, outputs[0])

        return run

    def workspace(self, problem: Problem, config: Config) -> int:
        x = problem.inputs[0]
        return 0 if x is None else 16 * (x.size // max(x.shape[1], 1))


@kernel
class CrossEntropy(_Forward):
    id, op = "opencl.cross_entropy.row", "cross_entropy"


@kernel
class Nll(_Forward):
    id, op = "opencl.nll_loss.row", "nll_loss"


@kernel
class CrossEntropyGrad(_Loss):
    id, op = "opencl.cross_entropy_grad.row", "cross_entropy_grad"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (_, x, target, weight), a = problem.inputs, problem.attrs
        assert x is not None
        assert target is not None
        entry, rows, item, kind, group = self.make(problem, device, x, target, weight, a)
        mean = a.reduction == "mean"
        grad = entry(_GRAD, "grad", 6, [np.int32(a.reduction == "none"), np.int32(mean)], size=rows)
        owned = entry(_OWN, "owned", 3, [], size=rows)
        factors = entry(_OWN, "factors", 2, [kind(rows)], size=group, local=group, whole=False)

        def run(inputs: Any, outputs: Any) -> None:
            factor = None
            if mean:
                own, factor = device.allocate(rows * item), device.allocate(item)
                owned(inputs[2], inputs[3], own)
                factors(own, factor)
            grad(*inputs, factor, outputs[0])

        return run
