"""Batch and layer normalisation by oneDNN, relu and relu6 fused in training with a bit per element kept for the gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, Config, Kernel, Launch, Problem, Spec, kernel
from tilewright.devices.cpu.numpy._blocks import split
from tilewright.devices.cpu.numpy.norm import activate, train
from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import attempt, describe, refuse
from tilewright.devices.cpu.onednn.capi import (
    ARG_DIFF_DST,
    ARG_DIFF_SCALE,
    ARG_DIFF_SHIFT,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_VARIANCE,
    ARG_WORKSPACE,
    BACKWARD,
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    FUSE_NORM_RELU,
    USE_GLOBAL_STATS,
    USE_SCALE,
    USE_SHIFT,
    PrimitiveDesc,
)


def _refuse(problem: Problem, x: Spec, w: Any, b: Any) -> list[str]:
    reasons = refuse(problem, ("float32", "uint8"))
    if not reasons and x.ndim not in (2, 4):
        reasons = ["only (N, C) and (N, C, H, W) are given to oneDNN"]
    if not reasons and (w is None) != (b is None):
        reasons = ["weight and bias must both be there or both be absent"]
    if not reasons and x.layout != CHANNELS_LAST and x.ndim == 4 and x.shape[2:] != (1, 1):
        reasons = ["the operand must lie channels-last"]
    return reasons


def _train(a: Any, x: Spec, affine: bool) -> PrimitiveDesc:
    flags = (USE_SCALE | USE_SHIFT if affine else 0) | (FUSE_NORM_RELU if a.activation else 0)
    return capi.batch_normalization_forward(FORWARD_TRAINING, describe(x), describe(x), a.eps, flags)


def _workspace(pd: PrimitiveDesc, x: Spec, masked: Any) -> list[str]:
    """The mask is a bit per element in memory order; implementations that keep something else are not used."""
    held = pd.workspace_md
    wanted = -(-x.size // 8) if masked else 0
    size = 0 if held is None else held.nbytes
    return [] if size == wanted else [f"its workspace has {size} bytes, not the {wanted} of a bit per element"]


def _cap(y: np.ndarray, mask: np.ndarray) -> None:
    """Make relu's result and mask those of relu6. A normalised value of 6 is rare, so most blocks are only read."""
    n = y.size

    def piece(i: int, j: int) -> None:
        i, j = i & ~7, n if j == n else j & ~7  # whole bytes of the mask
        v = y[i:j]
        if v.max(initial=0) >= 6:
            mask[i // 8 : -(-j // 8)] &= ~np.packbits(v >= 6, bitorder="little")
            np.minimum(v, 6, out=v)

    split(n, piece)


# oneDNN sums in float32, which puts its mean off by about 4e-6 of itself, and its fused relu turns NaN into 0. The
# statistics tell: where a mean is this many deviations from zero, or not finite, NumPy does it all again in float64.
FAR = 100.0


def _sound(a: Any, mean: np.ndarray, var: np.ndarray, weight: Any, bias: Any) -> bool:
    with np.errstate(all="ignore"):
        near = np.logical_and.reduce(mean * mean <= FAR * FAR * var + np.float32(FAR * FAR * a.eps))
        # A NaN or an infinity makes the product one too, and an overflow costs time only
        return bool(near) and (weight is None or math.isfinite(weight.dot(bias)))


@kernel
class BatchNormTrain(Kernel):
    id = "cpu.batch_norm_train.onednn"
    op = "batch_norm_train"
    device = "cpu"
    rank = 10
    tolerance = 8.0

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, w, b = problem.inputs
        assert x is not None
        reasons = _refuse(problem, x, w, b) or attempt(lambda: _train(problem.attrs, x, w is not None))
        return reasons or _workspace(_train(problem.attrs, x, w is not None), x, problem.attrs.activation)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, w, _ = problem.inputs
        assert x is not None
        pd = _train(problem.attrs, x, w is not None)
        vector = describe(problem.outputs[1])
        arguments = [(ARG_SRC, describe(x)), (ARG_DST, describe(x)), (ARG_MEAN, vector), (ARG_VARIANCE, vector)]
        if problem.attrs.activation:
            assert pd.workspace_md is not None
            arguments.append((ARG_WORKSPACE, pd.workspace_md))
        if w is not None:
            arguments += [(ARG_SCALE, vector), (ARG_SHIFT, vector)]
        run = runtime.bind(pd, arguments).run

        a, size, masked = problem.attrs, x.size, problem.attrs.activation is not None
        ndarray, f32, length = np.ndarray, np.float32, problem.outputs[1].shape

        def launch(inputs: Any, outputs: Any) -> None:
            given = [b.ptr for b in outputs] + [b.ptr for b in inputs[1:] if b is not None]
            run(inputs[0].ptr, *given)
            mean, var = ndarray(length, f32, outputs[1].raw), ndarray(length, f32, outputs[2].raw)
            affine = [ndarray(length, f32, b.raw) for b in inputs[1:]] if masked and w is not None else (None, None)
            if not _sound(a, mean, var, *affine):
                outs = [b.array(s) for b, s in zip(outputs, problem.outputs, strict=True)]
                with np.errstate(all="ignore"):
                    train(a, outs, *[None if b is None else b.array(s) for b, s in zip(inputs, problem.inputs, strict=True)])  # type: ignore[arg-type]
            elif a.activation == "relu6":
                _cap(np.ndarray((size,), np.float32, outputs[0].raw), outputs[3].raw[: -(-size // 8)])

        return launch


@kernel
class BatchNormGrad(Kernel):
    id = "cpu.batch_norm_grad.onednn"
    op = "batch_norm_grad"
    device = "cpu"
    rank = 10
    tolerance = 8.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x, a = problem.inputs[1], problem.attrs
        assert x is not None
        md = describe(x)
        flags = USE_SCALE | USE_SHIFT | (FUSE_NORM_RELU if a.activation else 0)
        return capi.batch_normalization_backward(BACKWARD, md, md, md, a.eps, flags, _train(a, x, True))

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, w = problem.inputs[1], problem.inputs[4]
        assert x is not None
        reasons = _refuse(problem, x, w, w)
        if not reasons and w is None:
            reasons = ["without a weight oneDNN gives no gradient of it"]
        return reasons or attempt(lambda: self._pd(problem)) or _workspace(self._pd(problem), x, problem.attrs.activation)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[1]
        assert x is not None
        pd = self._pd(problem)
        md, vector = describe(x), describe(problem.outputs[1])
        arguments = [(ARG_DIFF_DST, md), (ARG_SRC, md), (ARG_MEAN, vector), (ARG_VARIANCE, vector), (ARG_SCALE, vector)]
        if problem.attrs.activation:
            assert pd.workspace_md is not None
            arguments.append((ARG_WORKSPACE, pd.workspace_md))
        arguments += [(ARG_DIFF_SRC, md), (ARG_DIFF_SCALE, vector), (ARG_DIFF_SHIFT, vector)]
        run = runtime.bind(pd, arguments).run

        def launch(inputs: Any, outputs: Any) -> None:
            run(*[b.ptr for b in inputs if b is not None], *[b.ptr for b in outputs])

        return launch


@kernel
class BatchNormInfer(Kernel):
    id = "cpu.batch_norm_infer.onednn"
    op = "batch_norm_infer"
    device = "cpu"
    rank = 10
    tolerance = 8.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x, _, _, w, _ = problem.inputs
        assert x is not None
        flags = USE_GLOBAL_STATS | (USE_SCALE | USE_SHIFT if w is not None else 0)
        return capi.batch_normalization_forward(FORWARD_INFERENCE, describe(x), describe(x), problem.attrs.eps, flags)

    def reject(self, problem: Problem, device: Any) -> list[str]:
        x, _, _, w, b = problem.inputs
        assert x is not None
        return _refuse(problem, x, w, b) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, m, _, w, _ = problem.inputs
        assert x is not None and m is not None
        vector = describe(m)
        arguments = [(ARG_SRC, describe(x)), (ARG_MEAN, vector), (ARG_VARIANCE, vector)]
        if w is not None:
            arguments += [(ARG_SCALE, vector), (ARG_SHIFT, vector)]
        run = runtime.bind(self._pd(problem), [*arguments, (ARG_DST, describe(x))]).run

        name, size = problem.attrs.activation, x.size

        def launch(inputs: Any, outputs: Any) -> None:
            run(*[b.ptr for b in inputs if b is not None], outputs[0].ptr)
            if name is not None:  # not by oneDNN, whose relu and clip would turn NaN into 0
                y = np.ndarray((size,), np.float32, outputs[0].raw)
                split(size, lambda i, j: activate(name, y[i:j]))

        return launch


@kernel
class Standardize(Kernel):
    id = "cpu.standardize.onednn"
    op = "standardize"
    device = "cpu"
    rank = 10
    tolerance = 8.0

    def _pd(self, problem: Problem) -> PrimitiveDesc:
        x = problem.inputs[0]
        assert x is not None
        return capi.layer_normalization_forward(
            FORWARD_TRAINING, describe(x), describe(x), describe(problem.outputs[1]), problem.attrs, 0
        )  # fmt: skip

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return refuse(problem) or attempt(lambda: self._pd(problem))

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        stat, eps = describe(problem.outputs[1]), problem.attrs
        run = runtime.bind(self._pd(problem), [(ARG_SRC, describe(x)), (ARG_DST, describe(x)), (ARG_MEAN, stat), (ARG_VARIANCE, stat)]).run
        take, nbytes, out = device.pool.take, problem.outputs[1].nbytes, problem.outputs[1]

        def launch(inputs: Any, outputs: Any) -> None:
            mean, rstd = take(nbytes), outputs[1]
            run(inputs[0].ptr, outputs[0].ptr, mean.ptr, rstd.ptr)
            v = rstd.array(out)
            np.divide(1, np.sqrt(v + np.float32(eps)), out=v)

        return launch
