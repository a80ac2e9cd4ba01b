"""Activation layers: each is the op of the same name."""

from __future__ import annotations

from typing import Any

from tilewright.nn.module import Module, Parameter
from tilewright.ops import pointwise as ops
from tilewright.ops.softmax import log_softmax, softmax
from tilewright.tensor import Tensor, full


class _Fixed(Module):
    """An activation with parameters fixed at construction; `inplace` is accepted and has no effect."""

    fn: Any
    names: tuple[str, ...] = ()

    def __init__(self, *values: float, inplace: bool = False, **named: float) -> None:
        super().__init__()
        if len(values) > len(self.names):
            values = values[:-1]  # PyTorch's positional `inplace`
        self.options = {**dict(zip(self.names, values, strict=False)), **named}

    def forward(self, x: Tensor) -> Tensor:
        return type(self).fn(x, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.options.items())


class ReLU(_Fixed):
    """`tilewright.relu`."""

    fn = staticmethod(ops.relu)


class ReLU6(_Fixed):
    """`tilewright.relu6`."""

    fn = staticmethod(ops.relu6)


class LeakyReLU(_Fixed):
    """`tilewright.leaky_relu`."""

    fn = staticmethod(ops.leaky_relu)
    names = ("negative_slope",)


class ELU(_Fixed):
    """`tilewright.elu`."""

    fn = staticmethod(ops.elu)
    names = ("alpha",)


class SELU(_Fixed):
    """`tilewright.selu`."""

    fn = staticmethod(ops.selu)


class GELU(_Fixed):
    """`tilewright.gelu`."""

    fn = staticmethod(ops.gelu)
    names = ("approximate",)


class SiLU(_Fixed):
    """`tilewright.silu`."""

    fn = staticmethod(ops.silu)


class Mish(_Fixed):
    """`tilewright.mish`."""

    fn = staticmethod(ops.mish)


class Sigmoid(_Fixed):
    """`tilewright.sigmoid`."""

    fn = staticmethod(ops.sigmoid)


class Tanh(_Fixed):
    """`tilewright.tanh`."""

    fn = staticmethod(ops.tanh)


class Softplus(_Fixed):
    """`tilewright.softplus`."""

    fn = staticmethod(ops.softplus)
    names = ("beta",)


class Softsign(_Fixed):
    """`tilewright.softsign`."""

    fn = staticmethod(ops.softsign)


class Hardsigmoid(_Fixed):
    """`tilewright.hard_sigmoid`."""

    fn = staticmethod(ops.hard_sigmoid)


class Hardswish(_Fixed):
    """`tilewright.hard_swish`."""

    fn = staticmethod(ops.hard_swish)


class Hardtanh(_Fixed):
    """`tilewright.hard_tanh`."""

    fn = staticmethod(ops.hard_tanh)
    names = ("min", "max")


class PReLU(Module):
    """`tilewright.prelu` with a trained slope, one or one per channel."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        super().__init__()
        self.weight = Parameter(full((num_parameters,), float(init)))

    def forward(self, x: Tensor) -> Tensor:
        return ops.prelu(x, self.weight)


class Softmax(Module):
    """`tilewright.softmax` along `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x, self.dim)


class LogSoftmax(Softmax):
    """`tilewright.log_softmax` along `dim`."""

    def forward(self, x: Tensor) -> Tensor:
        return log_softmax(x, self.dim)
