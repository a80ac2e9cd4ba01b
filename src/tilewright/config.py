"""Process-wide settings, read once from the environment (`TILEWRIGHT_*`) and changeable at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class Config:
    """`device`: where tensors go when none is named. `deterministic`: admit only deterministic kernels."""

    device: str = os.environ.get("TILEWRIGHT_DEVICE", "cpu")
    deterministic: bool = os.environ.get("TILEWRIGHT_DETERMINISTIC", "0") not in ("", "0", "false")
    plans: int = int(os.environ.get("TILEWRIGHT_PLANS", "400"))


config = Config()
