"""What OpenCL kernels have in common."""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import Kernel, Problem


class ClKernel(Kernel):
    """A kernel on OpenCL devices. `refuse` gives its own reasons; those that hold for all are given here."""

    device = "opencl"

    def reject(self, problem: Problem, device: Any) -> list[str]:
        operands = [s for s in problem.inputs + problem.outputs if s is not None]
        if not device.has_fp64 and any(s.dtype.name == "float64" for s in operands):
            return [f"{device.name} has no double precision (cl_khr_fp64)"]
        return self.refuse(problem, device)

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        return []
