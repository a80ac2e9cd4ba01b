"""Optimizer updates: one launch over flattened parameters, each element read and written once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.program import launcher

# Hyperparameters come in float64, which not every device has: its bits are read as integers, into a float and the float that it
# leaves over. REST(k) is 1 - H(k) from both: from H(k) alone, 0.001 for a beta of 0.999 would be 1.3e-5 off.
_HYPER = """
#ifdef FP64
#define H(k) (((__global const double *)hyper)[k])
#define REST(k) (1 - H(k))
#else
static float2 tw_parts(const ulong u) {
  const int e = (int)((u >> 52) & 2047);
  float2 v = (float2)(0.0f);
  if (e == 2047) v.x = (u << 12) ? NAN : INFINITY;
  else if (e) v = (float2)(ldexp((float)(uint)((u >> 29) & 0x7fffff | 0x800000), e - 1046), ldexp((float)(uint)(u & 0x1fffffff), e - 1075));
  return u >> 63 ? -v : v;
}
#define PARTS(k) tw_parts(((__global const ulong *)hyper)[k])
#define H(k) (PARTS(k).x + PARTS(k).y)
#define REST(k) ((1.0f - PARTS(k).x) - PARTS(k).y)
#endif
"""
_SGD = """
  const REAL lr = H(0), momentum = H(1), decay = H(2);
  REAL s = LOAD_p(g, i);
  const REAL w = LOAD_p(p, i);
  s += decay * w;
#ifdef MOMENTUM
  const REAL v = momentum * (REAL)LOAD_p(s0, i) + s;
  STORE_p(o1, i, v);
#ifdef NESTEROV
  s += momentum * v;
#else
  s = v;
#endif
#endif
  STORE_p(o0, i, w - lr * s);
"""
_ADAM = """
  const REAL lr = H(0), eps = H(3), decay = H(4), fix1 = H(5), fix2 = H(6);
  REAL w = LOAD_p(p, i), s = LOAD_p(g, i);
#ifdef DECOUPLED
  w *= 1 - lr * decay;
#else
  s += decay * w;
#endif
  const REAL m = H(1) * (REAL)LOAD_p(s0, i) + REST(1) * s, v = H(2) * (REAL)LOAD_p(s1, i) + REST(2) * s * s;
  STORE_p(o1, i, m);
  STORE_p(o2, i, v);
  STORE_p(o0, i, w - lr / fix1 * m / (sqrt(v / fix2) + eps));
"""
_RMSPROP = """
  const REAL lr = H(0), eps = H(2), decay = H(3), momentum = H(4);
  const REAL w = LOAD_p(p, i);
  REAL s = LOAD_p(g, i);
  s += decay * w;
  const REAL q = H(1) * (REAL)LOAD_p(s0, i) + REST(1) * s * s;
  STORE_p(o1, i, q);
  REAL step = s / (sqrt(q) + eps);
#ifdef MOMENTUM
  step += momentum * (REAL)LOAD_p(s1, i);
  STORE_p(o2, i, step);
#endif
  STORE_p(o0, i, w - lr * step);
"""


class Update(ClKernel):
    rank = 10

    def __init__(self, op: str, body: str, states: int) -> None:
        self.op, self.id, self.body, self.states = op, f"opencl.{op}.flat", body, states

    def reject(self, problem: Problem, device: Any) -> list[str]:
        p = problem.inputs[0]
        if p is not None and p.dtype.name == "float64" and not device.has_fp64:
            return [f"{device.name} has no double precision (cl_khr_fp64)"]
        return []

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        p = problem.inputs[0]
        assert p is not None
        double = p.dtype.name == "float64"
        index = index_type(problem)
        states = [f"__global const T_p *s{k}" for k in range(self.states)]
        outs = [f"__global T_p *o{k}" for k in range(len(problem.outputs))]  # which may be an input's memory: no restrict
        source = (
            prelude(p.dtype)
            + types(p=p)
            + f"#define INDEX {index}\n#define REAL {'double' if double else 'float'}\n{_HYPER}"
            + f"__kernel void update(__global const T_p *p, __global const T_p *g, {', '.join(states)}, __global const void *hyper, "
            + f"{', '.join(outs)}, const INDEX n) {{\n  const INDEX i = get_global_id(0);\n  if (i >= n) return;\n{self.body}}}\n"
        )
        define: dict[str, Any] = {name.upper(): 1 for name in getattr(problem.attrs, "_fields", ()) if getattr(problem.attrs, name)}
        kind: Any = np.int32 if index == "int" else np.int64
        count = len(problem.inputs) + len(problem.outputs)
        run = launcher(device, source, "update", size=(p.size,), group=(64,), define=define, scalars=[kind(p.size)], buffers=count)
        return lambda inputs, outputs: run(*inputs, *outputs)


register(Update("sgd_update", _SGD, 1))
register(Update("adam_update", _ADAM, 2))
register(Update("rmsprop_update", _RMSPROP, 2))
