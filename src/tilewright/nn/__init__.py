"""Layers. One file per family; names, parameters and defaults are PyTorch's."""

from tilewright.nn import init
from tilewright.nn.activation import (
    ELU,
    GELU,
    SELU,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)  # fmt: skip
from tilewright.nn.container import Flatten, Identity, ModuleDict, ModuleList, Sequential
from tilewright.nn.conv import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from tilewright.nn.dropout import Dropout, Dropout2d
from tilewright.nn.fold import conv_bn_act
from tilewright.nn.linear import Embedding, Linear
from tilewright.nn.loss import BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, KLDivLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from tilewright.nn.module import Module, Parameter
from tilewright.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm
from tilewright.nn.pool import AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d
from tilewright.nn.profile import Profile, profile
from tilewright.nn.resize import PixelShuffle, PixelUnshuffle, Upsample
from tilewright.nn.summary import Summary, summary

__all__ = [
    "ELU", "GELU", "SELU", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool1d", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm1d",
    "BatchNorm2d", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "CrossEntropyLoss", "Dropout", "Dropout2d", "Embedding",
    "Flatten", "GroupNorm", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Identity", "InstanceNorm2d", "KLDivLoss", "L1Loss",
    "LayerNorm", "LeakyReLU", "Linear", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "Mish", "Module", "ModuleDict", "ModuleList",
    "NLLLoss", "PReLU", "Parameter", "PixelShuffle", "PixelUnshuffle", "Profile", "ReLU", "ReLU6", "Sequential", "SiLU", "Sigmoid", "SmoothL1Loss",
    "Softmax", "Softplus", "Softsign", "Summary", "Tanh", "Upsample", "conv_bn_act", "init", "profile", "summary",
]  # fmt: skip
