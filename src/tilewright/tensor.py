"""Tensor: a typed, shaped, placed block of memory with a layout, and the operators on it.

A tensor is dense and never changes under an op: every op returns a new one. Only optimizers, `copy_` and loading of
weights write into a tensor, and they say so to its buffer. Views (`reshape`, `detach`) share the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright import devices
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, Spec, spec
from tilewright.dtypes import DType, as_dtype, float16, float32, float64, int64
from tilewright.errors import ArgumentError, AutogradError, DeviceError, DTypeError, ShapeError

if TYPE_CHECKING:
    from tilewright.autograd import Node

_ops: Any = None  # the module tilewright.ops, set when it is loaded: it lies above this one


class Tensor:
    """Made by `tilewright.tensor`, `from_numpy`, `zeros` and by ops; not by calling the class.

    Attributes: `shape` (logical, NCHW order), `dtype`, `layout` ("contiguous" or "channels_last"), `device`,
    `requires_grad`, `grad` (a Tensor or None). Every op whose first operand is a tensor is also a method: `x.sum(1)` is
    `tilewright.sum(x, 1)`.
    """

    __slots__ = ("__weakref__", "_hooks", "_index", "_node", "buffer", "device", "grad", "requires_grad", "spec")
    __array_ufunc__ = None  # NumPy hands `array * tensor` to us

    def __init__(self, buffer: Any, spec: Spec, device: Device) -> None:
        self.buffer = buffer
        self.spec = spec
        self.device = device
        self.requires_grad: bool = False
        self.grad: Tensor | None = None
        self._node: Node | None = None
        self._index = 0

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def ndim(self) -> int:
        return self.spec.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    def numel(self) -> int:
        """Number of elements, as `size`."""
        return self.spec.size

    def dim(self) -> int:
        """Number of axes, as `ndim`."""
        return self.spec.ndim

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def is_leaf(self) -> bool:
        return self._node is None

    def __len__(self) -> int:
        if not self.spec.shape:
            raise ShapeError("len() of a 0-d tensor has no meaning; use .item() for its value")
        return self.spec.shape[0]

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"the truth of a tensor of shape {self.shape} is ambiguous; use .any() or .all()")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating:
            raise DTypeError(f"a {self.dtype.name} tensor cannot be an index; use an integer tensor")
        return int(self.item())

    def __hash__(self) -> int:
        return id(self)

    # -- leaving Tilewright --------------------------------------------------------------------------------------

    def numpy(self, *, writable: bool = False) -> np.ndarray:
        """The values as a NumPy array of the logical shape: a view on the CPU, a copy elsewhere.

        The view is read-only unless `writable`; writing through it changes the tensor, and kernels that packed its old
        values are told at the time of this call only, so finish writing before the tensor is used again.
        """
        export = getattr(self.buffer, "export", None)
        if export is None:
            return self.device.download(self.buffer, self.spec)
        out = export(self.spec, writable)
        if writable:
            if not out.flags.writeable:
                raise ArgumentError("this tensor shares memory that its owner made read-only; write into a clone()")
            self.buffer.touch()
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = self.numpy()
        if dtype is not None and out.dtype != np.dtype(dtype):
            if copy is False:
                raise ArgumentError(f"a {self.dtype.name} tensor as {np.dtype(dtype)} needs a copy; allow copy=True")
            return out.astype(dtype)
        return out.copy() if copy else out

    def item(self) -> Any:
        """The Python number in a tensor of one element. Raises ShapeError for any other size."""
        if self.size != 1:
            raise ShapeError(f"item() needs one element and the tensor has shape {self.shape}; index it first")
        return self.numpy().reshape(()).item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """The DLPack capsule (zero-copy; CPU tensors of a type that NumPy exports, so not bfloat16).

        As with `numpy(writable=True)`, finish writing through it before the tensor is used again.
        """
        if self.device.kind != "cpu":
            raise DeviceError(f"DLPack export from {self.device.name} is not possible; move it with .to('cpu') first")
        if self.requires_grad:
            raise AutogradError("DLPack export of a tensor that requires a gradient would lose it; use .detach() first")
        if self.dtype.name == "bfloat16":
            raise DTypeError("DLPack export of bfloat16 is not possible through NumPy; export .float() instead")
        buffer: Any = self.buffer
        buffer.stamp.version += 1  # packed copies may become stale; whether it was written to is not known
        return buffer.export(self.spec, True).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __repr__(self) -> str:
        extra = f", dtype={self.dtype.name}"
        if self.layout == CHANNELS_LAST:
            extra += ", layout=channels_last"
        if self.device.name != "cpu":
            extra += f", device={self.device.name}"
        if self._node is not None:
            extra += f", grad_op={self._node.op.name}"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        if self.device.kind == "null":
            return f"tensor(shape={self.shape}{extra})"
        if self.size == 0:
            return f"tensor([], shape={self.shape}{extra})"
        values = self.numpy()
        if self.dtype.name in ("bfloat16", "float16"):
            values = values.astype(np.float32)
        text = np.array2string(values, separator=", ", prefix="tensor(", precision=4, threshold=200, edgeitems=3)
        shape = f", shape={self.shape}" if self.size > 200 else ""
        return f"tensor({text}{shape}{extra})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)

    # -- placing and converting ----------------------------------------------------------------------------------

    def to(self, target: Any = None, *, device: Any = None, dtype: Any = None, layout: str | None = None) -> Tensor:
        """This tensor on another device, of another dtype or in another layout; itself where nothing changes.

        `target` may be a device, a device's name or a dtype. Differentiable.
        """
        if target is not None:
            if isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in devices.KINDS):
                device = target
            elif isinstance(target, Tensor):
                device, dtype = target.device, target.dtype
            elif isinstance(target, str) and target.partition(":")[0] in ("cuda", "gpu", "mps", "xpu"):
                device = target  # another library's name for a device: the error says which there are
            else:
                dtype = target
        out = self
        if dtype is not None and (wanted := as_dtype(dtype)) is not self.spec.dtype:
            out = _ops.cast(out, wanted)
        if layout is not None and layout != out.spec.layout:
            out = _ops.to_layout(out, layout)
        if device is not None and (place := devices.get(device)) is not out.device:
            out = _ops.transfer(out, place)
        return out

    def astype(self, dtype: Any) -> Tensor:
        return self.to(dtype=dtype)

    def float(self) -> Tensor:
        return self.to(dtype=float32)

    def double(self) -> Tensor:
        return self.to(dtype=float64)

    def half(self) -> Tensor:
        return self.to(dtype=float16)

    def long(self) -> Tensor:
        return self.to(dtype=int64)

    def cpu(self) -> Tensor:
        return self.to(device="cpu")

    def contiguous(self) -> Tensor:
        return self.to(layout=CONTIGUOUS)

    def channels_last(self) -> Tensor:
        """In the layout N, spatial..., C. Raises ShapeError unless the tensor has 3 to 5 axes."""
        if not 3 <= self.ndim <= 5:
            raise ShapeError(f"channels_last needs 3 to 5 axes (N, C, spatial...) and the tensor has shape {self.shape}")
        return self.to(layout=CHANNELS_LAST)

    def clone(self) -> Tensor:
        """A copy with memory of its own. Differentiable."""
        return _ops.copy(self)

    def copy_(self, source: Any) -> Tensor:
        """Overwrite the values with `source`'s, of the same shape. Not recorded for gradients."""
        if self._node is not None:
            raise AutogradError("copy_ would change a tensor that a gradient graph computed; copy into a leaf instead")
        array = source.numpy() if isinstance(source, Tensor) else np.asarray(source)
        if array.shape != self.shape:
            raise ShapeError(f"copy_: the source has shape {array.shape} and the tensor {self.shape}; they must be equal")
        if isinstance(source, Tensor) and source.buffer is self.buffer:
            return self
        write = getattr(self.buffer, "array", None)
        if write is not None:
            target = write(self.spec)
            if not target.flags.writeable:
                raise ArgumentError("copy_: the tensor shares memory that its owner made read-only; copy into a clone()")
            with np.errstate(all="ignore"):
                np.copyto(target, array, casting="unsafe")
            self.buffer.touch()
        else:
            self.device.write(self.buffer, array, self.spec)
            self.buffer.touch()
        return self

    # -- gradients -----------------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Ask for (or stop asking for) a gradient of a leaf. Raises DTypeError unless the dtype is floating."""
        if requires_grad and not self.dtype.is_floating:
            raise DTypeError(f"a {self.dtype.name} tensor has no gradient; only floating dtypes do, convert it with .to()")
        if self._node is not None and not requires_grad:
            raise AutogradError("only a leaf can stop requiring a gradient; use .detach() on a computed tensor")
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """The same memory without a gradient history."""
        return Tensor(self.buffer, self.spec, self.device)

    def backward(self, gradient: Tensor | None = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Accumulate d(self)/d(leaf) into `.grad` of every leaf that requires it.

        `gradient` is dL/d(self), 1 for a one-element tensor. See `tilewright.autograd.backward`.
        """
        from tilewright.autograd import backward

        backward(self, gradient, retain_graph=retain_graph or create_graph, create_graph=create_graph)

    def retain_grad(self) -> Tensor:
        """Keep the gradient of this computed tensor in `.grad` at the next backward."""
        if self._node is not None:
            self._node.keep_grad(self)
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
        """Call `hook` with this tensor's gradient at every backward; what it returns, unless None, takes its place.

        Returns a function that removes the hook. Raises AutogradError unless the tensor requires a gradient.
        """
        if not self.requires_grad:
            raise AutogradError("register_hook: the tensor requires no gradient, so the hook would never run; call requires_grad_() first")
        entry = (self._index, hook)
        if self._node is not None:
            if self._node.hooks is None:
                self._node.hooks = []
            hooks = self._node.hooks
        else:
            if not hasattr(self, "_hooks"):
                self._hooks: list[Any] = []
            hooks = self._hooks
        hooks.append(entry)

        def remove() -> None:
            hooks[:] = [e for e in hooks if e is not entry]

        return remove

    # -- operators (each is documented at the op of the same name) -----------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return _ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _ops.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _ops.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _ops.sub(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _ops.mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _ops.mul(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _ops.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _ops.div(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _ops.floor_div(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _ops.floor_div(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return _ops.remainder(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _ops.remainder(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _ops.pow(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _ops.pow(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return _ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _ops.matmul(other, self)

    def __neg__(self) -> Tensor:
        return _ops.neg(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return _ops.abs(self)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return NotImplemented if other is None else _ops.equal(self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return NotImplemented if other is None else _ops.not_equal(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return _ops.less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return _ops.less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _ops.greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _ops.greater_equal(self, other)

    def __and__(self, other: Any) -> Tensor:
        return _ops.logical_and(self, other)

    def __rand__(self, other: Any) -> Tensor:
        return _ops.logical_and(other, self)

    def __or__(self, other: Any) -> Tensor:
        return _ops.logical_or(self, other)

    def __ror__(self, other: Any) -> Tensor:
        return _ops.logical_or(other, self)

    def __xor__(self, other: Any) -> Tensor:
        return _ops.logical_xor(self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return _ops.logical_xor(other, self)

    def __invert__(self) -> Tensor:
        return _ops.logical_not(self)

    def __getitem__(self, index: Any) -> Tensor:
        return _ops.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _ops.setitem(self, index, value)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.spec.shape:
            raise ShapeError("a 0-d tensor cannot be iterated over; use .item() for its value")
        return iter(_ops.unbind(self))

    def __contains__(self, value: Any) -> bool:
        return bool(_ops.any(_ops.equal(self, value)).item())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # ops enter themselves as methods when they are loaded

    def view(self, *shape: Any) -> Tensor:
        """As `reshape`, which shares memory where it can."""
        return _ops.reshape(self, *shape)

    def view_as(self, other: Tensor) -> Tensor:
        """In the shape of another tensor."""
        return _ops.reshape(self, other.shape)

    reshape_as = view_as

    def fill_(self, value: Any) -> Tensor:
        """Overwrite every element with a number. Not recorded for gradients."""
        return self.copy_(np.broadcast_to(np.asarray(value), self.shape))

    def zero_(self) -> Tensor:
        """Overwrite every element with 0. Not recorded for gradients."""
        return self.fill_(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (np.array(self.numpy()), self.spec, self.device.name, self.requires_grad))

    def __deepcopy__(self, memo: Any) -> Tensor:
        made = self.detach().clone()
        made.requires_grad = self.requires_grad
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        return made

    @property
    def T(self) -> Tensor:
        """All axes in reverse order."""
        return _ops.permute(self, tuple(reversed(range(self.ndim))))


# -- making tensors ----------------------------------------------------------------------------------------------------


def _layout_of(array: np.ndarray) -> str:
    """channels_last where that is how the array lies and contiguous is not; contiguous otherwise."""
    if 3 <= array.ndim <= 5 and not array.flags.c_contiguous and np.moveaxis(array, 1, -1).flags.c_contiguous:
        return CHANNELS_LAST
    return CONTIGUOUS


def tensor(
    data: Any,
    dtype: Any = None,
    device: Any = None,
    *,
    layout: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A new tensor with a *copy* of `data`: a number, nested lists, a NumPy array (any strides), a Tensor, or DLPack.

    Python floats become float32 and ints int64; arrays keep their dtype. An array that lies channels-last stays so.
    Raises DTypeError for data that is not numeric and ArgumentError for ragged lists.
    """
    if isinstance(data, Tensor):
        array = data.numpy()
        if layout is None:
            layout = data.layout
    elif isinstance(data, np.ndarray):
        array = data
    elif isinstance(data, (np.generic, bool, int, float)):
        array = np.asarray(data)
    elif hasattr(data, "__dlpack__"):
        array = np.from_dlpack(data)
    else:
        try:
            array = np.asarray(data)
        except ValueError:
            raise ArgumentError("tensor(): the nested lists have unequal lengths; every row must be as long as the others") from None
    if dtype is None:
        from_python = not isinstance(data, (np.ndarray, np.generic, Tensor)) and not hasattr(data, "__dlpack__")
        wanted = float32 if from_python and array.dtype == np.float64 else as_dtype(array.dtype)
    else:
        wanted = as_dtype(dtype)
        if isinstance(data, (int, list, tuple)) and wanted.kind in "iu" and array.dtype.kind in "iu" and array.size:
            low, high = int(array.min()), int(array.max())
            if low < wanted.min or high > wanted.max:
                raise ArgumentError(
                    f"tensor(): values from {low} to {high} do not fit {wanted.name} ({wanted.min} to {wanted.max}); take a wider dtype"
                )
    place = devices.get(device)
    target = spec(array.shape, wanted, layout or _layout_of(array))
    out = Tensor(place.upload(array, target), target, place)
    return out.requires_grad_() if requires_grad else out


def from_numpy(array: np.ndarray) -> Tensor:
    """A CPU tensor that shares `array`'s memory: writes to one are seen in the other.

    The array must be dense in contiguous or channels-last order, aligned, in the machine's byte order and of a known
    dtype, else ArgumentError (use `tensor`, which copies). As weights it is packed anew at each use, since what the
    array's owner writes is not seen.
    """
    layout = _layout_of(array)
    target = spec(array.shape, as_dtype(array.dtype), layout)
    dense = array.flags.c_contiguous or layout == CHANNELS_LAST
    if not array.dtype.isnative:
        raise ArgumentError(f"from_numpy: an array of dtype {array.dtype.str} is in the other byte order; use tensor(array), which copies")
    if not dense or not array.flags.aligned:
        raise ArgumentError(
            f"from_numpy: an array of shape {array.shape} with strides {array.strides} is not dense in contiguous or "
            "channels-last order; use tensor(array), which copies"
        )
    cpu: Any = devices.get("cpu")
    return Tensor(cpu.alias(array), target, cpu)


def from_dlpack(source: Any) -> Tensor:
    """A CPU tensor that shares the memory of any object with `__dlpack__` (dense; see `from_numpy`).

    Raises DTypeError for a type that NumPy cannot import (bfloat16 is one), DeviceError for memory not on the CPU.
    """
    try:
        array = np.from_dlpack(source)
    except (BufferError, RuntimeError) as error:
        kind = DTypeError if "type" in str(error).lower() else DeviceError
        raise kind(f"from_dlpack: NumPy cannot share this {type(source).__name__}: {error}; convert it, or copy it to the CPU, first") from error
    return from_numpy(array)


def empty(*shape: Any, dtype: Any = float32, device: Any = None, layout: str = CONTIGUOUS) -> Tensor:
    """A tensor whose values are not set."""
    place = devices.get(device)
    target = spec(_shape(shape), as_dtype(dtype), layout)
    return Tensor(place.allocate(target.nbytes), target, place)


def full(
    shape: Any,
    value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    layout: str = CONTIGUOUS,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of `shape` filled with `value` (float32, int64 or bool by the value's type)."""
    wanted = as_dtype(type(value) if dtype is None else dtype)
    place = devices.get(device)
    target = spec(_shape((shape,)), wanted, layout)
    out = Tensor(
        place.upload(np.broadcast_to(np.asarray(value).astype(wanted.np), target.shape), target),
        target,
        place,
    )
    return out.requires_grad_() if requires_grad else out


def zeros(
    *shape: Any,
    dtype: Any = float32,
    device: Any = None,
    layout: str = CONTIGUOUS,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of zeros; the shape as separate sizes or one sequence."""
    return full(_shape(shape), 0, dtype=dtype, device=device, layout=layout, requires_grad=requires_grad)


def ones(
    *shape: Any,
    dtype: Any = float32,
    device: Any = None,
    layout: str = CONTIGUOUS,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of ones; the shape as separate sizes or one sequence."""
    return full(_shape(shape), 1, dtype=dtype, device=device, layout=layout, requires_grad=requires_grad)


def zeros_like(x: Tensor) -> Tensor:
    return full(x.shape, 0, dtype=x.dtype, device=x.device, layout=x.layout)


def ones_like(x: Tensor) -> Tensor:
    return full(x.shape, 1, dtype=x.dtype, device=x.device, layout=x.layout)


def arange(start: Any, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Values from `start` up to but without `stop`, as `numpy.arange`."""
    if stop is None:
        start, stop = 0, start
    array = np.arange(start, stop, step)
    return tensor(
        array,
        as_dtype(dtype) if dtype is not None else (float32 if array.dtype.kind == "f" else int64),
        device,
    )


def linspace(start: float, stop: float, num: int, *, dtype: Any = float32, device: Any = None) -> Tensor:
    return tensor(np.linspace(start, stop, num), dtype, device)


def eye(n: int, m: int | None = None, *, dtype: Any = float32, device: Any = None) -> Tensor:
    return tensor(np.eye(n, m), dtype, device)


def _restore(array: np.ndarray, lies: Spec, device: str, requires_grad: bool) -> Tensor:
    out = tensor(array, lies.dtype, device, layout=lies.layout)
    out.requires_grad = requires_grad
    return out


def _shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    if len(sizes) == 1 and not isinstance(sizes[0], (int, np.integer)):
        sizes = tuple(sizes[0])
    for s in sizes:
        if not isinstance(s, (int, np.integer)) or isinstance(s, bool):
            raise ShapeError(f"a shape needs integers and got {s!r} in {tuple(sizes)}")
    return tuple(int(s) for s in sizes)
