"""Reading and adding at places that an index tensor gives, borders, one-hot vectors.

A place outside its axis gives NaN (0 for integers) where it is read, and is left out where it is added: a kernel cannot raise, and to
look at the index on the host would stop the queue. What is added to one place is added in the index's order, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.devices.api import CONTIGUOUS, Config, Launch, Problem, Spec, memory_order, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import offset
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.movement import mover, steps
from tilewright.devices.opencl.program import launcher

_HEAD = """
#define PLACE(v) const long v_ = (v); const INDEX at = v_ < 0 ? (INDEX)(v_ + A) : (v_ < A ? (INDEX)v_ : -1);
"""
# x is (O, A, I) in memory; the index has K places.
_TAKE = """
__kernel void take(__global const T_x *restrict x, __global const T_i *restrict index, __global T_x *restrict y, const INDEX O, const INDEX A,
    const INDEX I, const INDEX K) {
  const INDEX g = get_global_id(0);
  if (g >= O * K * I) return;
  const INDEX i = g % I, k = g / I % K, o = g / I / K;
  PLACE(index[k])
  const C_x v = at >= 0 ? LOAD_x(x, (o * A + at) * I + i) : OUTSIDE;
  STORE_x(y, g, v);
}
"""
_INDEX_ADD = """
__kernel void index_add(__global const T_x *restrict x, __global const T_i *restrict index, __global const T_x *restrict source,
    __global T_x *restrict y, const INDEX O, const INDEX A, const INDEX I, const INDEX K) {
  const INDEX g = get_global_id(0);
  if (g >= O * A * I) return;
  const INDEX i = g % I, a = g / I % A, o = g / I / A;
  C_x acc = LOAD_x(x, g);
  for (INDEX k = 0; k < K; ++k) { PLACE(index[k]) if (at == a) acc += LOAD_x(source, (o * K + k) * I + i); }
  STORE_x(y, g, acc);
}
"""
_ONE_HOT = """
__kernel void one_hot(__global const T_i *restrict index, __global float *restrict y, const INDEX O, const INDEX A, const INDEX I, const INDEX K) {
  const INDEX g = get_global_id(0);
  if (g < K * A) y[g] = (long)index[g / A] == (long)(g % A);
}
"""


def _outside(x: Spec) -> str:
    return "NAN" if x.dtype.is_floating else "0"


def _split(x: Spec, axis: int) -> tuple[int, int, int]:
    """(outer, axis, inner) of a dense tensor as it lies in memory."""
    order = memory_order(x.ndim, x.layout)
    place = order.index(axis)
    return prod(x.shape[a] for a in order[:place]), x.shape[axis], prod(x.shape[a] for a in order[place + 1 :])


def _run(device: Any, problem: Problem, body: str, entry: str, x: Spec | None, index: Spec, sizes: Sequence[int], size: int, buffers: int) -> Any:
    kind_name = index_type(problem)
    kind: Any = np.int32 if kind_name == "int" else np.int64
    outside = "0" if x is None else _outside(x)
    of = index.dtype if x is None else x.dtype
    source = prelude(of, index.dtype) + types(x=x, i=index) + f"#define INDEX {kind_name}\n#define OUTSIDE {outside}\n{_HEAD}{body}"
    return launcher(device, source, entry, size=(size,), group=(64,), scalars=[kind(v) for v in sizes], buffers=buffers)


def _contiguous(device: Any, s: Spec) -> Any:
    """run(buffer) -> a buffer with the same values in logical order; itself where it lies so."""
    if s.layout == CONTIGUOUS:
        return lambda b: b
    plain = s.like(layout=CONTIGUOUS)
    move = mover(device, s.dtype.itemsize, s.shape, steps(s), steps(plain))

    def run(b: Any) -> Any:
        out = device.allocate(s.nbytes)
        move(b, out)
        return out

    return run


class Take(ClKernel):
    id, op, rank = "opencl.take.item", "take", 10

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, index), y = problem.inputs, problem.outputs[0]
        assert x is not None
        assert index is not None
        lies = _contiguous(device, x) if y.layout != x.layout else _contiguous(device, x.like(layout=CONTIGUOUS))
        o, a, i = _split(x if y.layout == x.layout else x.like(layout=CONTIGUOUS), problem.attrs)
        flat = _contiguous(device, index)
        run = _run(device, problem, _TAKE, "take", x, index, (o, a, i, index.size), y.size, 3)
        return lambda inputs, outputs: run(lies(inputs[0]), flat(inputs[1]), outputs[0])


class IndexAdd(ClKernel):
    id, op, rank = "opencl.index_add.item", "index_add", 10

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, index, source), y = problem.inputs, problem.outputs[0]
        assert x is not None
        assert index is not None
        assert source is not None
        o, a, i = _split(x, problem.attrs)
        run = _run(device, problem, _INDEX_ADD, "index_add", x, index, (o, a, i, index.size), y.size, 4)
        if source.layout == x.layout:
            return lambda inputs, outputs: run(*inputs, outputs[0])
        to = source.like(layout=x.layout)
        move = mover(device, x.dtype.itemsize, source.shape, steps(source), steps(to))

        def both(inputs: Any, outputs: Any) -> None:
            alike = device.allocate(to.nbytes)
            move(inputs[2], alike)
            run(inputs[0], inputs[1], alike, outputs[0])

        return both


class OneHot(ClKernel):
    id, op, rank = "opencl.one_hot.item", "one_hot", 10

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        index, y = problem.inputs[0], problem.outputs[0]
        assert index is not None
        flat = _contiguous(device, index)
        run = _run(device, problem, _ONE_HOT, "one_hot", None, index, (1, problem.attrs, 1, index.size), y.size, 2)
        return lambda inputs, outputs: run(flat(inputs[0]), outputs[0])


class Gather(ClKernel):
    """Along one axis, every other coordinate as it is."""

    id, op, rank = "opencl.gather.item", "gather", 10

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, index), y, axis = problem.inputs, problem.outputs[0], problem.attrs
        assert x is not None
        assert index is not None
        own = [0 if k == axis else s for k, s in enumerate(steps(x))]
        code, names, (x_names, i_names, y_names) = offset("g", "r", max(y.ndim, 1), ("x", "i", "y"))
        body = f"""
__kernel void gather(__global const T_x *restrict x, __global const T_i *restrict index, __global T_x *restrict y, const INDEX n, const INDEX A,
    const INDEX step, {", ".join(f"const INDEX {v}" for v in [*names, *x_names, *i_names, *y_names])}) {{
  const INDEX g = get_global_id(0);
  if (g >= n) return;
  {code}
  PLACE(index[r_i])
  const C_x v = at >= 0 ? LOAD_x(x, r_x + at * step) : OUTSIDE;
  STORE_x(y, r_y, v);
}}
"""
        sizes = [y.size, x.shape[axis], steps(x)[axis], *y.shape[1:], *own, *steps(index), *steps(y)]
        run = _run(device, problem, body, "gather", x, index, sizes, y.size, 3)
        return lambda inputs, outputs: run(*inputs, outputs[0])


class ScatterAdd(ClKernel):
    """Each place of the result looks through its line of the index."""

    id, op, rank = "opencl.scatter_add.item", "scatter_add", 10

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, index, source), y, axis = problem.inputs, problem.outputs[0], problem.attrs
        assert x is not None
        assert index is not None
        assert source is not None
        rank = x.ndim
        code, names, (x_names, i_names, s_names) = offset("g", "r", rank, ("x", "i", "s"))
        inside = " && ".join([f"r_i{k} < e{k}" for k in range(rank) if k != axis] or ["1"])
        parameters = [*names, *x_names, *i_names, *s_names, *[f"e{k}" for k in range(rank)]]
        body = f"""
__kernel void scatter(__global const T_x *restrict x, __global const T_i *restrict index, __global const T_x *restrict source,
    __global T_x *restrict y, const INDEX n, const INDEX A, const INDEX index_step, const INDEX source_step,
    {", ".join(f"const INDEX {v}" for v in parameters)}) {{
  const INDEX g = get_global_id(0);
  if (g >= n) return;
  {code}
  C_x acc = LOAD_x(x, r_x);
  if ({inside})
    for (INDEX k = 0; k < e{axis}; ++k) {{ PLACE(index[r_i + k * index_step]) if (at == r_i{axis}) acc += LOAD_x(source, r_s + k * source_step); }}
  STORE_x(y, r_x, acc);
}}
"""
        own = [[0 if k == axis else s for k, s in enumerate(steps(t))] for t in (index, source)]
        sizes = [y.size, x.shape[axis], steps(index)[axis], steps(source)[axis], *x.shape[1:], *steps(x), *own[0], *own[1], *index.shape]
        run = _run(device, problem, body, "scatter", x, index, sizes, y.size, 4)
        return lambda inputs, outputs: run(*inputs, outputs[0])


class Border(ClKernel):
    """Padding by what lies at the border; its gradient gathers all places that an element was copied to."""

    rank = 10

    def __init__(self, op: str, backward: bool) -> None:
        self.op, self.id, self.backward = op, f"opencl.{op}.item", backward

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x, y, a = problem.inputs[0], problem.outputs[0], problem.attrs
        assert x is not None
        kind_name = index_type(problem)
        kind: Any = np.int32 if kind_name == "int" else np.int64
        rank = max(x.ndim, 1)
        small, large = (y, x) if self.backward else (x, y)
        code, names, (y_names,) = offset("g", "r", rank, ("y",))
        parameters = [*names, *y_names, *[f"{p}{k}" for p in ("s", "b", "m", "t") for k in range(rank)]]
        # Where place p of the padded axis, which begins b before the small one of m elements, comes from.
        mirror = "(p < 0 ? -p : (p >= m ? 2 * m - 2 - p : p))" if a.mode == "reflect" else "(p < 0 ? 0 : (p >= m ? m - 1 : p))"
        loop = ""
        if self.backward:
            for k in range(rank):
                loop += f"for (INDEX q{k} = 0; q{k} < t{k}; ++q{k}) {{ if (tw_source(q{k} - b{k}, m{k}) != r_i{k}) continue;\n"
            loop += f"acc += LOAD_x(x, {' + '.join(f'q{k} * s{k}' for k in range(rank))});\n" + "}" * rank
        else:
            loop = f"acc = LOAD_x(x, {' + '.join(f'tw_source(r_i{k} - b{k}, m{k}) * s{k}' for k in range(rank))});"
        source = (
            prelude(x.dtype)
            + types(x=x)
            + f"#define INDEX {kind_name}\nstatic INDEX tw_source(const INDEX p, const INDEX m) {{ return {mirror}; }}\n"
            + "__kernel void border(__global const T_x *restrict x, __global T_x *restrict y, const INDEX n, "
            + ", ".join(f"const INDEX {v}" for v in parameters)
            + f") {{\n  const INDEX g = get_global_id(0);\n  if (g >= n) return;\n  {code}\n  C_x acc = 0;\n  {loop}\n  STORE_x(y, r_y, acc);\n}}\n"
        )
        before = [b for b, _ in a.widths]
        values = [y.size, *y.shape[1:], *steps(y), *steps(x), *before, *small.shape, *large.shape]
        run = launcher(device, source, "border", size=(y.size,), group=(64,), scalars=[kind(v) for v in values], buffers=2)
        return lambda inputs, outputs: run(inputs[0], outputs[0])


for _kernel in (Take(), IndexAdd(), OneHot(), Gather(), ScatterAdd(), Border("pad_border", False), Border("pad_border_grad", True)):
    register(_kernel)
