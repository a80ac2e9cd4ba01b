"""The network of Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015)."""

from __future__ import annotations

from tilewright.nn import Conv2d, Linear, Module
from tilewright.ops.movement import flatten
from tilewright.tensor import Tensor


class NatureCNN(Module):
    """(N, in_channels, 84, 84) pixels to (N, num_classes) values."""

    def __init__(self, num_classes: int = 6, in_channels: int = 4) -> None:
        super().__init__()
        self.conv1 = Conv2d(in_channels, 32, 8, 4)
        self.conv2 = Conv2d(32, 64, 4, 2)
        self.conv3 = Conv2d(64, 64, 3)
        self.fc1 = Linear(3136, 512)
        self.fc2 = Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(x, "relu"), "relu"), "relu")
        return self.fc2(self.fc1(flatten(x, 1), "relu"))


def nature_cnn(num_classes: int = 6, in_channels: int = 4) -> NatureCNN:
    """The Atari network, for 84 x 84 pixels."""
    return NatureCNN(num_classes, in_channels)
