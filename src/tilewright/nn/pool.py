"""Pooling layers: each is the op of the same name."""

from __future__ import annotations

from typing import Any

from tilewright.nn.module import Module
from tilewright.ops import pool2d as ops
from tilewright.tensor import Tensor


class MaxPool2d(Module):
    """`tilewright.max_pool2d`."""

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, return_indices: bool = False, ceil_mode: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation
        self.return_indices, self.ceil_mode = return_indices, ceil_mode

    def forward(self, x: Tensor) -> Any:
        return ops.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class AvgPool2d(Module):
    """`tilewright.avg_pool2d`."""

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool2d(x, *self.options)


class MaxPool1d(Module):
    """`tilewright.max_pool1d`."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1, ceil_mode: bool = False) -> None:
        super().__init__()
        self.options = (kernel_size, stride, padding, dilation, ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool1d(x, *self.options)


class AvgPool1d(Module):
    """`tilewright.avg_pool1d`."""

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False, count_include_pad: bool = True
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = (kernel_size, stride, padding, ceil_mode, count_include_pad)

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool1d(x, *self.options)


class AdaptiveAvgPool2d(Module):
    """`tilewright.adaptive_avg_pool2d`."""

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return ops.adaptive_avg_pool2d(x, self.output_size)


class AdaptiveMaxPool2d(AdaptiveAvgPool2d):
    """`tilewright.adaptive_max_pool2d`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.adaptive_max_pool2d(x, self.output_size)
