"""Whether a candidate computes a problem right: only one that does may win.

It runs on random data of this very problem, its buffers between guard zones, its outputs filled with NaN beforehand, and
is compared with the op's own definition in float64. What is costly - the data, the reference - is made once for a
problem (`Material`) and shared by all its candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Spec, spec
from tilewright.errors import KernelError, OutOfMemory

GUARD = 4096  # bytes of known pattern on either side of a buffer: a multiple of any device's alignment
AROUND_OUTPUT = 0xA5
AROUND_INPUT = 0xFF  # NaN in every floating type, so that what is read there shows in the result
FILLS = (0xFF, 0x7F)  # what outputs hold beforehand: NaN and a huge number, or -1 and 127
STRETCH = 999983  # random numbers drawn for one operand; a larger one repeats them (a prime, so at no stride of its own)
WHOLE = 1 << 16  # elements up to which an output is compared everywhere
SOME = 4096  # elements compared at random places of a larger one
RANDOM = 128  # and of one whose reference is costly, so that it is taken at these places only
PRODUCTS = 1 << 22  # products that all of them together may cost
STRAY = "it wrote"  # how the reasons begin that tell of a write outside the candidate's own buffers
AGAIN = 8 << 20  # bytes of output up to which a candidate is launched a second time


class Checked(NamedTuple):
    """`status`: "ok", "wrong", "failed" (it raised) or "over-limit" (of memory); `reason`: a sentence, empty for "ok";
    `seconds`: the shortest launch seen."""

    status: str
    reason: str = ""
    seconds: float | None = None


class Expected(NamedTuple):
    """What one output must be: `values` at the places `at` (an index for NumPy; `...` for everywhere), of which `largest` is
    the greatest in size; `finite`: as far as is known it is so everywhere."""

    at: Any
    values: np.ndarray
    largest: float
    finite: bool


class Material:
    """Random operands of a problem and what its outputs must be.

    op: the problem's op (`samples`, `operands`, `reference`, `reference_at` and `terms` are used). Operands are those of
    `op.operands`, else drawn as its most similar sample draws its own: floats standard normal if that says nothing else,
    indices within its range. The same seed gives the same data. Raises KernelError where the reference does not take what was drawn.
    """

    def __init__(self, op: Any, problem: Problem, seed: int = 0) -> None:
        self.problem = problem
        self.terms: int = 1 if op.terms is None else op.terms(problem.attrs, *problem.inputs)
        args = _args(op, problem)
        self._given = {} if op.operands is None else op.operands(problem.attrs, *problem.inputs)
        try:
            self._draw(args, seed)
            self.expected = self._reference(op, seed)
        except (IndexError, ValueError):  # an index beyond this problem's sizes: take the lowest alone
            try:
                self._draw([a if a is None or a.fill != "int" else replace(a, high=a.low + 1) for a in args], seed)
                self.expected = self._reference(op, seed)
            except (IndexError, ValueError) as error:
                raise KernelError(f"no random operands for {problem} could be made: {error}") from error
        self._buffers: dict[Device, list[Any]] = {}

    def _draw(self, args: list[Any], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.blocks: list[np.ndarray | None] = []  # each operand's bytes between its guards
        self.values: list[np.ndarray | None] = []  # the same memory as the operand's array
        for i, (arg, s) in enumerate(zip(args, self.problem.inputs, strict=True)):
            if s is None:
                self.blocks.append(None)
                self.values.append(None)
                continue
            block = _block(s.nbytes, AROUND_INPUT)
            if i in self._given:
                _array(block, s)[...] = self._given[i]
            else:
                fill = "normal" if arg.fill == "distinct" and s.dtype.itemsize < 4 else arg.fill  # half types cannot count so far
                drawn = replace(arg, shape=(min(s.size, STRETCH),), dtype=s.dtype.name, layout="contiguous", fill=fill).array(rng)
                _inside(block, s.nbytes).view(s.dtype.np)[...] = np.resize(drawn, s.size)
            self.blocks.append(block)
            self.values.append(_array(block, s))

    def _reference(self, op: Any, seed: int) -> list[Expected]:
        problem = self.problem
        rng = np.random.default_rng(seed)
        found = []
        if op.reference_at is not None:
            for k, s in enumerate(problem.outputs):
                places = positions(s.shape, rng, min(RANDOM, max(24, PRODUCTS // self.terms)))
                found.append(_expect(tuple(places.T), op.reference_at(problem.attrs, self.values, k, places)))
            return found
        images = _few_images(op, problem, rng)
        outs = _apply(op, problem.attrs, self.values, images)
        for s, out in zip(problem.outputs, outs, strict=True):
            if images is None and s.size <= WHOLE:
                found.append(_expect(..., out))
                continue
            at = tuple(positions(out.shape, rng, SOME).T)
            finite = bool(np.isfinite(out).all())
            found.append(_expect(at if images is None else (images[at[0]], *at[1:]), out[at])._replace(finite=finite))
        return found

    def on(self, device: Device) -> list[Any]:
        """The operands' buffers on a device (None for an absent one), each between guards."""
        found = self._buffers.get(device)
        if found is None:
            found = self._buffers[device] = [
                None if b is None or s is None else _upload(device, b).view(GUARD, s.nbytes)
                for b, s in zip(self.blocks, self.problem.inputs, strict=True)
            ]
        return found

    def spoilt(self, device: Device) -> str | None:
        """Which operand a launch has changed, or the memory beside it; the operands are made anew then."""
        for i, (buffer, block, s) in enumerate(zip(self.on(device), self.blocks, self.problem.inputs, strict=True)):
            if block is None or s is None:
                continue
            now = _bytes(device, buffer.keep, block.size)
            if not np.array_equal(now, block):
                within = not np.array_equal(_inside(now, s.nbytes), _inside(block, s.nbytes))
                del self._buffers[device]
                return f"it changed input {i}" if within else f"{STRAY} beside input {i}"
        return None

    def allowed(self, s: Spec, expected: Expected, tolerance: float) -> float:
        """Absolute error allowed in an output: the rounding of its type, over sums of so many terms, at its own size.

        The same bound as the kernels' contract tests. Half types are summed in float32, so that the length of a sum adds
        nothing to what their own rounding costs.
        """
        if not s.dtype.is_floating:
            return 0.0
        eps = s.dtype.eps
        worst = 16 * eps if s.dtype.itemsize < 4 else eps * (16 + 4 * math.sqrt(self.terms))
        return worst * max(1.0, expected.largest) * tolerance


def _expect(at: Any, values: np.ndarray) -> Expected:
    finite = np.isfinite(values)
    sizes = np.abs(values[finite]) if values.dtype.kind == "f" else np.zeros(0)
    return Expected(at, values, float(sizes.max(initial=0.0)), bool(finite.all()))


def _apply(op: Any, attrs: Any, values: list[Any], images: np.ndarray | None = None) -> list[np.ndarray]:
    """The op's reference in float64, on all images (places along the first axis) of the operands or on some."""
    wide = []
    most = max((v.ndim for v in values if v is not None), default=0)
    for v in values:
        if v is not None and images is not None and v.ndim == most and v.shape[0] > 1:
            v = v[images]
        wide.append(v if v is None or v.dtype.kind in "iub" else v.astype(np.float64))
    with np.errstate(all="ignore"):
        outs = op.reference(attrs, *wide)
    return [np.asarray(o) for o in (outs if isinstance(outs, tuple) else (outs,))]


def _few_images(op: Any, problem: Problem, rng: np.random.Generator) -> np.ndarray | None:
    """Of a large batch, the images that are compared: the first, the last and one between. None: the whole."""
    n = _batch(problem.inputs, problem.outputs)
    if n < 4 or sum(s.size for s in problem.outputs) <= WHOLE or not _by_image(op):
        return None
    return np.array([0, rng.integers(1, n - 1), n - 1])


def _batch(inputs: Any, outputs: Any) -> int:
    """How many images there are; 0 where the operands' and results' first axes do not fit one count."""
    n = outputs[0].shape[0] if outputs and outputs[0].shape else 0
    most = max((s.ndim for s in inputs if s is not None), default=0)
    first = {s.shape[0] for s in inputs if s is not None and s.ndim == most and most}
    fits = first <= {n, 1} and n in first and all(s.ndim == most and s.shape[0] == n for s in outputs)
    return n if fits else 0


@lru_cache(maxsize=256)
def _by_image(op: Any) -> bool:
    """Whether an op treats each image by itself, as its own samples show: each image's result is that of the image alone."""
    shown = False
    for sample in op.samples():
        specs = [None if a is None else a.spec for a in sample.inputs]
        outs = op.outputs(sample.attrs, *specs)
        if outs[0].ndim == 0 or any(s is not None and s.size == 0 for s in (*specs, *outs)):
            continue
        n = _batch(specs, outs)
        if n == 0:  # some attributes change the first axis
            return False
        if n == 1:
            continue
        rng = np.random.default_rng(0)
        values = [None if a is None else a.array(rng) for a in sample.inputs]
        whole = _apply(op, sample.attrs, values)
        for i in {0, n // 2, n - 1}:
            try:
                alone = _apply(op, sample.attrs, values, np.array([i]))
            except (ValueError, IndexError):  # its attributes name the whole batch
                return False
            if any(a.shape[:1] != (1,) or not np.allclose(w[i], a[0], 1e-12, 1e-12, equal_nan=True) for w, a in zip(whole, alone, strict=True)):
                return False
        shown = True
    return shown


def positions(shape: tuple[int, ...], rng: np.random.Generator, count: int) -> np.ndarray:
    """Distinct places (P, ndim) of an array: every corner, some on every face, and `count` at random.

    A kernel that is wrong where a tile ends, or at the padding, is wrong on some face.
    """
    if 0 in shape:
        return np.empty((0, len(shape)), np.int64)
    if math.prod(shape) <= count:
        return np.array(list(np.ndindex(*shape)), np.int64).reshape(math.prod(shape), len(shape))
    ends = [sorted({0, s - 1}) for s in shape]
    anywhere = rng.integers(0, shape, (count + 4 * len(shape), len(shape)))
    for axis, s in enumerate(shape):  # two on either face of an axis
        anywhere[count + 4 * axis : count + 4 * axis + 4, axis] = (0, s - 1, 0, s - 1)
    return np.unique(np.concatenate([np.array(list(product(*ends)), np.int64), anywhere]), axis=0)


def check(
    problem: Problem,
    device: Device,
    kernel: Kernel,
    config: Config,
    launch: Launch,
    material: Material,
    *,
    patience_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Checked:
    """Launch a candidate on `material` and say whether all it did was right.

    It must leave its operands and the guard zones as they were, write every element, give no NaN or infinity that the
    reference does not give, and agree with the reference within the op's error bound times `kernel.tolerance`. It is
    launched twice on outputs filled differently, and the results of a deterministic kernel must be equal bit for bit.
    The second launch is left out after a first one longer than `patience_s`, and for outputs beyond 8 MiB.
    """
    inputs = material.on(device)
    results: list[list[np.ndarray]] = []
    held = []  # the buffers, as long as their memory is looked at
    shortest = math.inf
    trouble = changed = None
    once = sum(s.nbytes for s in problem.outputs) > AGAIN
    for fill in FILLS:
        blocks = [_blank(device, s.nbytes, fill) for s in problem.outputs]
        held.append(blocks)
        outputs = [b.view(GUARD, s.nbytes) for b, s in zip(blocks, problem.outputs, strict=True)]
        try:
            seconds = device.seconds(lambda: launch(inputs, outputs), clock)  # noqa: B023  (run at once)
        except OutOfMemory as error:
            trouble = Checked("over-limit", str(error))
        except Exception as error:
            trouble = Checked("failed", describe(error))
        changed = material.spoilt(device)  # asked for even where the launch raised: the next candidate needs them whole
        if trouble is not None:
            return trouble
        results.append([_bytes(device, b, s.nbytes + 2 * GUARD) for b, s in zip(blocks, problem.outputs, strict=True)])
        shortest = min(shortest, seconds)
        if changed or once or seconds > patience_s:
            break
    reason = changed or next(_faults(problem, kernel, results, material), None)
    return Checked("ok", "", shortest) if reason is None else Checked("wrong", reason, shortest)


def describe(error: BaseException) -> str:
    """An exception as a reason: its type and first line."""
    text = str(error).strip().splitlines()
    return f"it raised {type(error).__name__}{': ' + text[0] if text else ''}"


def _faults(problem: Problem, kernel: Kernel, results: list[list[np.ndarray]], material: Material) -> Iterator[str]:
    """What is wrong with the blocks left by each launch, one sentence a fault."""
    for blocks in results:
        for k, (block, s) in enumerate(zip(blocks, problem.outputs, strict=True)):
            if (block[:GUARD] != AROUND_OUTPUT).any():
                yield f"{STRAY} before the start of output {k}"
            if (block[GUARD + s.nbytes :] != AROUND_OUTPUT).any():
                yield f"{STRAY} past the end of output {k}"
    for k, s in enumerate(problem.outputs):
        left = None
        for blocks, fill in zip(results, FILLS, strict=False):
            word = int.from_bytes(bytes([fill]) * s.dtype.itemsize)
            same = _inside(blocks[k], s.nbytes).view(f"u{s.dtype.itemsize}") == word
            left = same if left is None else left & same
        # After one launch, an integer that equals the filling may well have been written.
        if left is not None and left.any() and (len(results) > 1 or s.dtype.is_floating):
            yield f"it left {int(left.sum())} of the {s.size} elements of output {k} unwritten"
    exact = kernel.deterministic and len(results) > 1
    floating = any(s.dtype.is_floating for s in problem.outputs)
    for blocks in results[:1] if exact else results:
        for k, (block, s, expected) in enumerate(zip(blocks, problem.outputs, material.expected, strict=True)):
            fault = _disagreement(_array(block, s), s, expected, material.allowed(s, expected, kernel.tolerance), floating)
            if fault is not None:
                yield f"output {k} {fault}"
    if exact and any(not np.array_equal(a, b) for a, b in zip(*results, strict=True)):
        yield "two launches differ, and the kernel is said to be deterministic"


def _disagreement(got: np.ndarray, s: Spec, expected: Expected, allowed: float, beside: bool) -> str | None:
    """beside: an integer output of an op that has a floating one too, such as the bits of an activation that was fused: what
    was decided within a rounding error may turn out otherwise here and there."""
    if not s.dtype.is_floating:
        unlike = got[expected.at] != expected.values.astype(got.dtype)
        if np.count_nonzero(unlike) <= (1 + int(unlike.size * 1e-5) if beside else 0):
            return None
        return f"differs from the reference at {_place(unlike, expected)}"
    want = expected.values.astype(np.float64)
    if expected.finite and not np.isfinite(got).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(got))[0])
        return f"is {float(got[where])} at {where}"
    with np.errstate(all="ignore"):
        here = got[expected.at].astype(np.float64)
        error = np.where((here == want) | (np.isnan(here) & np.isnan(want)), 0.0, np.abs(here - want))
        unlike = ~(error <= allowed)  # NaN is unlike
    if not unlike.any():
        return None
    worst = float(np.max(error, initial=0.0))  # NaN where there is one
    return f"is {worst:.3g} from the reference, where {allowed:.3g} is allowed, first at {_place(unlike, expected)}"


def _place(unlike: np.ndarray, expected: Expected) -> tuple[int, ...]:
    first = np.argwhere(unlike)[0]
    return tuple(int(i) for i in first) if expected.at is ... else tuple(int(axis[first[0]]) for axis in expected.at)


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, tuple) else [value]


def _args(op: Any, problem: Problem) -> list[Any]:
    """How each operand is drawn: as in the op's sample that has the same operands, of like kind, rank and attributes."""
    attrs = _leaves(problem.attrs)

    def likeness(sample: Any) -> tuple[int, int, int]:
        pairs = list(zip(sample.inputs, problem.inputs, strict=False))
        fits = len(sample.inputs) == len(problem.inputs) and all(
            (a is None) == (s is None) and (a is None or s is None or (a.spec.dtype.kind == s.dtype.kind)) for a, s in pairs
        )
        ranks = sum(a is not None and s is not None and len(a.shape) == s.ndim for a, s in pairs)
        return fits, sum(a == b for a, b in zip(_leaves(sample.attrs), attrs, strict=False)), ranks

    samples = sorted(op.samples(), key=likeness, reverse=True)
    found = []
    for i, s in enumerate(problem.inputs):
        kind = None if s is None else s.dtype.kind
        arg = next((a for m in samples if i < len(m.inputs) and (a := m.inputs[i]) is not None and a.spec.dtype.kind == kind), None)
        if s is not None and arg is None:  # no sample has this operand, or none of this kind
            some = next((a for m in samples for a in m.inputs if a is not None), None)
            if some is None:
                raise KernelError(f"no random operands for {problem} could be made: {op.name} has no sample to draw them like")
            arg = replace(some, fill="normal", dtype=s.dtype.name)  # which draws small integers for an integer type
        found.append(arg)
    return found


def _block(nbytes: int, around: int, fill: int = 0) -> np.ndarray:
    block = np.full(nbytes + 2 * GUARD, around, np.uint8)
    block[GUARD : GUARD + nbytes] = fill
    return block


def _inside(block: np.ndarray, nbytes: int) -> np.ndarray:
    return block[GUARD : GUARD + nbytes]


def _array(block: np.ndarray, s: Spec) -> np.ndarray:
    return np.ndarray(s.shape, s.dtype.np, block, GUARD, s.strides) if s.size else np.empty(s.shape, s.dtype.np)


def _upload(device: Device, block: np.ndarray) -> Any:
    return device.upload(block, spec(block.shape, "uint8"))


def _blank(device: Device, nbytes: int, fill: int) -> Any:
    """A new buffer for an output between guards, every byte of it `fill`; its view from GUARD on is the output."""
    buffer = device.allocate(nbytes + 2 * GUARD)
    raw = getattr(buffer, "raw", None)
    if raw is None:
        return _upload(device, _block(nbytes, AROUND_OUTPUT, fill))
    raw[:GUARD] = raw[GUARD + nbytes : nbytes + 2 * GUARD] = AROUND_OUTPUT
    raw[GUARD : GUARD + nbytes] = fill
    return buffer


def _bytes(device: Device, buffer: Any, nbytes: int) -> np.ndarray:
    """What a buffer holds: where it lies in host memory (`raw`) no copy, which for a large one takes longer than a launch."""
    raw = getattr(buffer, "raw", None)
    return device.download(buffer, spec((nbytes,), "uint8")) if raw is None else raw[:nbytes]
