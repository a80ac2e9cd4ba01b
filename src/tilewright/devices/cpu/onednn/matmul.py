"""Matrix products by oneDNN.

Measured (2 cores, AVX-512): with one row, `inner_product` on weights as they lie runs at the memory's speed and packing
gains nothing; with more rows `matmul` on packed weights takes two thirds of its time on plain ones, but packing costs as
much as several products. So `linear` packs only weights that it has met a few times unchanged: inference, not training.
Packed and plain give the same bits, since the primitive packs plain ones piece by piece itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.numpy._epilogue import activate
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Packer, add_epilogue, attempt, describe, refuse, relu_slope
from tilewright.devices.cpu.onednn.capi import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS, FORWARD_INFERENCE, Attr, MemoryDesc, PrimitiveDesc

_DTYPES = ("float32", "bfloat16", "float16")
_PATIENCE = 4  # uses of unchanged weights after which packing them pays


def _matrix(s: Spec, turned: bool, ndim: int) -> MemoryDesc:
    """An operand of `ndim` axes whose last two are exchanged where `turned`: a matter of strides only."""
    md = describe(s)
    dims, strides = list(md.dims), [b // s.dtype.itemsize for b in s.strides]
    if turned:
        dims[-2:], strides[-2:] = dims[:-3:-1], strides[:-3:-1]
    lead = ndim - s.ndim
    return MemoryDesc([1] * lead + dims, md.dtype, [s.size] * lead + strides)


@lru_cache(maxsize=16)
def _product(a: Any, x: Spec, y: Spec, out: Spec, threads: int) -> PrimitiveDesc:
    if out.ndim == 2 and out.shape[0] == 1:
        weights = _matrix(y, not a.tb, 2)
        return capi.inner_product_forward(FORWARD_INFERENCE, _matrix(x, a.ta, 2), weights, None, describe(out))
    return capi.matmul(_matrix(x, a.ta, out.ndim), _matrix(y, a.tb, out.ndim), None, describe(out))


@kernel
class Matmul(Kernel):
    id = "cpu.matmul.onednn"
    op = "matmul"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x, y = problem.inputs
        assert x is not None and y is not None
        return _product(problem.attrs, x, y, problem.outputs[0], runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return refuse(problem, _DTYPES) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        pd = self._pd(problem)
        run = runtime.bind(pd, [(ARG_SRC, pd.src_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DST, pd.dst_md())]).run

        def launch(inputs: Any, outputs: Any) -> None:
            run(inputs[0].ptr, inputs[1].ptr, outputs[0].ptr)

        return launch


@lru_cache(maxsize=16)
def _linear(a: Any, x: Spec, w: Spec, b: Spec | None, y: Spec, packed: bool, threads: int) -> PrimitiveDesc:
    with runtime.denormals_kept():
        attr = Attr() if _loses_nan(a.activation) else add_epilogue(Attr(), a.activation, a.alpha, a.beta)
        if x.shape[0] == 1:
            return capi.inner_product_forward(FORWARD_INFERENCE, describe(x), describe(w), None if b is None else describe(b), describe(y), attr)
        weights = _matrix(w, True, 2)
        if packed:
            weights = MemoryDesc(weights.dims, weights.dtype, "any")
        bias = None if b is None else _matrix(b, False, 2)
        return capi.matmul(describe(x), weights, bias, describe(y), attr)


def _loses_nan(activation: str | None) -> bool:
    """Is this an activation whose post-op turns NaN into a number?"""
    return activation in ("relu6", "hard_sigmoid") or (activation == "relu" and relu_slope() == 0)


class _PatientPacker(Packer):
    """Packs weights once they have been met unchanged a few times; None until then."""

    def __call__(self, buffer: Any) -> Any:
        if self.key is None:
            return None
        stamp = buffer.stamp
        key = (self.key, buffer.ptr)
        version, derived = stamp.version, stamp.derived
        held = derived.get(key)
        if held is None or held[0] != version:
            derived[key] = (version, None, 1)
            return None
        if held[1] is None:
            if held[2] < _PATIENCE:
                derived[key] = (version, None, held[2] + 1)
                return None
            packed = self.pool.take(self.reorder.nbytes)
            self.reorder.run(buffer.ptr, packed.ptr)
            derived[key] = held = (version, packed, 0)
        return held[1]


@kernel
class Linear(Kernel):
    id = "cpu.linear.onednn"
    op = "linear"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem, packed: bool) -> PrimitiveDesc:
        x, w, b = problem.inputs
        assert x is not None and w is not None
        return _linear(problem.attrs, x, w, b, problem.outputs[0], packed, runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem, _DTYPES) or attempt(lambda: self._pd(problem, False)) or attempt(lambda: self._pd(problem, True))
        if not reasons and problem.outputs[0].dtype.name != "float32" and _loses_nan(problem.attrs.activation):
            reasons = [f"oneDNN's {problem.attrs.activation} turns NaN into a number"]
        return reasons

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        plain, dense = self._bind(problem, False), self._bind(problem, True)
        held, wanted = self._pd(problem, False).weights_md(), self._pd(problem, True).weights_md()
        pack = _PatientPacker(held, wanted, device.pool)
        bias = problem.inputs[2] is not None

        def launch(inputs: Any, outputs: Any) -> None:
            weights = inputs[1]
            packed = pack(weights)
            rest = (inputs[2].ptr,) if bias else ()
            if packed is None:
                plain(inputs[0].ptr, weights.ptr, outputs[0].ptr, *rest)
            else:
                dense(inputs[0].ptr, packed.ptr, outputs[0].ptr, *rest)

        a, out = problem.attrs, problem.outputs[0]
        if not _loses_nan(a.activation):
            return launch

        def finish(inputs: Any, outputs: Any) -> None:
            launch(inputs, outputs)
            y = np.ndarray(out.shape, out.dtype.np, outputs[0].raw)
            activate(y, y, a.activation, a.alpha, a.beta)

        return finish

    def _bind(self, problem: Problem, packed: bool) -> Any:
        pd = self._pd(problem, packed)
        arguments = [(ARG_SRC, pd.src_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DST, pd.dst_md())]
        if problem.inputs[2] is not None:
            arguments.append((ARG_BIAS, pd.weights_md(1)))
        with runtime.denormals_kept():
            return runtime.bind(pd, arguments).run
