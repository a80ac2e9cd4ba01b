"""Convolution layers. Weights are kept channels-last, as every kernel wants them."""

from __future__ import annotations

import math
from typing import Any

from tilewright.devices.api import CHANNELS_LAST
from tilewright.errors import ArgumentError
from tilewright.nn import init
from tilewright.nn.module import Module, Parameter
from tilewright.ops.conv2d import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from tilewright.tensor import Tensor, empty


def _size(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)


class _Conv(Module):
    rank = 2
    transposed = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ArgumentError(f"{name}: groups {groups} must divide in_channels {in_channels} and out_channels {out_channels}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = _size(kernel_size, self.rank), _size(stride, self.rank), _size(dilation, self.rank)
        self.padding = padding if isinstance(padding, str) else _size(padding, self.rank)
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        self.weight = Parameter(empty(first, second // groups, *self.kernel_size, layout=CHANNELS_LAST))
        self.bias = Parameter(empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default: both uniform within 1 / sqrt(fan_in)."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(max(init.fans(self.weight)[0], 1))
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding!r}"
        text += f", dilation={self.dilation}" if max(self.dilation) > 1 else ""
        text += f", groups={self.groups}" if self.groups > 1 else ""
        return text + ("" if self.bias is not None else ", bias=False")


class Conv2d(_Conv):
    """(N, in, H, W) to (N, out, OH, OW), with a residual and an activation where the call gives them; see `tilewright.conv2d`."""

    def forward(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, residual=residual, activation=activation
        )  # fmt: skip


class Conv1d(_Conv):
    """(N, in, L) to (N, out, OL); see `tilewright.conv1d`."""

    rank = 1

    def forward(self, x: Tensor) -> Tensor:
        return conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConvTranspose2d(_Conv):
    """(N, in, H, W) to (N, out, OH, OW); see `tilewright.conv_transpose2d`."""

    transposed = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, bias: bool = True, dilation: Any = 1,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.output_padding = _size(output_padding, self.rank)

    def forward(self, x: Tensor) -> Tensor:
        return conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )  # fmt: skip


class ConvTranspose1d(ConvTranspose2d):
    """(N, in, L) to (N, out, OL); see `tilewright.conv_transpose1d`."""

    rank = 1

    def forward(self, x: Tensor) -> Tensor:
        one = (self.stride[0], self.padding[0], self.output_padding[0], self.groups, self.dilation[0])
        return conv_transpose1d(x, self.weight, self.bias, *one)  # type: ignore[arg-type]
