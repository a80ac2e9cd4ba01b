"""The PyTorch side of the comparisons: the same nets, written in plain PyTorch.

Parameter names are torchvision's (and, for Nature-CNN, those of `tilewright.models`), so one seeded state
(`benchmarks._state`) loads into both sides and their first results can be compared before anything is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._state import batch, seeded_state


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2015, arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 for 224x224 images (He et al., 2015, arXiv:1512.03385)."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        for number, width in enumerate((64, 128, 256, 512), start=1):
            stride = 1 if number == 1 else 2
            blocks = nn.Sequential(BasicBlock(channels, width, stride), BasicBlock(width, width, 1))
            setattr(self, f"layer{number}", blocks)
            channels = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expand, depthwise, project (Sandler et al., 2018, arXiv:1801.04381)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers: list[nn.Module] = [] if expand == 1 else [_conv_bn_relu6(inputs, hidden, 1)]
        layers += [
            _conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 1.0 for 224x224 images (Sandler et al., 2018, arXiv:1801.04381)."""

    SETTINGS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_bn_relu6(3, 32, 3, 2)]
        channels = 32
        for expand, width, repeats, first_stride in self.SETTINGS:
            for index in range(repeats):
                layers.append(InvertedResidual(channels, width, first_stride if index == 0 else 1, expand))
                channels = width
        layers.append(_conv_bn_relu6(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(torch.flatten(x, 1))


class NatureCNN(nn.Module):
    """The DQN net for four stacked 84x84 frames (Mnih et al., 2015, doi:10.1038/nature14236)."""

    def __init__(self, num_classes: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, 4)
        self.conv2 = nn.Conv2d(32, 64, 4, 2)
        self.conv3 = nn.Conv2d(64, 64, 3, 1)
        self.fc1 = nn.Linear(3136, 512)
        self.fc2 = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


MODELS = {"resnet18": ResNet18, "mobilenet_v2": MobileNetV2, "nature_cnn": NatureCNN}


def _model(name: str, layout: str) -> nn.Module:
    model = MODELS[name]()
    model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in seeded_state({k: tuple(v.shape) for k, v in model.state_dict().items()}).items()}
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the two sides' first losses are compared, so neither may draw at random
    return model.to(memory_format=_format(layout))


def _format(layout: str) -> torch.memory_format:
    return torch.channels_last if layout == "channels_last" else torch.contiguous_format


def training_step(model: str, batch_size: int, threads: int, layout: str = "channels_last"):
    """A callable doing forward, cross-entropy, backward and SGD with momentum; it returns the loss."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    net = _model(model, layout).train()
    images, labels = batch(model, batch_size)
    x = torch.from_numpy(images).to(memory_format=_format(layout))
    y = torch.from_numpy(labels)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, lambda loss: [float(loss.detach())]


def inference(model: str, batch_size: int, threads: int, layout: str = "channels_last"):
    """A callable doing one forward pass in evaluation mode; it returns the logits."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    net = _model(model, layout).eval()
    x = torch.from_numpy(batch(model, batch_size)[0]).to(memory_format=_format(layout))

    def forward() -> Tensor:
        with torch.inference_mode():
            return net(x)

    return forward, lambda logits: logits[0].tolist()


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "torch-onednn": _onednn_version()}


def _onednn_version() -> str:
    line = next((t for t in torch.__config__.show().splitlines() if "oneDNN" in t or "MKL-DNN" in t), "")
    return line.strip(" -")
