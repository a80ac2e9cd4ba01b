"""ResNet (He et al., 2016), with the stride in a bottleneck's 3x3 convolution."""

from __future__ import annotations

from typing import Any

from tilewright.nn import BatchNorm2d, Conv2d, Linear, Module, Sequential, conv_bn_act, init
from tilewright.ops.movement import flatten
from tilewright.ops.pool2d import global_avg_pool2d, max_pool2d
from tilewright.tensor import Tensor


class Downsample(Sequential):
    """A pointwise convolution and its batch norm: the shortcut where the shape changes."""

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__(Conv2d(inplanes, planes, 1, stride, bias=False), BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self._modules.values()
        return conv_bn_act(conv, norm, x)


class BasicBlock(Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: Module | None = None) -> None:
        super().__init__()
        self.conv1 = Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm2d(planes)
        self.conv2 = Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = conv_bn_act(self.conv1, self.bn1, x, "relu")
        return conv_bn_act(self.conv2, self.bn2, y, "relu", identity)


class Bottleneck(Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: Module | None = None) -> None:
        super().__init__()
        self.conv1 = Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = BatchNorm2d(planes)
        self.conv2 = Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = BatchNorm2d(planes)
        self.conv3 = Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = BatchNorm2d(planes * 4)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = conv_bn_act(self.conv1, self.bn1, x, "relu")
        y = conv_bn_act(self.conv2, self.bn2, y, "relu")
        return conv_bn_act(self.conv3, self.bn3, y, "relu", identity)


class ResNet(Module):
    """(N, in_channels, H, W) to (N, num_classes)."""

    def __init__(self, block: Any, layers: tuple[int, ...], num_classes: int = 1000, in_channels: int = 3) -> None:
        super().__init__()
        self.inplanes = 64
        self.conv1 = Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        self.bn1 = BatchNorm2d(64)
        self.layer1 = self._layer(block, 64, layers[0], 1)
        self.layer2 = self._layer(block, 128, layers[1], 2)
        self.layer3 = self._layer(block, 256, layers[2], 2)
        self.layer4 = self._layer(block, 512, layers[3], 2)
        self.fc = Linear(512 * block.expansion, num_classes)
        for m in self.modules():
            if isinstance(m, Conv2d):
                init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _layer(self, block: Any, planes: int, count: int, stride: int) -> Sequential:
        out = planes * block.expansion
        downsample = Downsample(self.inplanes, out, stride) if stride != 1 or self.inplanes != out else None
        blocks = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = out
        blocks += [block(out, planes) for _ in range(1, count)]
        return Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = conv_bn_act(self.conv1, self.bn1, x, "relu")
        x = max_pool2d(x, 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(flatten(global_avg_pool2d(x), 1))


def resnet18(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """ResNet-18: 11.7 million parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels)


def resnet34(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """ResNet-34: 21.8 million parameters."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels)


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """ResNet-50: 25.6 million parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels)
