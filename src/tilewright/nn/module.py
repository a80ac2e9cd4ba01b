"""Module: a tree of parameters, buffers and sub-modules with a `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilewright import devices
from tilewright.dtypes import as_dtype
from tilewright.errors import ArgumentError, CheckpointError, DTypeError
from tilewright.tensor import Tensor, tensor, zeros_like

SHOWN = 8  # misfits of each kind that a message lists


class Parameter(Tensor):
    """A leaf tensor that a module trains. Made from a tensor, whose memory it takes over."""

    __slots__ = ()

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.buffer, data.spec, data.device)
        self.requires_grad_(requires_grad)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_parameter, (np.array(self.numpy()), self.dtype, self.layout, self.device.name, self.requires_grad))

    def __deepcopy__(self, memo: Any) -> Parameter:
        made = _parameter(self.numpy(), self.dtype, self.layout, self.device.name, self.requires_grad)
        memo[id(self)] = made
        return made


def _parameter(array: np.ndarray, dtype: Any, layout: str, device: str, requires_grad: bool) -> Parameter:
    return Parameter(tensor(array, dtype, device, layout=layout), requires_grad)


def _kind(dtype: Any) -> str:
    try:
        kind = as_dtype(dtype).kind
    except DTypeError:
        return str(dtype)
    return "i" if kind in "iu" else kind


class Module:
    """Base class. Assigning a Parameter or a Module as an attribute enters it; `register_buffer` enters other state."""

    training: bool
    _parameters: dict[str, Parameter]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module]
    _hooks: tuple[Callable[..., Any], ...]

    def __init__(self) -> None:
        d = self.__dict__
        d["_parameters"], d["_buffers"], d["_modules"] = {}, {}, {}
        d["_hooks"] = ()
        d["training"] = True

    # Entered tensors and modules also lie in the instance's dict, so reading one costs what any attribute does.
    def __setattr__(self, name: str, value: Any) -> None:
        d = self.__dict__
        if isinstance(value, (Parameter, Module)):
            if "_parameters" not in d:
                raise ArgumentError(f"{type(self).__name__}: call super().__init__() before assigning {name!r}")
            for kind in ("_parameters", "_buffers", "_modules"):
                d[kind].pop(name, None)
            d["_parameters" if isinstance(value, Parameter) else "_modules"][name] = value
        elif "_parameters" in d:
            if name in d["_buffers"]:
                d["_buffers"][name] = value
            elif name in d["_parameters"] and isinstance(value, Tensor):
                raise ArgumentError(f"{type(self).__name__}.{name} is a Parameter and the value a plain Tensor; assign Parameter(value)")
            elif name in d["_parameters"] or name in d["_modules"]:
                d["_parameters"].pop(name, None)
                d["_modules"].pop(name, None)
        d[name] = value

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_folded"}  # what copies and pickles can make again

    def __delattr__(self, name: str) -> None:
        for kind in ("_parameters", "_buffers", "_modules"):
            self.__dict__[kind].pop(name, None)
        del self.__dict__[name]

    def register_buffer(self, name: str, value: Tensor | None) -> None:
        """State that is saved but not trained."""
        self.__dict__["_buffers"][name] = value
        self.__dict__[name] = value

    def register_parameter(self, name: str, value: Parameter | None) -> None:
        if value is None:
            self.__dict__[name] = None
        else:
            setattr(self, name, value)

    def add_module(self, name: str, module: Module) -> None:
        setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward; define it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._hooks:
            return self.forward(*args, **kwargs)
        out = self.forward(*args, **kwargs)
        for hook in self._hooks:
            changed = hook(self, args, out)
            out = out if changed is None else changed
        return out

    def register_forward_hook(self, hook: Callable[[Module, tuple[Any, ...], Any], Any]) -> Callable[[], None]:
        """`hook(module, args, output)` after each forward; what it returns, unless None, replaces the output.

        Returns a function that removes it.
        """
        self.__dict__["_hooks"] = (*self._hooks, hook)

        def remove() -> None:
            self.__dict__["_hooks"] = tuple(h for h in self._hooks if h is not hook)

        return remove

    # -- walking -------------------------------------------------------------------------------------------------

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield from self._modules.items()

    def children(self) -> Iterator[Module]:
        yield from self._modules.values()

    def named_modules(self, prefix: str = "", _seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
        """This module and all below it, each once."""
        seen = set() if _seen is None else _seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, child in self._modules.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        for _, module in self.named_modules():
            yield module

    def _named(self, *kinds: str) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self.named_modules():
            for kind in kinds:
                for name, value in module.__dict__[kind].items():
                    if value is not None:
                        yield (f"{prefix}.{name}" if prefix else name), value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter once, with its path."""
        seen: set[int] = set()
        for name, value in self._named("_parameters"):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value  # type: ignore[misc]

    def parameters(self) -> Iterator[Parameter]:
        for _, value in self.named_parameters():
            yield value

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._named("_buffers")

    def buffers(self) -> Iterator[Tensor]:
        for _, value in self.named_buffers():
            yield value

    def apply(self, fn: Callable[[Module], Any]) -> Module:
        """`fn` on every module, children first."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by path: the tensors themselves, detached."""
        return {k: v.detach() for k, v in self._named("_parameters", "_buffers")}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Copy values in by path (Tensors or arrays). Raises CheckpointError, and changes nothing, on any misfit.

        With `strict` every entry of the model must be there and no other.
        """
        own = dict(self._named("_parameters", "_buffers"))
        found = {k: v if isinstance(v, Tensor) else np.asarray(v) for k, v in state.items() if k in own}
        missing, extra = [k for k in own if k not in found], [k for k in state if k not in own]
        wrong = []
        for k, v in found.items():
            if tuple(v.shape) != own[k].shape:
                wrong.append(f"{k}: {tuple(v.shape)} given, {own[k].shape} in the model")
            elif _kind(v.dtype) != _kind(own[k].dtype):
                wrong.append(f"{k}: {v.dtype} given, {own[k].dtype.name} in the model")
        problems = [
            f"{what} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
            for what, names in (("missing", missing if strict else []), ("not in the model", extra if strict else []), ("of another kind", wrong))
            if names
        ]
        if problems:
            raise CheckpointError(f"{type(self).__name__}.load_state_dict: the state does not fit: {'; '.join(problems)}; nothing was changed")
        for k, v in found.items():
            own[k].copy_(v)

    def to(self, target: Any = None, *, device: Any = None, dtype: Any = None) -> Module:
        """Move every parameter and buffer to a device, and the floating ones to a dtype, in place. Returns self.

        `target` may be a device, a device's name or a dtype. Gradients are dropped.
        """
        if isinstance(target, devices.Device) or (isinstance(target, str) and target.partition(":")[0] in devices.KINDS):
            device = target
        elif target is not None:
            dtype = target
        place = None if device is None else devices.get(device)
        kind = None if dtype is None else as_dtype(dtype)
        for module in self.modules():
            for store in ("_parameters", "_buffers"):
                for value in module.__dict__[store].values():
                    if value is None:
                        continue
                    new = value.detach().to(device=place, dtype=kind if value.dtype.is_floating else None)
                    value.buffer, value.spec, value.device, value.grad = new.buffer, new.spec, new.device, None
        return self

    def train(self, mode: bool = True) -> Module:
        for module in self.modules():
            module.__dict__["training"] = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        for p in self.parameters():
            p.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or make them zeros."""
        for p in self.parameters():
            p.grad = None if set_to_none or p.grad is None else zeros_like(p.grad)

    def extra_repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        lines = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self._modules.items()]
        head = f"{type(self).__name__}({self.extra_repr()}"
        return head + ("\n" + "\n".join(lines) + "\n)" if lines else ")")
