"""The choice of a kernel. Until measured selection is there, the first in rank that does not reject the problem."""

from __future__ import annotations

from typing import Any

from tilewright.config import config
from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Unusable
from tilewright.errors import KernelError


def choose(problem: Problem, device: Device) -> tuple[Kernel, Config, Launch]:
    """The kernel, its config and a launch ready to run. Raises KernelError with every candidate's reason."""
    refused: list[str] = []
    for kernel in device.kernels(problem.op):
        reasons = list(kernel.reject(problem, device))
        if config.deterministic and not kernel.deterministic:
            reasons.append("it is not deterministic")
        if not reasons:
            try:
                settings = next(iter(kernel.configs(problem, device)))
                return kernel, settings, kernel.prepare(problem, settings, device)
            except Unusable as error:
                reasons.append(str(error))
        refused.append(f"{kernel.id}: {'; '.join(reasons)}")
    why = "\n  ".join(refused) if refused else f"no kernel for {problem.op} is registered"
    raise KernelError(f"no kernel on {device.name} takes {problem}:\n  {why}")


def explain(problem: Problem, device: Device) -> list[dict[str, Any]]:
    """Each candidate with its reasons for refusing; an empty list of reasons marks one that could be used."""
    return [{"kernel": k.id, "reasons": list(k.reject(problem, device))} for k in device.kernels(problem.op)]
