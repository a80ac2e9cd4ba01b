"""A NumPy kernel is one function: `fn(attrs, out, *inputs)` on logical-shape views in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Kernel, Launch, Problem, register


class NumpyKernel(Kernel):
    """Runs `fn(attrs, out, *inputs)`: `out` is the array to fill (a list of them for several outputs); absent optional
    operands are None. Floating-point warnings are off: inf and NaN are values here."""

    device = "cpu"

    def __init__(self, op: str, fn: Callable[..., None], variant: str = "numpy", rank: int = 100) -> None:
        self.op = op
        self.id = f"cpu.{op}.{variant}"
        self.fn = fn
        self.rank = rank

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        fn, attrs = self.fn, problem.attrs
        ins = [None if s is None else (s.shape, s.dtype.np, s.strides) for s in problem.inputs]
        outs = [(s.shape, s.dtype.np, s.strides) for s in problem.outputs]
        ndarray, errstate, single = np.ndarray, np.errstate, len(outs) == 1

        def launch(inputs: Any, outputs: Any) -> None:
            arrays = [None if v is None else ndarray(v[0], v[1], b.raw, 0, v[2]) for v, b in zip(ins, inputs, strict=True)]
            results = [ndarray(v[0], v[1], b.raw, 0, v[2]) for v, b in zip(outs, outputs, strict=True)]
            with errstate(all="ignore"):
                fn(attrs, results[0] if single else results, *arrays)

        return launch


def numpy_kernel(*ops: str, variant: str = "numpy", rank: int = 100) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: register `fn` as the NumPy kernel of each of `ops`."""

    def enter(fn: Callable[..., None]) -> Callable[..., None]:
        for op in ops:
            register(NumpyKernel(op, fn, variant, rank))
        return fn

    return enter
