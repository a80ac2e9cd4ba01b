"""Reductions over any axes: one work-group, or one work-item, for each output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Launch, Problem, Spec, memory_order, register
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._group import TREE, groups, offset
from tilewright.devices.opencl._source import index_type, prelude, types
from tilewright.devices.opencl.pointwise import merged
from tilewright.devices.opencl.program import launcher


def _steps(x: Spec) -> list[int]:
    return [s // x.dtype.itemsize for s in x.strides]


def axes_of(x: Spec, y: Spec, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """(sizes, strides in x) of the axes that stay, in y's order of memory, and of those that go, in logical order."""
    steps = _steps(x)
    stay = [i for i in range(x.ndim) if i not in axes]
    if y.ndim == x.ndim:  # kept at size 1
        stay = [i for i in memory_order(y.ndim, y.layout) if i in stay]
    kept = merged([x.shape[i] for i in stay], [[steps[i] for i in stay]])
    gone = merged([x.shape[i] for i in axes], [[steps[i] for i in axes]])
    return (kept[0], kept[1][0]), (gone[0], gone[1][0])


def launch_of(device: Any, problem: Problem, config: Config, axes: tuple[int, ...], body: str, acc: str, scalars: tuple[Any, ...] = ()) -> Launch:
    """The launch of a reduction whose C is `body`: it reads x at VALUE(r) for r below R, and ends in STORE of y at o.

    In it: lid, L, R, the accumulator's type ACC, TREE and its shared array `share`, and `q`, one number.
    """
    x, y = problem.inputs[0], problem.outputs[0]
    assert x is not None
    (sizes, steps), (gone, gone_steps) = axes_of(x, y, axes)
    index = index_type(problem)
    kind: Any = np.int32 if index == "int" else np.int64
    base, kept_sizes, kept_steps = offset("o", "k", len(sizes), "x")
    inner, gone_sizes, gone_names = offset("r", "g", len(gone), "x")
    names = [*kept_sizes, *kept_steps[0], *gone_sizes, *gone_names[0]]
    values = [*sizes[1:], *steps, *gone[1:], *gone_steps]
    number = "double" if acc == "double" else "float"
    source = (
        prelude(x.dtype, y.dtype)
        + types(x=x, y=y)
        + f"#define INDEX {index}\n#define ACC {acc}\n{TREE}"
        + f"static INDEX tw_at(const INDEX r, {', '.join(f'const INDEX {n}' for n in [*gone_sizes, *gone_names[0]])}) {{ {inner} return g_x; }}\n"
        + f"#define VALUE(r) LOAD_x(x, k_x + tw_at(r, {', '.join([*gone_sizes, *gone_names[0]])}))\n"
        + f"""
__kernel void reduce(__global const T_x *restrict x, __global T_y *restrict y, const {number} q, const INDEX n, const INDEX R,
    {", ".join(f"const INDEX {name}" for name in names)}) {{
#if L > 1
  const INDEX o = get_group_id(0);
  const int lid = get_local_id(0);
#else
  const INDEX o = get_global_id(0);
  const int lid = 0;
  if (o >= n) return;
#endif
  SHARED_OF(ACC, share)
  {base}
  {body}
}}
"""
    )
    group = dict(config)["group"]
    size, local = ((y.size * group,), (group,)) if group > 1 else ((y.size,), (64,))
    count = prod(x.shape[i] for i in axes)
    q = (np.float64 if acc == "double" else np.float32)(scalars[0] if scalars else 0)
    args = [q, kind(y.size), kind(count), *[kind(v) for v in values]]
    define: dict[str, Any] = {"L": group}
    if acc != "double":
        define["-cl-single-precision-constant"] = None
    run = launcher(device, source, "reduce", size=size, group=local, define=define, scalars=args, buffers=2)
    return lambda inputs, outputs: run(inputs[0], outputs[0])


def _fold(start: str, value: str, combine: str, end: str) -> str:
    return f"""
  ACC acc = {start};
  for (INDEX r = lid; r < R; r += L) {{ const ACC v = {value}; acc = {combine}(acc, v); }}
  TREE(acc, share, {combine})
  if (lid == 0) STORE_y(y, o, {end});
"""


class ReduceKernel(ClKernel):
    """A reduction by its C, for axes in `attrs.axes`."""

    rank = 10

    def __init__(self, op: str, body: str | Callable[[Problem], str], kind: str = "same") -> None:
        self.op, self.id, self.body, self.kind = op, f"opencl.{op}.group", body, kind

    def configs(self, problem: Problem, device: Any) -> tuple[Config, ...]:
        return groups(device)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        real = "double" if x.dtype.name == "float64" else "float"
        acc = real if x.dtype.is_floating or self.kind == "real" else "long"
        body: Any = self.body(problem) if callable(self.body) else self.body
        return launch_of(device, problem, config, problem.attrs.axes, body, acc, (getattr(problem.attrs, "correction", 0.0),))


MULTIPLY = "#define TIMES(a, b) ((a) * (b))\n"


def _extreme(name: str, combine: str) -> str:
    return _fold("VALUE(0)", "VALUE(r)", combine, "acc")


def _mean(problem: Problem) -> str:
    x = problem.inputs[0]
    assert x is not None
    real = "double" if x.dtype.name == "float64" else "float"
    return _fold("0", "VALUE(r)", "ADD", f"({real})acc / ({real})R")


# Two passes, corrected for the rounding of the mean (Chan, Golub and LeVeque, The American Statistician 37(3), 1983).
_VAR = """
  ACC acc = 0, rest = 0;
  for (INDEX r = lid; r < R; r += L) acc += VALUE(r);
  TREE(acc, share, ADD)
  const ACC mean = acc / (ACC)R;
  acc = 0;
  for (INDEX r = lid; r < R; r += L) { const ACC d = VALUE(r) - mean; acc += d * d; rest += d; }
  TREE(acc, share, ADD)
  TREE(rest, share, ADD)
  const ACC left = (ACC)R - q;
  if (lid == 0) STORE_y(y, o, left > 0 ? fmax(acc - rest * rest / (ACC)R, (ACC)0) / left + 0 * acc : (ACC)NAN);
"""
_LOGSUMEXP = """
  ACC top = -INFINITY;
  for (INDEX r = lid; r < R; r += L) { const ACC v = VALUE(r); top = HIGHER(v, top); }
  TREE(top, share, HIGHER)
  const ACC shift = isinf(top) ? (ACC)0 : top;
  ACC acc = 0;
  for (INDEX r = lid; r < R; r += L) acc += exp(VALUE(r) - shift);
  TREE(acc, share, ADD)
  if (lid == 0) STORE_y(y, o, log(acc) + shift);
"""
register(ReduceKernel("sum", _fold("0", "VALUE(r)", "ADD", "acc")))
register(ReduceKernel("mean", _mean))
register(ReduceKernel("prod", f"\n#define TIMES(a, b) ((a) * (b))\n{_fold('1', 'VALUE(r)', 'TIMES', 'acc')}"))
register(ReduceKernel("max", _extreme("max", "HIGHER")))
register(ReduceKernel("min", _extreme("min", "LOWER")))
register(ReduceKernel("any", f"\n#define EITHER(a, b) ((a) != 0 || (b) != 0)\n{_fold('0', '(VALUE(r) != 0)', 'EITHER', 'acc != 0')}"))
register(ReduceKernel("all", f"\n#define BOTH(a, b) ((a) != 0 && (b) != 0)\n{_fold('1', '(VALUE(r) != 0)', 'BOTH', 'acc != 0')}"))
register(ReduceKernel("var", _VAR))
register(ReduceKernel("logsumexp", _LOGSUMEXP))


class ArgKernel(ClKernel):
    """The place of the first extreme, or of the first NaN."""

    rank = 10

    def __init__(self, op: str, sign: str) -> None:
        self.op, self.id, self.sign = op, f"opencl.{op}.item", sign

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        x = problem.inputs[0]
        assert x is not None
        acc = ("double" if x.dtype.name == "float64" else "float") if x.dtype.is_floating else "long"
        body = f"""
  ACC best = VALUE(0);
  INDEX at = 0;
  for (INDEX r = 1; r < R; ++r) {{ const ACC v = VALUE(r); if (best == best && (v != v || v {self.sign} best)) {{ best = v; at = r; }} }}
  STORE_y(y, o, at);
"""
        return launch_of(device, problem, (("group", 1),), (problem.attrs.axis,), body, acc)


register(ArgKernel("argmax", ">"))
register(ArgKernel("argmin", "<"))
