"""Layouts, axes and float types changed by oneDNN's reorder: two to five times as fast as a strided NumPy copy."""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import Config, Kernel, Launch, Problem, kernel
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse
from tilewright.devices.cpu.onednn.capi import ARG_DST, ARG_SRC, MemoryDesc, PrimitiveDesc

SMALL = 1 << 12  # elements up to which NumPy's copy is as fast and needs no primitive


class _Reorder(Kernel):
    device = "cpu"
    rank = 10
    types: tuple[str, ...] = ("float32", "int32", "bfloat16", "float16", "int8", "uint8")

    def mds(self, problem: Problem) -> tuple[MemoryDesc, MemoryDesc]:
        """The source, as the destination's axes see it, and the destination."""
        x, out = problem.inputs[0], problem.outputs[0]
        assert x is not None
        return describe(x), describe(out)

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        return capi.reorder(*self.mds(problem))

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem, self.types)
        size = problem.outputs[0].size
        if not reasons and size <= SMALL:
            reasons = [f"{size} elements are too few to be worth a primitive"]
        reasons = reasons or attempt(lambda: self._pd(problem))
        if not reasons and not (impl := self._pd(problem).impl).startswith("jit"):
            reasons = [f"oneDNN has only {impl} for this, which is no faster than NumPy"]
        return reasons

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        src, dst = self.mds(problem)
        run = runtime.bind(self._pd(problem), [(ARG_SRC, src), (ARG_DST, dst)]).run
        return lambda inputs, outputs: run(inputs[0].ptr, outputs[0].ptr)


@kernel
class ToLayout(_Reorder):
    id = "cpu.to_layout.onednn"
    op = "to_layout"


@kernel
class Permute(_Reorder):
    id = "cpu.permute.onednn"
    op = "permute"

    def mds(self, problem: Problem) -> tuple[MemoryDesc, MemoryDesc]:
        src, dst = super().mds(problem)
        order = problem.attrs
        return MemoryDesc(dst.dims, src.dtype, [src.strides[i] for i in order]), dst


@kernel
class Cast(_Reorder):
    """Between float32 and the half types: rounds to nearest even, keeps NaN and infinities."""

    id = "cpu.cast.onednn"
    op = "cast"
    types = ("float32", "bfloat16", "float16")

    def mds(self, problem: Problem) -> tuple[MemoryDesc, MemoryDesc]:
        src, dst = super().mds(problem)
        size = problem.outputs[0].size
        return MemoryDesc((size,), src.dtype, "a"), MemoryDesc((size,), dst.dtype, "a")
