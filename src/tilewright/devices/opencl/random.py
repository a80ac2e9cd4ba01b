"""Random numbers: Philox4x32-10 (Salmon et al., SC 2011), a work-item for each block of four words. The same numbers as on any device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.api import CONTIGUOUS, Config, Launch, Problem, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._source import prelude, types
from tilewright.devices.opencl.movement import mover, steps
from tilewright.devices.opencl.pointwise import PointwiseKernel, launch_of
from tilewright.devices.opencl.program import launcher

_HEAD = """
static uint4 tw_philox(const long seed, const long block) {
  uint4 c = (uint4)((uint)block, (uint)((ulong)block >> 32), 0u, 0u);
  uint k0 = (uint)seed, k1 = (uint)((ulong)seed >> 32);
  for (int r = 0; r < 10; ++r) {
    const uint h0 = mul_hi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x, h1 = mul_hi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
    c = (uint4)(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}
__kernel void draw(__global const long *restrict state, __global T_y *restrict y, const long n, const long low, const ulong count, const uint bound,
    const int all) {
  const long block = get_global_id(0), first = block * PER;
  if (first >= n) return;
  const uint4 w = tw_philox(state[0], state[1] + block);
"""
_PUT = "if (first + {k} < n) {{ STORE_y(y, first + {k}, {v}); }}\n"


def _unit(bits: int) -> list[str]:
    """Expressions of the numbers in [0, 1) of a block."""
    if bits == 53:
        return [f"((double)({a} >> 5) * 67108864.0 + (double)({b} >> 6)) * 1.1102230246251565e-16" for a, b in (("w.x", "w.y"), ("w.z", "w.w"))]
    return [f"(float)({v} >> {32 - bits}) * {2.0**-bits!r}f" for v in ("w.x", "w.y", "w.z", "w.w")]


_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _uniform(name: str) -> str:
    return "".join(_PUT.format(k=k, v=v) for k, v in enumerate(_unit(_BITS[name])))


def _normal(name: str) -> str:
    units = _unit(max(24, _BITS[name]))
    out = "".join(f"const C_y u{k} = {v};\n" for k, v in enumerate(units))
    for k in range(0, len(units), 2):
        out += f"{{ const C_y r = sqrt((C_y)-2 * log1p(-u{k})), t = 2 * u{k + 1};\n"
        out += _PUT.format(k=k, v="r * cospi(t)") + _PUT.format(k=k + 1, v="r * sinpi(t)") + "}\n"
    return out


def _integers(name: str) -> str:
    pairs = [f"((ulong){a} << 32 | {b})" for a, b in (("w.x", "w.y"), ("w.z", "w.w"))]
    return "".join(_PUT.format(k=k, v=f"(long)((all ? {v} : mul_hi({v}, count)) + (ulong)low)") for k, v in enumerate(pairs))


def _keep(name: str) -> str:
    return "".join(_PUT.format(k=k, v=f"(!all && {v} >= bound)") for k, v in enumerate(("w.x", "w.y", "w.z", "w.w")))


class Draw(ClKernel):
    """Numbers in logical order, then laid out as the result is."""

    rank = 10

    def __init__(self, op: str, body: Any) -> None:
        self.op, self.id, self.body = op, f"opencl.{op}.philox", body

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        y, attrs = problem.outputs[0], problem.attrs
        low, count, bound, everything = 0, 0, 0, 0
        if self.op == "random_integers":
            low, count = attrs[3], attrs[4]
            everything = int(count == 1 << 64)
            count %= 1 << 64
        elif self.op == "random_keep":
            bound = math.ceil(attrs[3] * 2**32)
            everything, bound = bound >> 32, bound % (1 << 32)
        text = self.body(y.dtype.name)
        per = 2 if y.dtype.name in ("float64", "int64") else 4
        source = prelude(y.dtype) + types(y=y) + f"#define PER {per}\n{_HEAD}{text}}}\n"
        define = {} if y.dtype.name == "float64" else {"-cl-single-precision-constant": None}
        scalars = [np.int64(y.size), np.int64(low), np.uint64(count), np.uint32(bound), np.int32(everything)]
        run = launcher(device, source, "draw", size=(-(-y.size // per),), group=(64,), define=define, scalars=scalars, buffers=2)
        if y.layout == CONTIGUOUS:
            return lambda inputs, outputs: run(inputs[0], outputs[0])
        lay = mover(device, y.dtype.itemsize, y.shape, steps(y.like(layout=CONTIGUOUS)), steps(y))

        def both(inputs: Any, outputs: Any) -> None:
            plain = device.allocate(y.nbytes)
            run(inputs[0], plain)
            lay(plain, outputs[0])

        return both


register(Draw("uniform01", _uniform))
register(Draw("standard_normal", _normal))
register(Draw("random_integers", _integers))
register(Draw("random_keep", _keep))


class Dropout(PointwiseKernel):
    """x * scale where it is kept; a 0 elsewhere, whatever x holds."""

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        return launch_of(device, problem, "(b ? a * p : 0)", numbers=(problem.attrs, 0))


register(Dropout("dropout_apply", ""))
