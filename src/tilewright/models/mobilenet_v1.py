"""MobileNetV1 (Howard et al., 2017): depthwise and pointwise convolutions in turn."""

from __future__ import annotations

from tilewright.models._blocks import ConvNormActivation, divisible
from tilewright.nn import Conv2d, Dropout, Linear, Module, Sequential, init
from tilewright.ops.movement import flatten
from tilewright.ops.pool2d import global_avg_pool2d
from tilewright.tensor import Tensor

_PLAN = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class MobileNetV1(Module):
    """(N, in_channels, H, W) to (N, num_classes). plan: (channels, stride) of each pair of convolutions."""

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, plan: tuple[tuple[int, int], ...] = _PLAN, stem: int = 32,
        stem_stride: int = 2, dropout: float = 0.001,
    ) -> None:  # fmt: skip
        super().__init__()
        c = divisible(stem * width)
        layers: list[Module] = [ConvNormActivation(in_channels, c, 3, stem_stride)]
        for channels, stride in plan:
            out = divisible(channels * width)
            layers.append(Sequential(ConvNormActivation(c, c, 3, stride, c), ConvNormActivation(c, out, 1)))
            c = out
        self.features = Sequential(*layers)
        self.classifier = Sequential(Dropout(dropout), Linear(c, num_classes))
        for m in self.modules():
            if isinstance(m, Conv2d):
                init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu", groups=m.groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(flatten(global_avg_pool2d(self.features(x)), 1))


def mobilenet_v1(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> MobileNetV1:
    """MobileNetV1: 4.2 million parameters."""
    return MobileNetV1(num_classes, in_channels, width)


def mobilenet_small(num_classes: int = 10, in_channels: int = 1) -> MobileNetV1:
    """A MobileNetV1 for small pictures (28 x 28): six pairs of convolutions from 32 to 128 channels, 60 thousand parameters."""
    plan = ((32, 1), (64, 2), (64, 1), (96, 2), (128, 1), (128, 1))
    return MobileNetV1(num_classes, in_channels, 1.0, plan, stem=32, stem_stride=1, dropout=0.1)
