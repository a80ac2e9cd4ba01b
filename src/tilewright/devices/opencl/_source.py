"""Parts that every kernel's source is made of: element types, index arithmetic.

Kernels compute in float32 (float64 for double, and int64 for integers). Half types are stored as such and widened as they are
read, with what OpenCL C 1.2 has, so that no extension is needed for them.
"""

from __future__ import annotations

from tilewright.devices.api import Problem, Spec
from tilewright.dtypes import DType

# What a type is in memory, and what it is computed in.
STORED = {
    "float64": "double",
    "float32": "float",
    "float16": "half",
    "bfloat16": "ushort",
    "int64": "long",
    "int32": "int",
    "int16": "short",
    "int8": "char",
    "uint8": "uchar",
    "bool": "uchar",
}
COMPUTED = {**STORED, "float16": "float", "bfloat16": "float"}

_TYPES = """
#ifdef FP64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
static float tw_from_bfloat16(const ushort v) { return as_float((uint)v << 16); }
static ushort tw_to_bfloat16(const float v) {  // to nearest, ties to even; NaN stays NaN
  const uint u = as_uint(v);
  return isnan(v) ? (ushort)((u >> 16) | 0x40u) : (ushort)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
#define LOAD_float64(p, i) ((p)[i])
#define LOAD_float32(p, i) ((p)[i])
#define LOAD_float16(p, i) vload_half(i, p)
#define LOAD_bfloat16(p, i) tw_from_bfloat16((p)[i])
#define LOAD_int64(p, i) ((p)[i])
#define LOAD_int32(p, i) ((p)[i])
#define LOAD_int16(p, i) ((p)[i])
#define LOAD_int8(p, i) ((p)[i])
#define LOAD_uint8(p, i) ((p)[i])
#define LOAD_bool(p, i) ((p)[i])
#define STORE_float64(p, i, v) (p)[i] = (v)
#define STORE_float32(p, i, v) (p)[i] = (v)
#define STORE_float16(p, i, v) vstore_half_rte(v, i, p)
#define STORE_bfloat16(p, i, v) (p)[i] = tw_to_bfloat16(v)
#define STORE_int64(p, i, v) (p)[i] = (v)
#define STORE_int32(p, i, v) (p)[i] = (v)
#define STORE_int16(p, i, v) (p)[i] = (v)
#define STORE_int8(p, i, v) (p)[i] = (v)
#define STORE_uint8(p, i, v) (p)[i] = (v)
#define STORE_bool(p, i, v) (p)[i] = (v) ? 1 : 0
"""


def prelude(*dtypes: DType) -> str:
    """The top of a source that uses these element types: `LOAD_<dtype>(pointer, index)`, `STORE_<dtype>(pointer, index, value)`."""
    return ("#define FP64\n" if any(d.name == "float64" for d in dtypes) else "") + _TYPES


def types(**operands: Spec | DType | None) -> str:
    """For each operand `x`: `T_x` (in memory), `C_x` (computed in), `LOAD_x(p, i)` and `STORE_x(p, i, v)`. Below a prelude."""
    lines = []
    for name, of in operands.items():
        if of is None:
            continue
        d = (of.dtype if isinstance(of, Spec) else of).name
        lines += [
            f"#define T_{name} {STORED[d]}",
            f"#define C_{name} {COMPUTED[d]}",
            f"#define LOAD_{name}(p, i) LOAD_{d}(p, i)",
            f"#define STORE_{name}(p, i, v) STORE_{d}(p, i, v)",
        ]
    return "\n".join(lines) + "\n"


def index_type(problem: Problem) -> str:
    """`int` where every offset into an operand fits 31 bits, else `long`."""
    return "int" if all(s is None or s.size < 2**31 - 2**16 for s in problem.inputs + problem.outputs) else "long"
