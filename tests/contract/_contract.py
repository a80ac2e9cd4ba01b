"""The contracts of the design, as checks on any op or kernel: the tests walk the registries and call these."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from tilewright import devices
from tilewright.autograd import grad
from tilewright.devices.api import Kernel, Problem, Spec, spec
from tilewright.dtypes import float64
from tilewright.ops._call import call
from tilewright.ops._op import Op, Sample
from tilewright.tensor import tensor

GUARD = 4096  # bytes of known pattern on either side of every buffer: a multiple of any device's alignment
PATTERN = 0xA5


class Violation(AssertionError):
    """A contract that does not hold."""


def arrays(sample: Sample, seed: int = 0, dtype: Any = None) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [None if a is None else a.array(rng, dtype) for a in sample.inputs]


def specs(sample: Sample, dtype: Any = None) -> list[Spec | None]:
    out: list[Spec | None] = []
    for a in sample.inputs:
        s = None if a is None else a.spec
        out.append(s if s is None or dtype is None or not s.dtype.is_floating else s.like(dtype=dtype))
    return out


def is_float(a: np.ndarray) -> bool:
    return a.dtype.kind == "f" or a.dtype.name == "bfloat16"


def reference(op: Op, sample: Sample, values: list[Any]) -> tuple[np.ndarray, ...]:
    """The op's reference in float64."""
    wide = [None if v is None else v.astype(np.float64) if is_float(v) else v for v in values]
    with np.errstate(all="ignore"):
        out = op.reference(sample.attrs, *wide)
    return tuple(np.asarray(o) for o in (out if isinstance(out, tuple) else (out,)))


# -- ops ---------------------------------------------------------------------------------------------------------------


def check_infer(op: Op, sample: Sample) -> None:
    """The shape rule agrees with the reference."""
    inferred = op.outputs(sample.attrs, *specs(sample))
    real = reference(op, sample, arrays(sample))
    if tuple(s.shape for s in inferred) != tuple(r.shape for r in real):
        raise Violation(f"{op.name} {sample.note}: infer says {inferred} and the reference gives {[r.shape for r in real]}")


def check_gradient(op: Op, sample: Sample, directions: int = 2) -> None:
    """The gradient agrees with central differences in float64, along random directions and at single elements."""
    values = arrays(sample, dtype=float64)
    lies = specs(sample, float64)
    floats = [i for i, v in enumerate(values) if v is not None and is_float(v)]
    if not floats or any(v is not None and v.size == 0 for v in values):
        return
    rng = np.random.default_rng(1)

    def run(changed: list[Any], track: bool) -> tuple[list[Any], Any]:
        ts = [None if v is None else tensor(v, layout=lies[i].layout) for i, v in enumerate(changed)]  # type: ignore[union-attr]
        if track:
            for i in floats:
                ts[i].requires_grad_()  # type: ignore[union-attr]
        return ts, call(op, tuple(ts), sample.attrs)

    ts, out = run(values, True)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    if not outs:
        raise Violation(f"{op.name} {sample.note}: no output requires a gradient though inputs do")
    weights = [rng.standard_normal(o.shape) for o in outs]
    kept = [i for i, o in enumerate(out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    if len(outs) > 1:  # only outputs that are differentiable by the op's own word count: those whose weight reaches an input
        first = grad(outs[0], [ts[i] for i in floats], tensor(weights[0]), retain_graph=True, allow_unused=True)
        for k in range(1, len(outs)):
            alone = grad(outs[k], [ts[i] for i in floats], tensor(weights[k]), retain_graph=True, allow_unused=True)
            if all(a is None for a in alone):
                weights[k][...] = 0
        del first
    gradients = grad(outs, [ts[i] for i in floats], [tensor(w) for w in weights], allow_unused=True)

    def loss(changed: list[Any]) -> float:
        _, o = run(changed, False)
        parts = o if isinstance(o, tuple) else (o,)
        return float(sum(np.sum(parts[k].numpy() * w) for k, w in zip(kept, weights, strict=True)))

    eps = 1e-6
    for i, g in zip(floats, gradients, strict=True):
        if g is None:
            continue  # declared as without a gradient; node.needs decides, and the op's vjp returned None
        if g.shape != values[i].shape:
            raise Violation(f"{op.name} {sample.note}: the gradient of input {i} has shape {g.shape} and the input {values[i].shape}")
        for d in range(directions + 1):
            v = np.zeros(values[i].shape)
            if d < directions:
                v = rng.standard_normal(values[i].shape)
            else:
                v.reshape(-1)[rng.integers(v.size)] = 1.0
            up, down = list(values), list(values)
            up[i], down[i] = values[i] + eps * v, values[i] - eps * v
            expected = (loss(up) - loss(down)) / (2 * eps)
            got = float(np.sum(g.numpy() * v))
            scale = max(1.0, abs(expected), float(np.abs(g.numpy() * v).sum()) * 1e-2)
            if not abs(got - expected) <= 2e-5 * scale:
                raise Violation(f"{op.name} {sample.note} {sample.attrs}: input {i}: gradient {got:.9g}, differences {expected:.9g}")


def check_needs(op: Op, sample: Sample) -> None:
    """Asking for one input's gradient gives only that one."""
    values = arrays(sample, dtype=float64)
    lies = specs(sample, float64)
    floats = [i for i, v in enumerate(values) if v is not None and is_float(v)]
    if len(floats) < 2:
        return
    for wanted in floats:
        ts = [None if v is None else tensor(v, layout=lies[i].layout) for i, v in enumerate(values)]  # type: ignore[union-attr]
        ts[wanted].requires_grad_()  # type: ignore[union-attr]
        try:
            out = call(op, tuple(ts), sample.attrs)
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            node = outs[0]._node
            back = op.vjp(node, *[tensor(np.ones(s.shape), layout=s.layout) if s.dtype.is_floating else None for s in node.out_specs])  # type: ignore[misc]
        except Exception as error:
            if "has no gradient" in str(error):
                continue
            raise
        back = back if isinstance(back, tuple) else (back,)
        extra = [i for i, g in enumerate(back) if g is not None and i != wanted]
        if extra:
            raise Violation(f"{op.name} {sample.note}: the gradient of input {wanted} was asked for and vjp also computed those of {extra}")


# -- kernels -----------------------------------------------------------------------------------------------------------


def bound(op: Op, kernel: Kernel, problem: Problem, of: Spec, ref: np.ndarray) -> float:
    """Absolute error allowed in an output: rounding of its type, over sums of so many terms, at its own size."""
    if not of.dtype.is_floating:
        return 0.0
    terms = op.terms(problem.attrs, *problem.inputs) if op.terms is not None else 1
    eps = of.dtype.eps
    # Half types accumulate in float32, so the length of a sum adds nothing to what their own rounding costs.
    worst = 16 * eps if of.dtype.itemsize < 4 else eps * (16 + 4 * math.sqrt(terms))
    finite = np.abs(ref[np.isfinite(ref)])
    return worst * max(1.0, float(finite.max()) if finite.size else 1.0) * kernel.tolerance


def _guarded(device: Any, nbytes: int, content: Any) -> tuple[Any, Any]:
    """A buffer that holds `content` (bytes, or one byte's value) between guards, and the view of it."""
    block = np.full(nbytes + 2 * GUARD, PATTERN, np.uint8)
    block[GUARD : GUARD + nbytes] = content
    outer = device.upload(block, spec(block.shape, "uint8"))
    return outer, outer.view(GUARD, nbytes)


def _around(device: Any, outer: Any, nbytes: int) -> tuple[bool, np.ndarray]:
    """Whether the guards are as they were, and the bytes between them."""
    block = device.download(outer, spec((nbytes + 2 * GUARD,), "uint8"))
    intact = (block[:GUARD] == PATTERN).all() and (block[GUARD + nbytes :] == PATTERN).all()
    return bool(intact), block[GUARD : GUARD + nbytes]


def _laid(block: np.ndarray, s: Spec) -> np.ndarray:
    return np.ndarray(s.shape, s.dtype.np, block, 0, s.strides)


# Where a definition leaves open what NaN and infinity give: the inputs meant, and why.
NO_SPECIALS: dict[str, tuple[tuple[int, ...], str]] = {
    "conv2d": ((1,), "an infinite weight times the zero padding"),
    "conv2d_input_grad": ((1,), "an infinite weight times the zero padding"),
    "conv2d_weight_grad": ((1,), "an infinite gradient times the zero padding"),
    "cross_entropy": ((2,), "an infinite weight times the 0 of another class"),
    "nll_loss": ((2,), "an infinite weight times the 0 of another class"),
    "cross_entropy_grad": ((0, 2, 3), "an infinite factor times probabilities that cancel"),
    "softmax_grad": ((1,), "a softmax's result is never infinite"),
    "gelu_grad": ((0,), "an infinite gradient times a derivative that underflows"),
    "adam_update": ((4,), "hyperparameters are checked by the optimizer"),
}
# What a kernel documents that it does otherwise there (tests/unit/test_fused.py holds it to that).
OWN_SPECIALS = {
    "cpu.conv2d.onednn": lambda a, dtype: a.activation is not None or dtype == "bfloat16",
    "cpu.conv2d.onednn_matmul": lambda a, dtype: a.activation is not None or dtype == "bfloat16",
    "cpu.conv2d.onednn_im2col": lambda a, dtype: a.activation is not None,
    "cpu.linear.onednn": lambda a, dtype: a.activation is not None,
}


def bilinear(sample: Sample) -> bool:
    """A weight of 0 may or may not be multiplied with an infinity."""
    attrs = getattr(sample.attrs, "resize", sample.attrs)
    return getattr(attrs, "mode", None) == "bilinear"


def specials(sample: Sample, op: Op) -> list[tuple[int, list[Any]]]:
    """The sample's values once for each float input that is not empty, with a NaN and both infinities laid into that one."""
    without = NO_SPECIALS.get(op.name, ((), ""))[0]
    rng, out = np.random.default_rng(2), []
    if bilinear(sample):
        return out
    for i, v in enumerate(arrays(sample)):
        if v is not None and is_float(v) and v.size and i not in without:
            values = arrays(sample)
            places = rng.permutation(v.size)[:3]
            values[i].reshape(-1)[places] = rng.permutation([np.nan, np.inf, -np.inf])[: len(places)]
            out.append((i, values))
    return out


def check_kernel(kernel: Kernel, op: Op, sample: Sample, device: Any, dtype: Any = None, values: Any = None) -> bool:
    """Run every config of a kernel on a sample between guards. False when it rejects the problem."""
    lies = specs(sample, dtype)
    values = arrays(sample, dtype=dtype) if values is None else values
    problem = Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))
    reasons = kernel.reject(problem, device)
    if not isinstance(reasons, list) or not all(isinstance(r, str) and r for r in reasons):
        raise Violation(f"{kernel.id}: reject must return a list of sentences and gave {reasons!r}")
    if reasons:
        return False
    refs = reference(op, sample, values)
    for config in kernel.configs(problem, device):
        launch = kernel.prepare(problem, config, device)
        ins: list[Any] = []
        guards: list[Any] = []
        for v, s in zip(values, lies, strict=True):
            if v is None or s is None:
                ins.append(None)
                continue
            block = np.empty(s.nbytes, np.uint8)
            np.copyto(_laid(block, s), v, casting="unsafe")
            outer, inner = _guarded(device, s.nbytes, block)
            guards.append((outer, s.nbytes, block))
            ins.append(inner)
        first: list[bytes] | None = None
        for fill in (0xFF, 0x7F):  # NaN and a huge number, or -1 and 127: what is not written shows
            made = [_guarded(device, s.nbytes, fill) for s in problem.outputs]
            launch(ins, [inner for _, inner in made])
            where = f"{kernel.id} {config} on {problem} ({sample.note})"
            blocks = []
            for (outer, _), s in zip(made, problem.outputs, strict=True):
                intact, block = _around(device, outer, s.nbytes)
                blocks.append(block)
                if not intact:
                    raise Violation(f"{where}: wrote outside an output")
            for outer, n, before in guards:
                intact, block = _around(device, outer, n)
                if not intact or not np.array_equal(block, before):
                    raise Violation(f"{where}: wrote to an input or beside it")
            for k, (block, s, ref) in enumerate(zip(blocks, problem.outputs, refs, strict=True)):
                with np.errstate(invalid="ignore"):  # a signalling NaN where nothing was written
                    got = _laid(block, s).astype(np.float64) if s.dtype.is_floating else _laid(block, s)
                if not s.dtype.is_floating:
                    if not np.array_equal(got, np.asarray(ref).astype(got.dtype)):
                        raise Violation(f"{where}: output {k} differs from the reference")
                    continue
                ref64 = ref.astype(np.float64)
                if not np.array_equal(np.isnan(got), np.isnan(ref64)):
                    raise Violation(f"{where}: output {k} has NaN elsewhere than the reference")
                same = (got == ref64) | np.isnan(ref64)
                with np.errstate(invalid="ignore"):
                    error = np.where(same, 0, np.abs(got - ref64))
                worst, allowed = float(error.max()) if error.size else 0.0, bound(op, kernel, problem, s, ref64)
                if not worst <= allowed:
                    raise Violation(f"{where}: output {k} is {worst:.3g} from the reference; {allowed:.3g} is allowed")
            result = [bytes(b) for b in blocks]
            if first is None:
                first = result
            elif kernel.deterministic and first != result:
                raise Violation(f"{where}: two runs differ, and the kernel is said to be deterministic")
    return True


def lacks(kernel: Kernel, op: Op, device: Any) -> str | None:
    """oneDNN's own refusal on this processor, where that is all that keeps a kernel from some sample."""
    for sample in op.samples():
        lies = specs(sample)
        reasons = kernel.reject(Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies)), device)
        if reasons and all(r.startswith(("oneDNN refuses", "oneDNN has only")) for r in reasons):
            return reasons[0]
    return None


def check_inplace(kernel: Kernel, op: Op, sample: Sample, device: Any) -> bool:
    """As check_kernel, with outputs on the inputs that `op.inplace` names."""
    lies, values = specs(sample), arrays(sample)
    problem = Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))
    if kernel.reject(problem, device):
        return False
    launch = kernel.prepare(problem, next(iter(kernel.configs(problem, device))), device)
    ins = [None if v is None else device.upload(v, s) for v, s in zip(values, lies, strict=True)]
    outs = [ins[op.inplace[i]] for i in range(len(problem.outputs))]
    launch(ins, outs)
    for k, (o, s, ref) in enumerate(zip(outs, problem.outputs, reference(op, sample, values), strict=True)):
        error = np.abs(device.download(o, s) - ref).max() if ref.size else 0.0
        if not error <= bound(op, kernel, problem, s, ref):
            raise Violation(f"{kernel.id} in place: output {k} is {error:.3g} from the reference")
    return True


def present() -> list[Any]:
    """The devices whose kernels are tested: the CPU and the first OpenCL device that works, or those that TILEWRIGHT_TEST_DEVICES names."""
    names = os.environ.get("TILEWRIGHT_TEST_DEVICES")
    if names is not None:
        return [devices.get(n) for n in names.split(",")]
    from tilewright.devices import opencl

    return [devices.get(n) for n in ("cpu", *opencl.names()[:1])]
