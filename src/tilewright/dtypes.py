"""Element types and how they promote.

Promotion follows NumPy (NEP 50): two tensors promote as `numpy.promote_types` says, and a Python scalar takes the
tensor's type unless its kind is higher (`int_tensor + 1.5` is float32, the default float type). bfloat16, which
NumPy does not know, promotes with bool, int8 and uint8 to itself, with float16 and 16-bit integers to float32, and
with wider integers to float64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from tilewright.errors import DTypeError


class DType:
    """One element type: `name`, NumPy dtype `np`, `itemsize` in bytes and `kind` ('b', 'u', 'i' or 'f')."""

    __slots__ = ("eps", "itemsize", "kind", "max", "min", "name", "np")

    def __init__(self, name: str, np_dtype: Any) -> None:
        self.name = name
        self.np = np.dtype(np_dtype)
        self.itemsize = self.np.itemsize
        self.kind = "f" if name == "bfloat16" else self.np.kind
        # Read the limits now: NumPy warns when finfo is first asked for while denormals are flushed to zero.
        if self.kind == "f":
            info: Any = ml_dtypes.finfo(self.np)
            self.eps, self.min, self.max = float(info.eps), float(info.min), float(info.max)
        else:
            self.eps = 0.0
            limits: Any = np.iinfo(self.np) if self.kind != "b" else None
            self.min, self.max = (0, 1) if limits is None else (int(limits.min), int(limits.max))

    @property
    def is_floating(self) -> bool:
        return self.kind == "f"

    def __repr__(self) -> str:
        return f"tilewright.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (as_dtype, (self.name,))


float64 = DType("float64", np.float64)
float32 = DType("float32", np.float32)
float16 = DType("float16", np.float16)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16)
int64 = DType("int64", np.int64)
int32 = DType("int32", np.int32)
int16 = DType("int16", np.int16)
int8 = DType("int8", np.int8)
uint8 = DType("uint8", np.uint8)
bool_ = DType("bool", np.bool_)

ALL = (float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool_)
_BY_NAME = {d.name: d for d in ALL}
_BY_NP = {d.np: d for d in ALL}
_BY_PY = {float: float32, int: int64, bool: bool_}
for _d in (float64, float32):
    np.finfo(_d.np)


def as_dtype(value: Any) -> DType:
    """A `DType` from itself, a name, a NumPy dtype or Python's float, int, bool. Raises DTypeError."""
    if isinstance(value, DType):
        return value
    found = _BY_PY.get(value) if isinstance(value, type) else None
    if found is None and isinstance(value, str):
        found = _BY_NAME.get(value)
    if found is None:
        try:
            found = _BY_NP.get(np.dtype(value).newbyteorder("="))
        except TypeError:
            found = None
    if found is None:
        raise DTypeError(f"dtype {value!r} is not one of {', '.join(_BY_NAME)}; convert the data first")
    return found


@cache
def promote(a: DType, b: DType) -> DType:
    """The type that holds both, as the module's docstring states."""
    if a is b:
        return a
    if bfloat16 in (a, b):
        other = b if a is bfloat16 else a
        if other in (bool_, int8, uint8):
            return bfloat16
        if other in (float16, int16, float32):
            return float32
        return float64
    return _BY_NP.get(np.promote_types(a.np, b.np), float64)


def promote_scalar(a: DType, value: bool | int | float) -> DType:
    """The result type of a tensor of type `a` with a Python scalar (weak, NEP 50)."""
    if isinstance(value, (bool, np.bool_)) or a.is_floating:
        return a
    if isinstance(value, (int, np.integer)):
        return int64 if a is bool_ else a
    return float32
