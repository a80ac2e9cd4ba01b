"""Convolution and its two gradients by oneDNN, on channels-last activations.

The library picks the layout of the weights ("any"): they are packed once per version in forward and input gradient,
and the weight gradient is brought back to ours. Its own choice of an implementation is the default config. The others are
its further implementations, and one thread for small problems. (Activations in the blocked layouts that some of these would
rather have never paid for the reorders on the way in and out, on any shape measured.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, Unusable, kernel
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Packer, add_epilogue, attempt, describe, refuse
from tilewright.devices.cpu.onednn._ways import Operand, bind, planned, thread_configs
from tilewright.devices.cpu.onednn.capi import (
    ARG_BIAS,
    ARG_DIFF_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    BINARY,
    CONVOLUTION,
    FORWARD_TRAINING,
    Attr,
    MemoryDesc,
    PrimitiveDesc,
)

_DIRECT = CONVOLUTION["direct"]


def _weights(w: Spec, groups: int) -> MemoryDesc:
    """Our (F, C/groups, kh, kw) weights, as oneDNN's (G, F/G, C/G, kh, kw) where there are groups."""
    item = w.dtype.itemsize
    strides = [s // item for s in w.strides]
    code = "f32" if w.dtype.name == "float32" else "bf16"
    if groups == 1:
        return MemoryDesc(w.shape, code, strides)
    f = w.shape[0] // groups
    return MemoryDesc((groups, f, *w.shape[1:]), code, [f * strides[0], *strides])


def _any(md: MemoryDesc) -> MemoryDesc:
    return MemoryDesc(md.dims, md.dtype, "any")


def _window(a: Any) -> dict[str, Any]:
    t, le, b, r = a.padding
    return {"stride": a.stride, "dilation": a.dilation, "padding_l": (t, le), "padding_r": (b, r)}


def _bias(spec: Spec) -> MemoryDesc:
    return MemoryDesc((spec.shape[1],), "f32" if spec.dtype.name == "float32" else "bf16", "a")


def _forward(a: Any, x: Spec, w: Spec, y: Spec, bias: bool, residual: bool) -> PrimitiveDesc:
    attr = Attr()
    if residual:
        attr.append_binary(BINARY["add"], describe(y))
    add_epilogue(attr, a.activation, a.alpha, a.beta)
    weights = _any(_weights(w, a.groups))
    return capi.convolution_forward(FORWARD_TRAINING, _DIRECT, describe(x), weights, _bias(y) if bias else None, describe(y), attr=attr, **_window(a))


@lru_cache(maxsize=16)
def _hint(c: Any, x: Spec, w: Spec, y: Spec, threads: int) -> PrimitiveDesc:
    return _forward(c, x, w, y, False, False)


@lru_cache(maxsize=32)
def _described(kernel: Convolution, problem: Problem, implementation: str | None, threads: int) -> PrimitiveDesc:
    with runtime.denormals_kept():
        pd = kernel.describe(problem)
        while implementation is not None and pd.impl != implementation:
            if not pd.next_impl():
                raise Unusable(f"this oneDNN has no implementation {implementation} of {problem}")
        return pd


@lru_cache(maxsize=64)
def _implementations(kernel: Convolution, problem: Problem, threads: int) -> tuple[str, ...]:
    """Names of oneDNN's implementations, its own choice first. Plain references and narrower vectors than its choice's were
    never the fastest on any shape measured."""
    names: list[str] = []
    narrow = ("ref",)
    with runtime.denormals_kept():
        pd = kernel.describe(problem)
        more = True
        while more:
            name = pd.impl
            if name not in names and not any(part in name for part in narrow) and not kernel.known_wrong(problem, name):
                names.append(name)
                if len(names) == 1:
                    narrow = ("ref", "sse41", "avx2") if "avx512" in name else ("ref", "sse41")
            more = pd.next_impl()
    return tuple(names)


def _work(y: Spec, w: Spec) -> int:
    """Multiply-adds of a convolution with this output and weight, or of one of its gradients."""
    return y.size * w.size // w.shape[0]


class Convolution(Kernel):
    """What the three directions share."""

    device = "cpu"
    rank = 10
    tolerance = 4.0

    @abstractmethod
    def describe(self, problem: Problem) -> PrimitiveDesc:
        """A new descriptor."""

    @abstractmethod
    def operands(self, problem: Problem, pd: PrimitiveDesc) -> list[Operand]:
        """The primitive's arguments, in the order in which `prepare` gives their addresses."""

    @abstractmethod
    def work(self, problem: Problem) -> int:
        """Multiply-adds."""

    def known_wrong(self, problem: Problem, implementation: str) -> list[str]:
        return []

    def _pd(self, problem: Problem, config: Config = ()) -> PrimitiveDesc:
        with planned(config):
            return _described(self, problem, dict(config).get("implementation"), runtime.get_num_threads())

    def reject(self, problem: Problem, device: Any) -> list[str]:
        reasons = refuse(problem, ("float32", "bfloat16"))
        if not reasons and any(s is not None and s.ndim == 4 and s.layout != CHANNELS_LAST for s in problem.inputs):
            reasons = ["operands must lie channels-last"]
        reasons = reasons or attempt(lambda: self._pd(problem))
        return reasons or self.known_wrong(problem, self._pd(problem).impl)

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        yield ()
        names = _implementations(self, problem, runtime.get_num_threads())
        for threads in thread_configs(self.work(problem)):
            if threads:
                yield threads
            for name in names[1:]:
                yield (("implementation", name), *threads)

    def workspace(self, problem: Problem, config: Config) -> int:
        pd = self._pd(problem, config)
        scratch = pd.scratchpad_md
        moved = sum(o.wanted.nbytes for o in self.operands(problem, pd) if o.moved)
        return moved + (scratch.nbytes if scratch is not None else 0)

    def run(self, problem: Problem, config: Config, device: Any) -> Any:
        pd = self._pd(problem, config)
        with runtime.denormals_kept(), planned(config):
            return bind(pd, self.operands(problem, pd), device.pool)


@kernel
class Conv2d(Convolution):
    id = "cpu.conv2d.onednn"
    op = "conv2d"

    def describe(self, problem: Problem) -> PrimitiveDesc:
        x, w, b, residual = problem.inputs
        assert x is not None and w is not None
        return _forward(problem.attrs, x, w, problem.outputs[0], b is not None, residual is not None)

    def work(self, problem: Problem) -> int:
        return _work(problem.outputs[0], problem.inputs[1])  # type: ignore[arg-type]

    def operands(self, problem: Problem, pd: PrimitiveDesc) -> list[Operand]:
        _, _, b, residual = problem.inputs
        out = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_WEIGHTS, pd.weights_md())]
        out.append(Operand(ARG_DST, pd.dst_md()))
        if b is not None:
            out.append(Operand(ARG_BIAS, pd.weights_md(1)))
        if residual is not None:
            out.append(Operand(capi.arg_post_op(0), describe(residual)))
        return out

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        w = problem.inputs[1]
        assert w is not None
        run = self.run(problem, config, device)
        pack = Packer(_weights(w, problem.attrs.groups), self._pd(problem, config).weights_md(), device.pool)
        used = [i for i in (2, 3) if problem.inputs[i] is not None]
        if not used:

            def launch(inputs: Any, outputs: Any) -> None:
                packed = pack(inputs[1])
                run(inputs[0].ptr, packed.ptr, outputs[0].ptr)
        else:

            def launch(inputs: Any, outputs: Any) -> None:
                packed = pack(inputs[1])
                run(inputs[0].ptr, packed.ptr, outputs[0].ptr, *[inputs[i].ptr for i in used])

        return launch


@kernel
class Conv2dInputGrad(Convolution):
    id = "cpu.conv2d_input_grad.onednn"
    op = "conv2d_input_grad"

    def describe(self, problem: Problem) -> PrimitiveDesc:
        g, w = problem.inputs
        x, c = problem.outputs[0], problem.attrs.conv
        assert g is not None and w is not None
        hint = _hint(c, x, w, g, runtime.get_num_threads())
        weights = _any(_weights(w, c.groups))
        return capi.convolution_backward_data(_DIRECT, describe(x), weights, describe(g), hint=hint, **_window(c))

    def work(self, problem: Problem) -> int:
        return _work(*problem.inputs)  # type: ignore[arg-type]

    def operands(self, problem: Problem, pd: PrimitiveDesc) -> list[Operand]:
        return [
            Operand(ARG_DIFF_DST, pd.diff_dst_md()),
            Operand(ARG_WEIGHTS, pd.weights_md()),
            Operand(ARG_DIFF_SRC, pd.diff_src_md()),
        ]

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        w = problem.inputs[1]
        assert w is not None
        run = self.run(problem, config, device)
        pack = Packer(_weights(w, problem.attrs.conv.groups), self._pd(problem, config).weights_md(), device.pool)

        def launch(inputs: Any, outputs: Any) -> None:
            packed = pack(inputs[1])
            run(inputs[0].ptr, packed.ptr, outputs[0].ptr)

        return launch


@kernel
class Conv2dWeightGrad(Convolution):
    id = "cpu.conv2d_weight_grad.onednn"
    op = "conv2d_weight_grad"

    def describe(self, problem: Problem) -> PrimitiveDesc:
        x, g = problem.inputs
        w, c = problem.outputs[0], problem.attrs.conv
        assert x is not None and g is not None
        hint = _hint(c, x, w, g, runtime.get_num_threads())
        weights, bias = _any(_weights(w, c.groups)), _bias(g) if problem.attrs.bias else None
        return capi.convolution_backward_weights(_DIRECT, describe(x), weights, bias, describe(g), hint=hint, **_window(c))

    def known_wrong(self, problem: Problem, implementation: str) -> list[str]:
        x = problem.inputs[0]
        if "jit_1x1:avx2" in implementation and max(problem.attrs.conv.stride) > 1 and x is not None and x.shape[1] < 8:
            return ["oneDNN's AVX2 1x1 weight gradient is wrong with a stride and fewer than 8 input channels"]
        return []

    def work(self, problem: Problem) -> int:
        return _work(problem.inputs[1], problem.outputs[0])  # type: ignore[arg-type]

    def operands(self, problem: Problem, pd: PrimitiveDesc) -> list[Operand]:
        a = problem.attrs
        out = [Operand(ARG_SRC, pd.src_md()), Operand(ARG_DIFF_DST, pd.diff_dst_md())]
        out.append(Operand(ARG_DIFF_WEIGHTS, pd.diff_weights_md(), _weights(problem.outputs[0], a.conv.groups)))
        if a.bias:
            out.append(Operand(ARG_DIFF_BIAS, pd.diff_weights_md(1)))
        return out

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        run = self.run(problem, config, device)

        def launch(inputs: Any, outputs: Any) -> None:
            run(*[b.ptr for b in (*inputs, *outputs)])

        return launch
