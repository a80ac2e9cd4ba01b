"""Networks. Parameter names are torchvision's where it has the network, so its weights load."""

from tilewright.models.lenet import LeNet, lenet
from tilewright.models.mobilenet_v1 import MobileNetV1, mobilenet_small, mobilenet_v1
from tilewright.models.mobilenet_v2 import MobileNetV2, mobilenet_v2
from tilewright.models.mobilenet_v3 import MobileNetV3, mobilenet_v3_large, mobilenet_v3_small
from tilewright.models.nature_cnn import NatureCNN, nature_cnn
from tilewright.models.resnet import ResNet, resnet18, resnet34, resnet50

__all__ = [
    "LeNet", "MobileNetV1", "MobileNetV2", "MobileNetV3", "NatureCNN", "ResNet", "lenet", "mobilenet_small", "mobilenet_v1", "mobilenet_v2",
    "mobilenet_v3_large", "mobilenet_v3_small", "nature_cnn", "resnet18", "resnet34", "resnet50",
]  # fmt: skip
