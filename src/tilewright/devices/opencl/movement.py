"""Copies and changes of shape, layout and place."""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import Config, Launch, Problem, register
from tilewright.devices.opencl import runtime
from tilewright.devices.opencl._base import ClKernel


class CopyKernel(ClKernel):
    """An op whose result is its operand's bytes, in order."""

    rank = 10

    def __init__(self, op: str) -> None:
        self.op = op
        self.id = f"opencl.{op}.copy"

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        x, out = problem.inputs[0], problem.outputs[0]
        if x is None or x.dtype is not out.dtype or x.layout != out.layout:
            return ["it copies bytes as they lie, and the result lies otherwise"]
        return []

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        nbytes = problem.outputs[0].nbytes
        if not nbytes:
            return lambda inputs, outputs: None
        cl = runtime.load()

        def run(inputs: Any, outputs: Any) -> None:
            try:
                with device.lock:
                    event = cl.enqueue_copy(device.queue, outputs[0].mem, inputs[0].mem, byte_count=nbytes)
                    if device.events is not None:
                        device.events.append(event)
            except cl.Error as error:
                raise runtime.translate(error, device, self.op) from error

        return run


register(CopyKernel("copy"))
