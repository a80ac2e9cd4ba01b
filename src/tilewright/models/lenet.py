"""LeNet-5 (LeCun et al., 1998), with relu and max pooling."""

from __future__ import annotations

from tilewright.nn import Conv2d, Linear, Module
from tilewright.ops.movement import flatten
from tilewright.ops.pool2d import max_pool2d
from tilewright.tensor import Tensor


class LeNet(Module):
    """(N, in_channels, H, W), H and W at least 12, to (N, num_classes)."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1, input_size: tuple[int, int] = (28, 28)) -> None:
        super().__init__()
        self.conv1 = Conv2d(in_channels, 6, 5, padding=2)
        self.conv2 = Conv2d(6, 16, 5)
        h, w = ((s // 2 - 4) // 2 for s in input_size)
        self.fc1 = Linear(16 * h * w, 120)
        self.fc2 = Linear(120, 84)
        self.fc3 = Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.conv1(x, "relu"), 2)
        x = max_pool2d(self.conv2(x, "relu"), 2)
        return self.fc3(self.fc2(self.fc1(flatten(x, 1), "relu"), "relu"))


def lenet(num_classes: int = 10, in_channels: int = 1, input_size: tuple[int, int] = (28, 28)) -> LeNet:
    """LeNet-5 for images of `input_size`."""
    return LeNet(num_classes, in_channels, input_size)
