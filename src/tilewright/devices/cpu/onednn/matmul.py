"""Matrix products by oneDNN.

Measured (2 cores, AVX-512): with one row, `inner_product` on weights as they lie runs at the memory's speed and packing
gains nothing; with more rows `matmul` on packed weights takes two thirds of its time on plain ones, but packing costs as
much as several products. So `linear` packs only weights that it has met a few times unchanged: inference, not training.
Packed and plain give the same bits, since the primitive packs plain ones piece by piece itself. For `matmul`, whose
operands are not weights that stay, the primitives of the inner product and of its weight gradient are up to a third
faster than `matmul` where the right operand is not turned, and where the left one is and the product is large.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.numpy._epilogue import activate
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Packer, add_epilogue, attempt, describe, refuse, relu_slope
from tilewright.devices.cpu.onednn.capi import (
    ARG_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    Attr,
    MemoryDesc,
    PrimitiveDesc,
)

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
def _product(way: str, a: Any, x: Spec, y: Spec, out: Spec, threads: int) -> PrimitiveDesc:
    if way == "matmul":
        return capi.matmul(_matrix(x, a.ta, out.ndim), _matrix(y, a.tb, out.ndim), None, describe(out))
    if way == "inner_product":  # x times the weights y, given as (N, K)
        return capi.inner_product_forward(FORWARD_INFERENCE, describe(x), _matrix(y, not a.tb, 2), None, describe(out))
    hint = capi.inner_product_forward(FORWARD_TRAINING, describe(y), describe(out), None, describe(x))
    return capi.inner_product_backward_weights(describe(y), describe(out), None, describe(x), hint)


def _ways(a: Any, x: Spec, out: Spec) -> list[str]:
    """The primitives that can form a product, the one that measured fastest first."""
    if out.ndim > 2 or (a.ta and a.tb):
        return ["matmul"]
    if a.ta:  # as the gradient of weights
        return ["weight_gradient", "matmul"] if out.size >= 1 << 18 else ["matmul", "weight_gradient"]
    return ["inner_product", "matmul"] if x.shape[0] == 1 or not a.tb else ["matmul", "inner_product"]


@kernel
class Matmul(Kernel):
    id = "cpu.matmul.onednn"
    op = "matmul"
    device = "cpu"
    rank = 10
    tolerance = 4.0

    def _pd(self, problem: Problem, way: str) -> PrimitiveDesc:
        x, y = problem.inputs
        assert x is not None and y is not None
        return _product(way, problem.attrs, x, y, problem.outputs[0], runtime.get_num_threads())

    def _usable(self, problem: Problem) -> list[str]:
        x = problem.inputs[0]
        assert x is not None
        return [w for w in _ways(problem.attrs, x, problem.outputs[0]) if not attempt(lambda w=w: self._pd(problem, w))]

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem, _DTYPES)
        return reasons if reasons or self._usable(problem) else attempt(lambda: self._pd(problem, "matmul"))

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        return [(("primitive", way),) for way in self._usable(problem)]

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        way = dict(config)["primitive"]
        pd = self._pd(problem, way)
        if way == "weight_gradient":
            arguments = [(ARG_DIFF_DST, pd.diff_dst_md()), (ARG_SRC, pd.src_md()), (ARG_DIFF_WEIGHTS, pd.diff_weights_md())]
        else:
            arguments = [(ARG_SRC, pd.src_md()), (ARG_WEIGHTS, pd.weights_md()), (ARG_DST, pd.dst_md())]
        run = runtime.bind(pd, arguments).run

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
        plain = self._bind(problem, False)
        x, w, _ = problem.inputs
        assert x is not None
        single = x.shape[0] == 1
        bias = problem.inputs[2] is not None
        made: list[Any] = []  # the packer and the run on packed weights, once there are weights to pack

        def on_packed() -> Any:
            if not made:
                held, wanted = self._pd(problem, False).weights_md(), self._pd(problem, True).weights_md()
                made.append((Packer(held, wanted, device.pool), self._bind(problem, True)))
            return made[0]

        def launch(inputs: Any, outputs: Any) -> None:
            weights = inputs[1]
            rest = (inputs[2].ptr,) if bias else ()
            if single:
                plain(inputs[0].ptr, weights.ptr, outputs[0].ptr, *rest)
                return
            stamp, key = weights.stamp, (w, weights.ptr)
            version = stamp.version
            uses = stamp.derived.get(key)
            count = uses[1] if uses is not None and uses[0] == version else 0
            if count < _PATIENCE:
                stamp.derived[key] = (version, count + 1)
                plain(inputs[0].ptr, weights.ptr, outputs[0].ptr, *rest)
            else:
                pack, run = on_packed()
                packed = pack(weights)
                run(inputs[0].ptr, packed.ptr, outputs[0].ptr, *rest)

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
