"""Work-groups that reduce together, and offsets into operands of any strides: parts of kernels' sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.devices.api import Config

# L work-items share a reduction; with L = 1 each does one alone, without local memory. A tree over fixed halves, so that the
# result is the same each time. Every work-item of a group calls TREE.
TREE = """
#if L > 1
#define SHARED_OF(type, name) __local type name[L];
#define TREE(v, share, F) { barrier(CLK_LOCAL_MEM_FENCE); share[lid] = v; barrier(CLK_LOCAL_MEM_FENCE); \\
  for (int half_ = L / 2; half_ > 0; half_ >>= 1) { \\
    if (lid < half_) share[lid] = F(share[lid], share[lid + half_]); barrier(CLK_LOCAL_MEM_FENCE); } \\
  v = share[0]; }
#else
#define SHARED_OF(type, name)
#define TREE(v, share, F)
#endif
#define ADD(a, b) ((a) + (b))
#define HIGHER(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define LOWER(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
"""


def groups(device: Any) -> tuple[Config, ...]:
    """Configs: how many work-items share a reduction."""
    sizes = (128, 1) if device.is_gpu else (1, 32)
    return tuple((("group", g),) for g in sizes if g <= device.max_group)


def offset(index: str, prefix: str, rank: int, operands: Sequence[str]) -> tuple[str, list[str], list[list[str]]]:
    """C that splits `index` over `rank` axes (slowest first) and adds up each operand's offset `<prefix>_<operand>`.

    Also the names of the arguments it reads: sizes (of all axes but the first), and for each operand its strides.
    """
    sizes = [f"{prefix}d{k}" for k in range(1, rank)]
    steps = [[f"{prefix}{o}{k}" for k in range(rank)] for o in operands]
    code = f"INDEX {prefix}rest = {index};\n"
    for k in range(rank - 1, 0, -1):
        code += f"const INDEX {prefix}_i{k} = {prefix}rest % {prefix}d{k}; {prefix}rest /= {prefix}d{k};\n"
    code += f"const INDEX {prefix}_i0 = {prefix}rest;\n"
    for o, names in zip(operands, steps, strict=True):
        code += f"const INDEX {prefix}_{o} = {' + '.join(f'{prefix}_i{k} * {n}' for k, n in enumerate(names))};\n"
    return code, sizes, steps
