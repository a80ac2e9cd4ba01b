"""MobileNetV2 (Sandler et al., 2018): inverted residuals with linear bottlenecks."""

from __future__ import annotations

from tilewright.models._blocks import ConvNormActivation, divisible
from tilewright.nn import BatchNorm2d, Conv2d, Dropout, Linear, Module, Sequential, conv_bn_act, init
from tilewright.ops.movement import flatten
from tilewright.ops.pool2d import global_avg_pool2d
from tilewright.tensor import Tensor

_PLAN = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(Module):
    """Pointwise expansion, depthwise convolution, pointwise projection, and a shortcut where the shape stays."""

    def __init__(self, inp: int, oup: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = round(inp * expand)
        layers: list[Module] = [] if expand == 1 else [ConvNormActivation(inp, hidden, 1, activation="relu6")]
        layers += [ConvNormActivation(hidden, hidden, 3, stride, hidden, "relu6"), Conv2d(hidden, oup, 1, bias=False), BatchNorm2d(oup)]
        self.conv = Sequential(*layers)
        self.use_res_connect = stride == 1 and inp == oup

    def forward(self, x: Tensor) -> Tensor:
        *first, conv, norm = self.conv._modules.values()
        y = x
        for layer in first:
            y = layer(y)
        return conv_bn_act(conv, norm, y, None, x if self.use_res_connect else None)


class MobileNetV2(Module):
    """(N, in_channels, H, W) to (N, num_classes)."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, dropout: float = 0.2) -> None:
        super().__init__()
        c = divisible(32 * width)
        layers: list[Module] = [ConvNormActivation(in_channels, c, 3, 2, activation="relu6")]
        for expand, channels, count, stride in _PLAN:
            out = divisible(channels * width)
            for i in range(count):
                layers.append(InvertedResidual(c, out, stride if i == 0 else 1, expand))
                c = out
        last = divisible(1280 * max(1.0, width))
        layers.append(ConvNormActivation(c, last, 1, activation="relu6"))
        self.features = Sequential(*layers)
        self.classifier = Sequential(Dropout(dropout), Linear(last, num_classes))
        for m in self.modules():
            if isinstance(m, Conv2d):
                init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu", groups=m.groups)
            elif isinstance(m, Linear):
                init.normal_(m.weight, 0.0, 0.01)
                init.zeros_(m.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(flatten(global_avg_pool2d(self.features(x)), 1))


def mobilenet_v2(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> MobileNetV2:
    """MobileNetV2: 3.5 million parameters at width 1."""
    return MobileNetV2(num_classes, in_channels, width)
