"""What optimizers share: groups of parameters whose values, and whose state, lie in one stretch of memory each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tilewright.devices.api import spec
from tilewright.dtypes import float64
from tilewright.errors import ArgumentError, CheckpointError
from tilewright.ops._call import call, call_inplace
from tilewright.ops._op import Op
from tilewright.ops.movement import CONCAT
from tilewright.tensor import Tensor, tensor

ALIGN = 64  # bytes between the starts of parameters
GATHER = 1 << 18  # elements up to which gradients are gathered for one update; beyond, copying costs more than calls


class _Stretch:
    """Parameters of one dtype and device, moved into one buffer; state vectors of the same form."""

    def __init__(self, params: list[Tensor], states: tuple[str, ...]) -> None:
        self.params = params
        first = params[0]
        item = first.dtype.itemsize
        self.starts: list[int] = []
        total = 0
        for p in params:
            self.starts.append(total)
            total += -(-p.size * item // ALIGN) * ALIGN // item
        self.total = total
        device, self.dtype = first.device, first.dtype
        self.whole = _zeros(total, first)
        for p, start in zip(params, self.starts, strict=True):
            view = self.whole.buffer.view(start * item, p.nbytes)
            if device.kind == "cpu":
                np.copyto(view.array(p.spec), p.numpy())
            p.buffer = view
        self.buffers = [p.buffer for p in params]
        self.states = {name: _zeros(total, first) for name in states}
        self.parts = [self._part(self.whole, i) for i in range(len(params))]
        self.state_parts = {n: [self._part(t, i) for i in range(len(params))] for n, t in self.states.items()}
        pads = [b - a - p.size for p, a, b in zip(params, self.starts, [*self.starts[1:], total], strict=True)]
        self.pads = [_zeros(n, first) if n else None for n in pads]

    def _part(self, t: Tensor, i: int) -> Tensor:
        p, item = self.params[i], self.dtype.itemsize
        return Tensor(t.buffer.view(self.starts[i] * item, p.nbytes), spec((p.size,), self.dtype), t.device)

    def intact(self) -> bool:
        """Do the parameters still lie here? `Module.to` gives them other memory."""
        return all(p.buffer is b for p, b in zip(self.params, self.buffers, strict=True))

    def flat_gradient(self, i: int) -> Tensor:
        p = self.params[i]
        g: Any = p.grad
        if g.spec is not p.spec:
            g = g.to(dtype=p.dtype, layout=p.layout)
        return Tensor(g.buffer, self.parts[i].spec, g.device)

    def update(self, op: Op, attrs: Any, names: tuple[str | None, ...], hyper: Tensor) -> None:
        present = [i for i, p in enumerate(self.params) if p.grad is not None]
        if len(present) == len(self.params) and len(present) > 1 and self.total <= GATHER:
            pieces = [t for i in present for t in (self.flat_gradient(i), self.pads[i]) if t is not None]
            states = [None if n is None else self.states[n] for n in names]
            call_inplace(op, (self.whole, call(CONCAT, tuple(pieces), 0), *states, hyper), attrs)
            return
        for i in present:
            states = [None if n is None else self.state_parts[n][i] for n in names]
            call_inplace(op, (self.parts[i], self.flat_gradient(i), *states, hyper), attrs)


def _zeros(n: int, like: Tensor) -> Tensor:
    target = spec((n,), like.dtype)
    return Tensor(like.device.upload(np.zeros(n, like.dtype.np), target), target, like.device)


class Optimizer:
    """Base class. `params`: tensors, or dicts {"params": [...], options} for groups; options default to the optimizer's.

    `groups` holds each group's options (`lr` and so on), which schedules change.
    """

    states: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        given = list(params)
        if not given:
            raise ArgumentError(f"{type(self).__name__}: there are no parameters; pass model.parameters()")
        listed = given if isinstance(given[0], dict) else [{"params": given}]
        self.defaults = defaults
        self.groups: list[dict[str, Any]] = []
        self.steps = 0
        seen: set[int] = set()
        for group in listed:
            members = list(group["params"])
            for p in members:
                if not isinstance(p, Tensor) or not p.is_leaf or not p.dtype.is_floating:
                    raise ArgumentError(f"{type(self).__name__}: a parameter must be a floating leaf tensor and one is {p!r:.80}")
                if id(p) in seen:
                    raise ArgumentError(f"{type(self).__name__}: a parameter of shape {p.shape} is given twice; list each once")
                seen.add(id(p))
            unknown = set(group) - {"params"} - set(defaults)
            if unknown:
                raise ArgumentError(f"{type(self).__name__}: options {sorted(unknown)} are not known; use {', '.join(defaults)}")
            self.groups.append({**defaults, **{k: v for k, v in group.items() if k != "params"}, "params": members})
        for group in self.groups:
            self._check(group)
        self._stretches: list[list[_Stretch]] = [self._lay(g) for g in self.groups]

    def _check(self, group: dict[str, Any]) -> None:
        if group["lr"] < 0 or group["weight_decay"] < 0:
            raise ArgumentError(f"{type(self).__name__}: lr {group['lr']} and weight_decay {group['weight_decay']} must be at least 0")

    def _lay(self, group: dict[str, Any]) -> list[_Stretch]:
        kinds: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        return [_Stretch(ps, self.states) for ps in kinds.values()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.groups:
            for p in group["params"]:
                p.grad = None

    def hyper(self, group: dict[str, Any]) -> tuple[Op, Any, tuple[str | None, ...], list[float]]:
        """The update op, its attributes, the state it takes (None: absent) and its hyper-parameters."""
        raise NotImplementedError

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.steps += 1
        for k, group in enumerate(self.groups):
            op, attrs, names, values = self.hyper(group)
            for s, stretch in enumerate(self._stretches[k]):
                if not stretch.intact():
                    stretch = self._stretches[k][s] = self._moved(stretch)
                stretch.update(op, attrs, names, tensor(np.array(values), float64, stretch.whole.device))

    def _moved(self, old: _Stretch) -> _Stretch:
        new = _Stretch(old.params, self.states)
        for name in self.states:
            for a, b in zip(new.state_parts[name], old.state_parts[name], strict=True):
                a.copy_(b.numpy())
        return new

    def state_dict(self) -> dict[str, Any]:
        """Steps, the groups' options, and each parameter's state by number."""
        return {
            "steps": self.steps,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.groups],
            "state": [{name: [np.array(t.numpy()) for t in s.state_parts[name]] for name in self.states} for ss in self._stretches for s in ss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave. Raises CheckpointError, and changes nothing, when the shapes differ."""
        stretches = [s for ss in self._stretches for s in ss]
        fits = len(state["state"]) == len(stretches) and len(state["groups"]) == len(self.groups)
        for s, held in zip(stretches, state["state"], strict=False):
            fits = fits and set(held) == set(self.states)
            for name in self.states if fits else ():
                fits = fits and [tuple(t.shape) for t in s.state_parts[name]] == [tuple(t.shape) for t in held[name]]
        if not fits:
            raise CheckpointError(f"{type(self).__name__}.load_state_dict: the state is of another optimizer or model; nothing was changed")
        self.steps = state["steps"]
        for group, held in zip(self.groups, state["groups"], strict=True):
            group.update(held)
        for s, held in zip(stretches, state["state"], strict=True):
            for name in self.states:
                for t, value in zip(s.state_parts[name], held[name], strict=True):
                    t.copy_(value)
