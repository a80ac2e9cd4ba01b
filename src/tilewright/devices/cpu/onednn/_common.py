"""What oneDNN kernels share: specs as memory descriptors, packed weights, epilogues as post-ops, reasons to refuse."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tilewright.devices.api import Problem, Spec
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn.capi import ELTWISE, Attr, MemoryDesc

_CODES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "s32", "int8": "s8", "uint8": "u8"}


def describe(spec: Spec) -> MemoryDesc:
    """The descriptor of an operand as it lies."""
    item = spec.dtype.itemsize
    return MemoryDesc(spec.shape, _CODES[spec.dtype.name], [s // item for s in spec.strides])


@lru_cache(maxsize=1)
def _warn_where_named(missing: str) -> None:
    """Whoever names a library means to use it, and would wonder long about NumPy's speed."""
    if os.environ.get("TILEWRIGHT_ONEDNN", "off").lower() not in ("", *capi.OFF):
        warnings.warn(f"{missing} Going on with NumPy, which is slower.", RuntimeWarning, stacklevel=2)


def refuse(problem: Problem, dtypes: tuple[str, ...] = ("float32",)) -> list[str]:
    """The reasons that hold for any primitive: no library, a dtype it is not used for, an operand without elements."""
    missing = capi.available()
    if missing is not None:
        _warn_where_named(missing)
        return [missing]
    for s in (*problem.inputs, *problem.outputs):
        if s is not None and s.dtype.name not in dtypes:
            return [f"oneDNN is used for {', '.join(dtypes)} here and an operand is {s.dtype.name}"]
    if problem.empty:
        return ["an operand has no elements"]
    return []


def attempt(make: Callable[[], Any]) -> list[str]:
    """[] when `make` (which creates a primitive descriptor) succeeds and is not the plain reference, else why not."""
    try:
        pd = make()
    except capi.OneDNNError as error:
        return [f"oneDNN refuses: {error}"]
    if pd.impl.startswith("ref"):
        return [f"oneDNN has only its plain reference ({pd.impl}) for this"]
    return []


# oneDNN's relu turns NaN into 0 when its slope for negative values is exactly 0. With the smallest denormal as slope it
# multiplies instead, so NaN stays; and since the threads that run it read denormals as zero, the product is 0. The
# slope is a denormal only to code that keeps them, so such a primitive is described and compiled in `denormals_kept`.
NAN_SLOPE = 1e-45


def relu_slope() -> float:
    """The slope that makes oneDNN's relu keep NaN, where this machine allows it."""
    return NAN_SLOPE if runtime.flush_reason() is None else 0.0


# Activations as eltwise post-ops: algorithm, and alpha and beta from ours.
EPILOGUES: dict[str, tuple[str, Callable[[float, float], tuple[float, float]]]] = {
    "relu": ("relu", lambda a, b: (relu_slope(), 0.0)),
    "relu6": ("clip", lambda a, b: (0.0, 6.0)),
    "leaky_relu": ("relu", lambda a, b: (a, 0.0)),
    "tanh": ("tanh", lambda a, b: (0.0, 0.0)),
    "sigmoid": ("logistic", lambda a, b: (0.0, 0.0)),
    "elu": ("elu", lambda a, b: (a, 0.0)),
    "silu": ("swish", lambda a, b: (1.0, 0.0)),
    "gelu": ("gelu_erf", lambda a, b: (0.0, 0.0)),
    "gelu_tanh": ("gelu_tanh", lambda a, b: (0.0, 0.0)),
    "hard_sigmoid": ("hardsigmoid", lambda a, b: (a, b)),
    "hard_swish": ("hardswish", lambda a, b: (a, b)),
    "softplus": ("soft_relu", lambda a, b: (1.0, 0.0)),
    "mish": ("mish", lambda a, b: (0.0, 0.0)),
}


def add_epilogue(attr: Attr, activation: str | None, alpha: float, beta: float) -> Attr:
    if activation is not None:
        name, convert = EPILOGUES[activation]
        attr.append_eltwise(ELTWISE[name], *convert(alpha, beta))
    return attr


class Reorder:
    """Copies between two descriptors of the same tensor; does nothing, for free, where they are equal."""

    def __init__(self, src: MemoryDesc, dst: MemoryDesc) -> None:
        self.needed = src != dst
        self.nbytes = dst.nbytes
        if self.needed:
            self.run = runtime.bind(capi.reorder(src, dst), [(capi.ARG_SRC, src), (capi.ARG_DST, dst)]).run


class Packer:
    """Weights in the layout a primitive wants, packed once per version of their memory and kept with it."""

    def __init__(self, plain: MemoryDesc, wanted: MemoryDesc, pool: Any) -> None:
        self.reorder = Reorder(plain, wanted)
        self.pool = pool
        self.key = (wanted.dims, wanted.dtype, wanted.tag, wanted.inner_blocks, wanted.strides) if self.reorder.needed else None

    def __call__(self, buffer: Any) -> Any:
        """The buffer to hand to the primitive: `buffer` itself or its packed form."""
        if self.key is None:
            return buffer
        stamp = buffer.stamp
        key = (self.key, buffer.ptr)
        held = stamp.derived.get(key)
        version = stamp.version
        if held is not None and held[0] == version:
            return held[1]
        packed = self.pool.take(self.reorder.nbytes)
        self.reorder.run(buffer.ptr, packed.ptr)
        stamp.derived[key] = (version, packed)
        return packed
