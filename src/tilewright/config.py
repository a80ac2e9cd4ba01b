"""Process-wide settings, read once from the environment (`TILEWRIGHT_*`) and changeable at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tilewright.errors import ArgumentError


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal():
        raise ArgumentError(f"{name}={text!r} in the environment must be a whole number from 0 on; set it to one, or unset it")
    return int(text)


@dataclass
class Config:
    """`device`: where tensors go when none is named. `deterministic`: admit only deterministic kernels."""

    device: str = os.environ.get("TILEWRIGHT_DEVICE") or "cpu"
    deterministic: bool = os.environ.get("TILEWRIGHT_DETERMINISTIC", "").lower() not in ("", "0", "false", "off", "no")
    plans: int = _count("TILEWRIGHT_PLANS", 400)


config = Config()
