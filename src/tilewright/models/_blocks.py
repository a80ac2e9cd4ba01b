"""What the MobileNets share."""

from __future__ import annotations

from typing import Any

from tilewright.nn import BatchNorm2d, Conv2d, Hardswish, ReLU, ReLU6, Sequential, conv_bn_act
from tilewright.tensor import Tensor

_LAYERS: dict[str, Any] = {"relu": ReLU, "relu6": ReLU6, "hard_swish": Hardswish}


class ConvNormActivation(Sequential):
    """Convolution, batch norm, activation: children "0", "1", "2", as torchvision's block of that name."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, groups: int = 1, activation: str | None = "relu",
        eps: float = 1e-5, momentum: float = 0.1,
    ) -> None:  # fmt: skip
        conv = Conv2d(in_channels, out_channels, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False)
        layers: list[Any] = [conv, BatchNorm2d(out_channels, eps, momentum)]
        if activation is not None:
            layers.append(_LAYERS[activation]())
        super().__init__(*layers)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv, norm, *act = self._modules.values()
        if act and act[0]._hooks:
            return act[0](conv_bn_act(conv, norm, x, None, residual))
        return conv_bn_act(conv, norm, x, self.activation, residual)


def divisible(value: float, by: int = 8) -> int:
    """The nearest multiple, at least `by` and not below nine tenths of the value (Sandler et al., 2018, the authors' code rule)."""
    out = max(by, int(value + by / 2) // by * by)
    return out + by if out < 0.9 * value else out
