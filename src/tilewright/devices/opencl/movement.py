"""Copies and changes of shape, layout and place: bytes from one strided region to another, whatever their type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.devices.api import CONTIGUOUS, Config, Launch, Problem, Spec, register
from tilewright.devices.opencl import runtime
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import offset
from tilewright.devices.opencl.pointwise import merged
from tilewright.devices.opencl.program import launcher

_WORDS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}


def steps(s: Spec) -> list[int]:
    """Elements between neighbours along each axis."""
    return [b // s.dtype.itemsize for b in s.strides]


def mover(
    device: Any, itemsize: int, sizes: Sequence[int], x: Sequence[int], y: Sequence[int], x_base: int = 0, y_base: int = 0
) -> Callable[..., None]:
    """run(x, y): y[y_base + i . y] = x[x_base + i . x] for every place i of a box of these sizes."""
    order = sorted(range(len(sizes)), key=lambda k: -abs(y[k]))  # neighbours in y by neighbouring work-items
    sizes, (xs, ys) = merged([sizes[k] for k in order], [[x[k] for k in order], [y[k] for k in order]])
    rank, count = len(sizes), int(np.prod([int(n) for n in sizes], dtype=object))
    reach = max(count, *[abs(b) + sum(abs(s) * n for s, n in zip(st, sizes, strict=True)) for b, st in ((x_base, xs), (y_base, ys))])
    index, kind = ("int", np.int32) if reach < 2**31 - 2**16 else ("long", np.int64)
    code, names, (x_names, y_names) = offset("i", "r", rank, ("x", "y"))
    source = f"""
#define INDEX {index}
__kernel void move(__global const WORD *x, __global WORD *y, const INDEX n, const INDEX x_base, const INDEX y_base,
    {", ".join(f"const INDEX {name}" for name in [*names, *x_names, *y_names])}) {{
  const INDEX i = get_global_id(0);
  if (i >= n) return;
  {code}
  y[y_base + r_y] = x[x_base + r_x];
}}
"""
    scalars = [kind(v) for v in (count, x_base, y_base, *sizes[1:], *xs, *ys)]
    return launcher(device, source, "move", size=(count,), group=(64,), define={"WORD": _WORDS[itemsize]}, scalars=scalars, buffers=2)


def filler(device: Any, of: Spec, value: Any) -> Callable[[Any], None]:
    """run(y): every element becomes `value`."""
    if not of.nbytes:
        return lambda y: None
    cl = runtime.load()
    with np.errstate(all="ignore"):
        pattern = np.frombuffer(np.asarray(value).astype(of.dtype.np).tobytes(), np.uint8)

    def run(y: Any) -> None:
        try:
            with device.lock:
                event = cl.enqueue_fill_buffer(device.queue, y.mem, pattern, 0, of.nbytes)
                if device.events is not None:
                    device.events.append(event)
        except cl.Error as error:
            raise runtime.translate(error, device, "filling memory") from error

    return run


def copier(device: Any, nbytes: int) -> Callable[[Any, Any], None]:
    """run(x, y): so many bytes as they lie."""
    if not nbytes:
        return lambda x, y: None
    cl = runtime.load()

    def run(x: Any, y: Any) -> None:
        try:
            with device.lock:
                event = cl.enqueue_copy(device.queue, y.mem, x.mem, byte_count=nbytes)
                if device.events is not None:
                    device.events.append(event)
        except cl.Error as error:
            raise runtime.translate(error, device, "copying memory") from error

    return run


class Movement(ClKernel):
    """An op by make(problem, device), which gives its launch."""

    rank = 10

    def __init__(self, op: str, make: Callable[[Problem, Any], Launch]) -> None:
        self.op, self.id, self.make = op, f"opencl.{op}.move", make

    def reject(self, problem: Problem, device: Any) -> list[str]:
        return []  # bytes are moved as they are, whatever type they hold

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        return self.make(problem, device)


def _one(run: Callable[..., None]) -> Launch:
    return lambda inputs, outputs: run(inputs[0], outputs[0])


def _copy(problem: Problem, device: Any) -> Launch:
    return _one(copier(device, problem.outputs[0].nbytes))


def _first(problem: Problem) -> tuple[Spec, Spec]:
    x = problem.inputs[0]
    assert x is not None
    return x, problem.outputs[0]


def _reshape(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    whole = x.like(layout=CONTIGUOUS)  # as the result lies: in x's logical order
    return _one(mover(device, y.dtype.itemsize, x.shape, steps(x), steps(whole)))


def _expand(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    own = [0] * (y.ndim - x.ndim) + [0 if n == 1 else s for n, s in zip(x.shape, steps(x), strict=True)]
    return _one(mover(device, y.dtype.itemsize, y.shape, own, steps(y)))


def _permute(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    own = steps(x)
    return _one(mover(device, y.dtype.itemsize, y.shape, [own[a] for a in problem.attrs], steps(y)))


def _to_layout(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    return _one(mover(device, y.dtype.itemsize, y.shape, steps(x), steps(y)))


def _concat(problem: Problem, device: Any) -> Launch:
    y, runs, at = problem.outputs[0], [], 0
    for x in problem.inputs:
        assert x is not None
        runs.append(mover(device, y.dtype.itemsize, x.shape, steps(x), steps(y), 0, at * steps(y)[problem.attrs]))
        at += x.shape[problem.attrs]

    def run(inputs: Any, outputs: Any) -> None:
        for move, x in zip(runs, inputs, strict=True):
            move(x, outputs[0])

    return run


def _split(problem: Problem, device: Any) -> Launch:
    x, runs, at = problem.inputs[0], [], 0
    assert x is not None
    for y in problem.outputs:
        runs.append(mover(device, y.dtype.itemsize, y.shape, steps(x), steps(y), at * steps(x)[problem.attrs.axis], 0))
        at += y.shape[problem.attrs.axis]

    def run(inputs: Any, outputs: Any) -> None:
        for move, y in zip(runs, outputs, strict=True):
            move(inputs[0], y)

    return run


def _slice(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    own, axes = steps(x), problem.attrs.axes
    base = sum(start * s for (start, _, _), s in zip(axes, own, strict=True))
    return _one(mover(device, y.dtype.itemsize, y.shape, [s * step for (_, _, step), s in zip(axes, own, strict=True)], steps(y), base))


def _slice_put(problem: Problem, device: Any) -> Launch:
    g, y = _first(problem)
    own, axes = steps(y), problem.attrs.cut.axes
    base = sum(start * s for (start, _, _), s in zip(axes, own, strict=True))
    fill = filler(device, y, 0)
    put = mover(device, y.dtype.itemsize, g.shape, steps(g), [s * step for (_, _, step), s in zip(axes, own, strict=True)], 0, base)

    def run(inputs: Any, outputs: Any) -> None:
        fill(outputs[0])
        put(inputs[0], outputs[0])

    return run


def _pad(problem: Problem, device: Any) -> Launch:
    x, y = _first(problem)
    widths = problem.attrs.widths
    kept = [s - max(-b, 0) - max(-e, 0) for s, (b, e) in zip(x.shape, widths, strict=True)]
    x_base = sum(max(-b, 0) * s for (b, _), s in zip(widths, steps(x), strict=True))
    y_base = sum(max(b, 0) * s for (b, _), s in zip(widths, steps(y), strict=True))
    fill = filler(device, y, problem.attrs.value)
    put = mover(device, y.dtype.itemsize, kept, steps(x), steps(y), x_base, y_base)

    def run(inputs: Any, outputs: Any) -> None:
        fill(outputs[0])
        put(inputs[0], outputs[0])

    return run


for _name, _make in {
    "copy": _copy, "transfer": _copy, "reshape": _reshape, "expand": _expand, "permute": _permute, "to_layout": _to_layout, "concat": _concat,
    "split": _split, "slice": _slice, "slice_put": _slice_put, "pad": _pad,
}.items():  # fmt: skip
    register(Movement(_name, _make))
