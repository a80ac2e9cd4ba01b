"""MobileNetV3 (Howard et al., 2019): inverted residuals with squeeze-and-excitation and hard swish."""

from __future__ import annotations

from tilewright.models._blocks import ConvNormActivation, divisible
from tilewright.nn import Conv2d, Dropout, Hardswish, Linear, Module, Sequential, init
from tilewright.ops.movement import flatten
from tilewright.ops.pool2d import global_avg_pool2d
from tilewright.tensor import Tensor

# kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride
_LARGE = (
    (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1), (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1), (3, 240, 80, False, "hard_swish", 2), (3, 200, 80, False, "hard_swish", 1),
    (3, 184, 80, False, "hard_swish", 1), (3, 184, 80, False, "hard_swish", 1), (3, 480, 112, True, "hard_swish", 1),
    (3, 672, 112, True, "hard_swish", 1), (5, 672, 160, True, "hard_swish", 2), (5, 960, 160, True, "hard_swish", 1),
    (5, 960, 160, True, "hard_swish", 1),
)  # fmt: skip
_SMALL = (
    (3, 16, 16, True, "relu", 2), (3, 72, 24, False, "relu", 2), (3, 88, 24, False, "relu", 1), (5, 96, 40, True, "hard_swish", 2),
    (5, 240, 40, True, "hard_swish", 1), (5, 240, 40, True, "hard_swish", 1), (5, 120, 48, True, "hard_swish", 1),
    (5, 144, 48, True, "hard_swish", 1), (5, 288, 96, True, "hard_swish", 2), (5, 576, 96, True, "hard_swish", 1),
    (5, 576, 96, True, "hard_swish", 1),
)  # fmt: skip


class SqueezeExcitation(Module):
    """Channels scaled by what their means say (Hu et al., 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = Conv2d(channels, squeezed, 1)
        self.fc2 = Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(global_avg_pool2d(x), "relu"), "hard_sigmoid")


class InvertedResidual(Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection, and a shortcut where the shape stays."""

    def __init__(self, c: int, kernel: int, expanded: int, out: int, squeeze: bool, activation: str, stride: int) -> None:
        super().__init__()

        def norm(i: int, o: int, k: int, s: int, g: int, a: str | None) -> ConvNormActivation:
            return ConvNormActivation(i, o, k, s, g, a, 1e-3, 0.01)

        layers: list[Module] = [] if expanded == c else [norm(c, expanded, 1, 1, 1, activation)]
        layers.append(norm(expanded, expanded, kernel, stride, expanded, activation))
        if squeeze:
            layers.append(SqueezeExcitation(expanded, divisible(expanded / 4)))
        layers.append(norm(expanded, out, 1, 1, 1, None))
        self.block = Sequential(*layers)
        self.use_res_connect = stride == 1 and c == out

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self.block._modules.values()
        y = x
        for layer in first:
            y = layer(y)
        return last(y, x if self.use_res_connect else None)


class MobileNetV3(Module):
    """(N, in_channels, H, W) to (N, num_classes)."""

    def __init__(self, plan: tuple[tuple[int, int, int, bool, str, int], ...], head: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        layers: list[Module] = [ConvNormActivation(in_channels, 16, 3, 2, 1, "hard_swish", 1e-3, 0.01)]
        c = 16
        for kernel, expanded, out, squeeze, activation, stride in plan:
            layers.append(InvertedResidual(c, kernel, expanded, out, squeeze, activation, stride))
            c = out
        layers.append(ConvNormActivation(c, 6 * c, 1, 1, 1, "hard_swish", 1e-3, 0.01))
        self.features = Sequential(*layers)
        self.classifier = Sequential(Linear(6 * c, head), Hardswish(), Dropout(0.2), Linear(head, num_classes))
        for m in self.modules():
            if isinstance(m, Conv2d):
                init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu", groups=m.groups)
                if m.bias is not None:
                    init.zeros_(m.bias)
            elif isinstance(m, Linear):
                init.normal_(m.weight, 0.0, 0.01)
                init.zeros_(m.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(flatten(global_avg_pool2d(self.features(x)), 1))


def mobilenet_v3_large(num_classes: int = 1000, in_channels: int = 3) -> MobileNetV3:
    """MobileNetV3-Large: 5.5 million parameters."""
    return MobileNetV3(_LARGE, 1280, num_classes, in_channels)


def mobilenet_v3_small(num_classes: int = 1000, in_channels: int = 3) -> MobileNetV3:
    """MobileNetV3-Small: 2.5 million parameters."""
    return MobileNetV3(_SMALL, 1024, num_classes, in_channels)
