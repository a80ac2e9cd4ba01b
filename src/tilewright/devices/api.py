"""What a device is: buffers, kernels and the problems they solve. No op and no gradient is known here."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import numpy as np

from tilewright.config import config
from tilewright.dtypes import DType, as_dtype
from tilewright.errors import ArgumentError, ShapeError

CONTIGUOUS = "contiguous"
CHANNELS_LAST = "channels_last"
LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)

MAX_BYTES = 2**62


class Spec:
    """Shape, dtype and layout of one dense operand. Interned: equal specs are one object, so a spec hashes by identity.

    `shape` is logical (N, C, spatial...). With layout `channels_last` (3 to 5 dimensions) memory runs N, spatial..., C.
    """

    __slots__ = ("__weakref__", "dtype", "layout", "nbytes", "ndim", "shape", "size", "strides")
    shape: tuple[int, ...]
    dtype: DType
    layout: str
    strides: tuple[int, ...]  # bytes

    def __repr__(self) -> str:
        mark = " channels_last" if self.layout == CHANNELS_LAST else ""
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]{mark}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (spec, (self.shape, self.dtype, self.layout))

    def like(self, *, shape: Any = None, dtype: DType | None = None, layout: str | None = None) -> Spec:
        return spec(
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.layout if layout is None else layout,
        )


_specs: weakref.WeakValueDictionary[tuple[Any, ...], Spec] = weakref.WeakValueDictionary()
_specs_lock = threading.Lock()


def spec(shape: Iterable[int], dtype: DType | str, layout: str = CONTIGUOUS) -> Spec:
    """The interned Spec. A layout that the rank cannot have (fewer than 3 or more than 5 axes) falls to contiguous.

    Raises ShapeError for a negative size or more bytes than an address can name, ArgumentError for an unknown layout.
    """
    shape = tuple(int(s) for s in shape)
    dtype = as_dtype(dtype)
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if not 3 <= len(shape) <= 5:
        layout = CONTIGUOUS
    key = (shape, dtype, layout)
    found = _specs.get(key)
    if found is not None:
        return found
    if any(s < 0 for s in shape):
        raise ShapeError(f"shape {shape} has a negative size; every size must be 0 or more")
    size = prod(shape)
    if size * dtype.itemsize > MAX_BYTES:
        raise ShapeError(f"shape {shape} of {dtype.name} needs {size * dtype.itemsize} bytes, more than can be addressed")
    made = Spec()
    made.shape, made.dtype, made.layout = shape, dtype, layout
    made.ndim, made.size, made.nbytes = len(shape), size, size * dtype.itemsize
    order = memory_order(len(shape), layout)
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    made.strides = tuple(strides)
    with _specs_lock:
        return _specs.setdefault(key, made)


def memory_order(ndim: int, layout: str) -> tuple[int, ...]:
    """Logical axes from the slowest to the fastest in memory."""
    axes = tuple(range(ndim))
    return axes if layout == CONTIGUOUS else (axes[0], *axes[2:], axes[1])


sequence = itertools.count()  # one order for the calls that autograd records and the writes into memory


class Stamp:
    """Counts the writes to one block of memory after its creation; carries what was derived from it (packed weights).

    A buffer makes its stamp when it is first asked for, and keeps it as `stamped` (None before): who saved the buffer
    at some point of `sequence` sees from `written` whether it was changed since.
    """

    __slots__ = ("__weakref__", "derived", "version", "written")

    def __init__(self) -> None:
        self.version = 0
        self.written = -1
        self.derived: dict[Any, Any] = {}

    def touch(self) -> None:
        self.version += 1
        self.written = next(sequence)


@dataclass(frozen=True)
class Problem:
    """One op with its attributes on operands of these specs (None for an optional one that is absent)."""

    op: str
    attrs: Any
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]
    precision: str = "float32"

    def __str__(self) -> str:
        operands = ", ".join("-" if s is None else repr(s) for s in self.inputs)
        return f"{self.op}({operands}){'' if self.attrs is None else f' {self.attrs}'}"

    @cached_property
    def empty(self) -> bool:
        """Some operand has no elements; library kernels refuse these and NumPy takes them."""
        return any(s is not None and s.size == 0 for s in self.inputs + self.outputs)


Config = tuple[tuple[str, Any], ...]  # tile sizes and the like, hashable and printable: (("tile", 64), ("vector", 4))
Launch = Callable[[Sequence[Any], Sequence[Any]], None]  # (input buffers or None, output buffers)


class Unusable(Exception):
    """Raised by `prepare` when a kernel that did not reject a problem finds that it cannot do it after all."""


class Kernel(ABC):
    """One way to solve problems of one op on one kind of device.

    A kernel writes every element of its outputs, in their layout, and never touches its inputs (unless an output *is*
    an input, for the ops that allow it). `prepare` returns a launch that may be called from several threads at once.
    """

    id: str
    op: str
    device: ClassVar[str]
    version: int = 1
    deterministic: bool = True
    rank: int = 100  # untuned order of trial: lower first
    tolerance: float = 1.0  # times the op's own error bound

    def reject(self, problem: Problem, device: Any) -> list[str]:
        """Reasons, as sentences, why this kernel cannot do the problem; empty when it can. Never raises."""
        return []

    def configs(self, problem: Problem, device: Any) -> Iterable[Config]:
        """Ways to run it; the first is the untuned default."""
        return ((),)

    def workspace(self, problem: Problem, config: Config) -> int:
        """Bytes of temporary memory one launch takes."""
        return 0

    @abstractmethod
    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        """Compile, and pack what can be packed once."""


_kernels: dict[tuple[str, str], list[Kernel]] = {}


def register(kernel: Kernel) -> Kernel:
    """Enter a kernel into the registry; ids are unique. Tests, selection, explain and the docs walk it."""
    rivals = _kernels.setdefault((kernel.device, kernel.op), [])
    if any(k.id == kernel.id for ks in _kernels.values() for k in ks):
        raise ArgumentError(f"kernel id {kernel.id!r} is registered twice; ids are never reused")
    rivals.append(kernel)
    rivals.sort(key=lambda k: k.rank)
    return kernel


def kernel(cls: type[Kernel]) -> type[Kernel]:
    """Class decorator: register one instance."""
    register(cls())
    return cls


def registered(device: str | None = None, op: str | None = None) -> list[Kernel]:
    """Registered kernels, in untuned order of trial within an op."""
    return [k for (d, o), ks in _kernels.items() for k in ks if device in (None, d) and op in (None, o)]


class PlanCache:
    """Bounded map from a call's key to its plan, by second chance: a hit costs one dict lookup and one store.

    Callers set `plan.used` on a hit. When the map is full, plans not used since the last time leave, oldest first.
    """

    __slots__ = ("_lock", "_plans", "get", "on_eviction")

    def __init__(self) -> None:
        self.on_eviction: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()
        self._plans: dict[Any, Any] = {}
        self.get = self._plans.get

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()

    def put(self, key: Any, plan: Any) -> None:
        with self._lock:
            plans = self._plans
            if len(plans) >= config.plans:
                for old_key, old in list(plans.items()):
                    if old.used:
                        old.used = False
                    else:
                        del plans[old_key]
                    if len(plans) <= config.plans * 3 // 4:
                        break
                else:  # all were in use: the oldest quarter leaves
                    for old_key in list(plans)[: config.plans // 4]:
                        del plans[old_key]
                self.on_eviction()
            plans[key] = plan

    def __len__(self) -> int:
        return len(self._plans)

    def values(self) -> list[Any]:
        return list(self._plans.values())


class Device(ABC):
    """A place that holds buffers and runs kernels. One object per name and process."""

    kind: ClassVar[str]
    name: str
    alignment = 64  # bytes: where a view of a buffer may begin

    def __init__(self, name: str) -> None:
        self.name = name
        self.plans = PlanCache()

    def kernels(self, op: str) -> Sequence[Kernel]:
        """The kernels of this kind of device for an op, in untuned order of trial."""
        return _kernels.get((self.kind, op), [])

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """A buffer of at least `nbytes` (uninitialised). Raises OutOfMemory."""

    @abstractmethod
    def upload(self, array: np.ndarray, to: Spec) -> Any:
        """A new buffer with a copy of `array` (shape and dtype of `to`) laid out as `to`."""

    @abstractmethod
    def write(self, buffer: Any, array: np.ndarray, of: Spec) -> None:
        """Overwrite a buffer's values with `array`, laid out as `of`."""

    @abstractmethod
    def download(self, buffer: Any, of: Spec) -> np.ndarray:
        """A new NumPy array, C-ordered, with the buffer's values."""

    def synchronize(self) -> None:  # noqa: B027  (a synchronous device has nothing to wait for)
        """Return once all work handed to the device is done."""

    def seconds(self, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
        """How long `run` keeps the device busy."""
        self.synchronize()
        began = clock()
        run()
        self.synchronize()
        return clock() - began

    def identity(self) -> tuple[str, str, str, int]:
        """What a measured time depends on: (the device itself, its driver, the libraries its kernels use, threads)."""
        return self.name, "", "", 1

    def describe(self) -> dict[str, Any]:
        """Facts for `tilewright devices`."""
        return {"name": self.name, "kind": self.kind}

    def __repr__(self) -> str:
        return f"device({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        from tilewright.devices import get

        return (get, (self.name,))
