"""What optimizers share: groups of parameters whose values, and whose state, lie in one stretch of memory each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from tilewright.devices.api import spec
from tilewright.dtypes import float64
from tilewright.errors import ArgumentError, CheckpointError
from tilewright.ops._call import call, call_inplace
from tilewright.ops._op import Op
from tilewright.ops.movement import CONCAT
from tilewright.tensor import Tensor, tensor, zeros_like

SMALL = 1 << 15  # elements up to which a gradient is gathered with others; beyond, copying costs more than a call


class _Stretch:
    """Parameters of one dtype and device, moved into one buffer; state vectors of the same form.

    Small parameters lie first: their gradients are gathered and the lot is updated by one call.
    """

    def __init__(self, params: list[Tensor], states: tuple[str, ...]) -> None:
        self.params = params
        self.counts = [0] * len(params)  # updates of each
        first = params[0]
        device, self.dtype = first.device, first.dtype
        item, align = self.dtype.itemsize, device.alignment
        self.small = [i for i, p in enumerate(params) if p.size <= SMALL]
        self.large = [i for i, p in enumerate(params) if p.size > SMALL]
        self.starts = [0] * len(params)
        pads, total = {}, 0
        for i in self.small + self.large:
            self.starts[i] = total
            room = -(-params[i].nbytes // align) * align // item
            pads[i] = room - params[i].size
            total += room
            if i in self.small:
                self.head = total
        self.whole = _zeros(total, first)
        self.states = {name: _zeros(total, first) for name in states}
        for p, start in zip(params, self.starts, strict=True):
            view = self.whole.buffer.view(start * item, p.nbytes)
            if device.kind != "null":
                device.write(view, p.numpy(), p.spec)
            p.buffer = view
        self.buffers = [p.buffer for p in params]
        self.parts = [self._part(self.whole, start, p.size) for start, p in zip(self.starts, params, strict=True)]
        self.state_parts = {n: [self._part(t, start, p.size) for start, p in zip(self.starts, params, strict=True)] for n, t in self.states.items()}
        if self.small:
            self.head_part = self._part(self.whole, 0, self.head)
            self.head_states = {n: self._part(t, 0, self.head) for n, t in self.states.items()}
            self.pads = {i: _zeros(pads[i], first) if pads[i] else None for i in self.small}

    def _part(self, t: Tensor, start: int, size: int) -> Tensor:
        item = self.dtype.itemsize
        return Tensor(t.buffer.view(start * item, size * item), spec((size,), self.dtype), t.device)

    def intact(self) -> bool:
        """Do the parameters still lie here? `Module.to` gives them other memory."""
        return all(p.buffer is b for p, b in zip(self.params, self.buffers, strict=True))

    def flat_gradient(self, i: int) -> Tensor:
        p = self.params[i]
        g: Any = p.grad
        if getattr(g, "spec", None) is not p.spec:
            if not isinstance(g, Tensor) or g.shape != p.shape:
                given = f"has shape {g.shape}" if isinstance(g, Tensor) else f"is of type {type(g).__name__}"
                raise ArgumentError(f"optimizer: the .grad of a parameter of shape {p.shape} {given}; it must be a Tensor of the parameter's shape")
            g = g.to(dtype=p.dtype, layout=p.layout)
        return Tensor(g.buffer, self.parts[i].spec, g.device)

    def update(self, hyper: Callable[[int], tuple[Op, Any, tuple[str | None, ...], list[float]]]) -> None:
        """`hyper(n)`: what the n-th update of a parameter takes. Each counts its own, for a gradient may be absent."""
        made: dict[int, Any] = {}
        for i, p in enumerate(self.params):
            if p.grad is not None:
                n = self.counts[i] = self.counts[i] + 1
                if n not in made:
                    *kind, values = hyper(n)
                    made[n] = *kind, tensor(np.array(values), float64, self.whole.device)
        alone = self.small + self.large
        if len(self.small) > 1 and all(self.params[i].grad is not None for i in self.small) and len({self.counts[i] for i in self.small}) == 1:
            op, attrs, names, values = made[self.counts[self.small[0]]]
            pieces = [t for i in self.small for t in (self.flat_gradient(i), self.pads[i]) if t is not None]
            states = [None if n is None else self.head_states[n] for n in names]
            call_inplace(op, (self.head_part, call(CONCAT, tuple(pieces), 0), *states, values), attrs)
            alone = self.large
        for i in alone:
            if self.params[i].grad is not None:
                op, attrs, names, values = made[self.counts[i]]
                states = [None if n is None else self.state_parts[n][i] for n in names]
                call_inplace(op, (self.parts[i], self.flat_gradient(i), *states, values), attrs)


def _zeros(n: int, like: Tensor) -> Tensor:
    target = spec((n,), like.dtype)
    return Tensor(like.device.upload(np.zeros(n, like.dtype.np), target), target, like.device)


class Optimizer:
    """Base class. `params`: tensors, or dicts {"params": [...], options} for groups; options default to the optimizer's.

    `groups` holds each group's options (`lr` and so on), which schedules change.
    """

    states: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        if isinstance(params, Tensor):
            raise ArgumentError(f"{type(self).__name__}: the parameters are one tensor, of shape {params.shape}; pass a list of tensors")
        given = list(params)
        if not given:
            raise ArgumentError(f"{type(self).__name__}: there are no parameters; pass model.parameters()")
        listed = given if isinstance(given[0], dict) else [{"params": given}]
        self.defaults = defaults
        self.groups: list[dict[str, Any]] = []
        self.steps = 0
        seen: set[int] = set()
        for group in listed:
            if not isinstance(group, dict) or "params" not in group:
                raise ArgumentError(f"{type(self).__name__}: a group must be a dict with 'params' and one is {group!r:.80}; make all groups, or none")
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
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
        who = type(self).__name__
        for name in ("lr", "weight_decay", "momentum", "eps"):
            if name in group and not 0 <= group[name] < math.inf:
                raise ArgumentError(f"{who}: {name} {group[name]} must be at least 0 and finite")
        if "betas" in group and (len(group["betas"]) != 2 or not all(0 <= b < 1 for b in group["betas"])):
            raise ArgumentError(f"{who}: betas {group['betas']} must be two numbers from 0 up to but without 1")
        if "alpha" in group and not 0 <= group["alpha"] < 1:
            raise ArgumentError(f"{who}: alpha {group['alpha']} must lie in 0 up to but without 1")

    def _lay(self, group: dict[str, Any]) -> list[_Stretch]:
        kinds: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        return [_Stretch(ps, self.states) for ps in kinds.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or make them zeros."""
        for group in self.groups:
            for p in group["params"]:
                p.grad = None if set_to_none or p.grad is None else zeros_like(p.grad)

    def hyper(self, group: dict[str, Any], n: int) -> tuple[Op, Any, tuple[str | None, ...], list[float]]:
        """For the n-th update: the op, its attributes, the state it takes (None: absent) and its hyper-parameters."""
        raise NotImplementedError

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.steps += 1
        for k, group in enumerate(self.groups):
            for s, stretch in enumerate(self._stretches[k]):
                if not stretch.intact():
                    stretch = self._stretches[k][s] = self._moved(stretch)
                stretch.update(partial(self.hyper, group))

    def _moved(self, old: _Stretch) -> _Stretch:
        new = _Stretch(old.params, self.states)
        new.counts = old.counts
        for name in self.states:
            for a, b in zip(new.state_parts[name], old.state_parts[name], strict=True):
                a.copy_(b.numpy())
        return new

    def state_dict(self) -> dict[str, Any]:
        """Steps, the groups' options, and each parameter's state by number."""
        return {
            "steps": self.steps,
            "counts": [list(s.counts) for ss in self._stretches for s in ss],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.groups],
            "state": [{name: [np.array(t.numpy()) for t in s.state_parts[name]] for name in self.states} for ss in self._stretches for s in ss],
        }

    def __getstate__(self) -> dict[str, Any]:
        held = {k: v for k, v in self.__dict__.items() if k != "_stretches"}
        return {**held, "_state": self.state_dict()}  # a copy lays its own parameters out again

    def __setstate__(self, held: dict[str, Any]) -> None:
        state = held.pop("_state")
        self.__dict__.update(held)
        self._stretches = [self._lay(g) for g in self.groups]
        self.load_state_dict(state)

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
        for s, counts in zip(stretches, state.get("counts", [[self.steps] * len(s.params) for s in stretches]), strict=True):
            s.counts = list(counts)
        for group, held in zip(self.groups, state["groups"], strict=True):
            group.update(held)
        for s, held in zip(stretches, state["state"], strict=True):
            for name in self.states:
                for t, value in zip(s.state_parts[name], held[name], strict=True):
                    t.copy_(value)
