"""Process-wide settings, read once from the environment (`TILEWRIGHT_*`) and changeable at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tilewright.errors import ArgumentError

POLICIES = ("off", "cached", "auto", "full")


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal():
        raise ArgumentError(f"{name}={text!r} in the environment must be a whole number from 0 on; set it to one, or unset it")
    return int(text)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip() or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ArgumentError(f"{name}={text!r} in the environment must be a number of seconds from 0 on; set it to one, or unset it")
    return value


def _policy(name: str) -> str:
    text = os.environ.get(name, "").strip().lower() or "auto"
    if text not in POLICIES:
        raise ArgumentError(f"{name}={text!r} in the environment must be one of {', '.join(POLICIES)}; set it to one, or unset it")
    return text


@dataclass
class Config:
    """`device`: where tensors go when none is named; `auto` is the fastest, measured once. `deterministic`: admit only
    deterministic kernels. `plans`: calls whose kernels are kept ready. `tune`: whether kernels are measured (see `tilewright.tune.select`), within
    `tune_problem_s` seconds a problem and `tune_process_s` in all. `lock`: a lock file that pins every choice.
    """

    device: str = os.environ.get("TILEWRIGHT_DEVICE") or "cpu"
    deterministic: bool = os.environ.get("TILEWRIGHT_DETERMINISTIC", "").lower() not in ("", "0", "false", "off", "no")
    plans: int = _count("TILEWRIGHT_PLANS", 400)
    tune: str = _policy("TILEWRIGHT_TUNE")
    tune_problem_s: float = _seconds("TILEWRIGHT_TUNE_PROBLEM_S", 0.25)
    tune_process_s: float = _seconds("TILEWRIGHT_TUNE_PROCESS_S", 30.0)
    lock: str = os.environ.get("TILEWRIGHT_LOCK", "")


config = Config()
