"""Where a model's time goes: each op that its layers call, forward and backward, timed in its place in the run.

Every op is timed as the model runs, so that it finds in the caches what the op before it left there. The sums are of the
kernels alone; what the whole run takes beyond them is Python's own work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.autograd import mode, no_grad
from tilewright.devices.api import Config, Device, Problem, sequence
from tilewright.errors import ArgumentError
from tilewright.nn.module import Module
from tilewright.tensor import tensor


@dataclass
class Timed:
    """One call of an op: the layer (a module's path), "forward" or "backward", the problem, the kernel and config that did it, and
    the median of its `samples`, seconds."""

    layer: str
    direction: str
    problem: Problem
    kernel: str
    config: Config
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


@dataclass
class Profile:
    """`calls` in the order of the run; `whole_s`: the median run without any timing in it; `kernels_s`: the sum of the calls'."""

    calls: list[Timed]
    whole_s: float

    @property
    def kernels_s(self) -> float:
        return sum(c.seconds for c in self.calls)


def profile(model: Module, input_shape: tuple[int, ...], *, train: bool = False, budget_s: float = 3.0, least: int = 5, most: int = 200) -> Profile:
    """Time every op call of inference (or, with `train`, of a forward and a backward pass in training mode) on random input.

    Plain runs and timed ones take turns within `budget_s` seconds, at least `least` of each. The model's gradients are cleared, and with
    `train` its running statistics move. Raises ArgumentError for a model without parameters.
    """
    first = next(iter(model.parameters()), None)
    if first is None:
        raise ArgumentError("profile: the model has no parameters, so it does not say where to run")
    device: Device = first.device
    values = np.random.default_rng(0).standard_normal(input_shape).astype(np.float32)
    x = tensor(values, device=device, layout="channels_last" if len(input_shape) == 4 else "contiguous")
    was = [(m, m.training) for m in model.modules()]
    model.train(train)

    def run() -> None:
        if not train:
            with no_grad():
                model(x)
            return
        out = model(x)
        (out * out).mean().backward()
        model.zero_grad()

    try:
        for _ in range(2):  # kernels are chosen, weights packed
            run()
        watch = _Watch(model, device)
        wholes: list[float] = []
        began = time.perf_counter()
        while len(wholes) < most and (len(wholes) < least or time.perf_counter() - began < budget_s):
            wholes.append(device.seconds(run))
            with watch:
                run()
            device.synchronize()
    finally:
        for m, state in was:
            m.__dict__["training"] = state
    return Profile(watch.calls, statistics.median(wholes))


class _Watch:
    """While entered, stands in for the device's plans, and hands out plans whose launches are timed."""

    def __init__(self, model: Module, device: Device) -> None:
        self.model, self.device = model, device
        self.real = device.plans
        self.calls: list[Timed] = []
        self.at = 0
        self.path: list[str] = []
        self.spans: list[tuple[int, int, str]] = []  # numbers of the calls that a layer recorded
        self.folds = dict(_folds(model))

    def __enter__(self) -> None:
        self.at = 0
        self.spans.clear()
        self.device.plans = self  # type: ignore[assignment]
        for name, module in self.model.named_modules():
            module.__dict__["forward"] = self._forward(name, module.forward)

    def __exit__(self, *_: Any) -> None:
        self.device.plans = self.real
        for module in self.model.modules():
            del module.__dict__["forward"]

    def _forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.path.append(name)
            start = next(sequence)
            try:
                return forward(*args, **kwargs)
            finally:
                self.spans.append((start, next(sequence), name))
                self.path.pop()

        return run

    def get(self, key: Any) -> Any:
        plan = self.real.get(key)
        return None if plan is None else _Probe(plan, self)

    def put(self, key: Any, plan: Any) -> None:
        self.real.put(key, plan)

    def place(self, inputs: Any) -> tuple[str, str]:
        node = mode.node
        if node is not None:  # a layer's inner span ends before its outer one
            return next((name for start, end, name in self.spans if start < node.seq < end), ""), "backward"
        weight = inputs[1] if len(inputs) > 1 else None
        return self.folds.get(id(weight)) or (self.path[-1] if self.path else ""), "forward"

    def launched(self, plan: Any, inputs: Any, outputs: Any) -> None:
        layer, direction = self.place(inputs)
        if self.at == len(self.calls):
            self.calls.append(Timed(layer, direction, plan.problem, plan.kernel.id, plan.config))
        call = self.calls[self.at]
        self.at += 1
        seconds = self.device.seconds(lambda: plan.launch(inputs, outputs))
        if call.problem == plan.problem:
            call.samples.append(seconds)


class _Probe:
    """A plan as `ops._call` uses it, with a launch that is timed."""

    __slots__ = ("_plan", "_watch", "out_specs", "single", "used")

    def __init__(self, plan: Any, watch: _Watch) -> None:
        self._plan, self._watch = plan, watch
        self.out_specs, self.single, self.used = plan.out_specs, plan.single, True

    def launch(self, inputs: Any, outputs: Any) -> None:
        self._watch.launched(self._plan, inputs, outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def _folds(model: Module) -> Iterator[tuple[int, str]]:
    """Buffers of weights that batch norm was folded into, by the name of the convolution whose weights they were."""
    owners = {id(p.buffer): name.rpartition(".")[0] for name, p in model.named_parameters()}
    for module in model.modules():
        held = module.__dict__.get("_folded")
        if held is not None:
            yield id(held[1][0].buffer), owners.get(id(held[0][1][0]), "")


def by_layer(calls: list[Timed]) -> dict[tuple[str, str], list[Timed]]:
    """Calls of one layer and direction together, in the order of the run."""
    out: dict[tuple[str, str], list[Timed]] = {}
    for call in calls:
        out.setdefault((call.layer, call.direction), []).append(call)
    return out
