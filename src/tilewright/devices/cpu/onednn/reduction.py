"""Sums and means down columns by oneDNN, as products with a row of ones.

oneDNN's own reduction has only a plain reference for these (a hundred times slower). A sum over axes that are not the
innermost - a bias gradient, the statistics of channels - is ones(1, R) times (R, C) for each of A slices, which reads
memory at full speed on every core where NumPy uses one. Long columns are summed in blocks, and then the blocks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, memory_order, register
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, refuse
from tilewright.devices.cpu.onednn.capi import ARG_DST, ARG_SRC, ARG_WEIGHTS, MemoryDesc

_SMALLEST = 1 << 18  # elements below which NumPy is as fast
_BLOCK = 512  # rows summed at once
_ONES = np.ones(_BLOCK, np.float32)


def _split(x: Spec, attrs: Any) -> tuple[int, int, int] | None:
    """(A, R, C): slices, rows to sum, columns, where memory is so ordered; None where it is not."""
    order = [i for i in memory_order(x.ndim, x.layout) if x.shape[i] > 1]
    kept = [i for i in order if i not in attrs.axes]
    if not attrs.keepdims and kept != sorted(kept):
        return None  # the result is contiguous in another order
    runs = [(reduced, prod(x.shape[i] for i in run)) for reduced, run in groupby(order, lambda i: i in attrs.axes)]
    sizes = [size for _, size in runs]
    flags = [reduced for reduced, _ in runs]
    if flags == [True, False]:
        return 1, sizes[0], sizes[1]
    if flags == [False, True, False]:
        return sizes[0], sizes[1], sizes[2]
    return None


def _block(rows: int) -> int:
    """The largest number of rows up to _BLOCK that divides them."""
    return next(b for b in range(min(rows, _BLOCK), 0, -1) if rows % b == 0)


@lru_cache(maxsize=16)
def _column_sums(slices: int, rows: int, columns: int, threads: int) -> Any:
    ones, matrix = MemoryDesc((1, 1, rows)), MemoryDesc((slices, rows, columns))
    return capi.matmul(ones, matrix, None, MemoryDesc((slices, 1, columns)))


class ColumnSums(Kernel):
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def __init__(self, op: str) -> None:
        self.op = op
        self.id = f"cpu.{op}.onednn"

    def _pd(self, a: int, r: int, c: int) -> Any:
        block = _block(r)
        return _column_sums(a * (r // block), block, c, runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem)
        if reasons:
            return reasons
        x = problem.inputs[0]
        assert x is not None
        split = _split(x, problem.attrs)
        if split is None:
            return ["the axes are not one block before the innermost in memory"]
        a, r, c = split
        if x.size < _SMALLEST or _block(r) < min(r, 32):
            return [f"{a} slices of {r} rows and {c} columns gain nothing over NumPy"]
        return attempt(lambda: self._pd(a, r, c))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        a, r, c = _split(x, problem.attrs) or (1, 1, 1)
        pd = self._pd(a, r, c)
        run = runtime.bind(pd, [(ARG_SRC, pd.src_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DST, pd.dst_md())]).run
        blocks, ones, ndarray = r // _block(r), _ONES.ctypes.data, np.ndarray
        count = np.float32(r) if self.op == "mean" else None
        take, nbytes = device.pool.take, a * blocks * c * 4

        def launch(inputs: Any, outputs: Any) -> None:
            part = outputs[0] if blocks == 1 else take(nbytes)
            run(ones, inputs[0].ptr, part.ptr)
            out = ndarray((a, c), np.float32, outputs[0].raw)
            with np.errstate(all="ignore"):
                if blocks > 1:
                    np.add.reduce(ndarray((a, blocks, c), np.float32, part.raw), axis=1, out=out)
                if count is not None:
                    np.divide(out, count, out=out)

        return launch


register(ColumnSums("sum"))
register(ColumnSums("mean"))
