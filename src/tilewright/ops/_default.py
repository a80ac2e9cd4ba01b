"""What the device `auto` is measured by: a convolution of middling size and its two gradients, enough to fill a large GPU."""

from __future__ import annotations

from tilewright.devices.api import CHANNELS_LAST, Problem, spec
from tilewright.ops.conv2d import Conv2dAttrs, InputGradAttrs, WeightGradAttrs
from tilewright.tune.pick import fastest


def problems(images: int = 16, channels: int = 64, size: int = 56) -> list[Problem]:
    x, w = spec((images, channels, size, size), "float32", CHANNELS_LAST), spec((channels, channels, 3, 3), "float32", CHANNELS_LAST)
    conv = Conv2dAttrs(padding=(1, 1, 1, 1))
    return [
        Problem("conv2d", conv, (x, w, None, None), (x,)),
        Problem("conv2d_input_grad", InputGradAttrs(conv, (size, size)), (x, w), (x,)),
        Problem("conv2d_weight_grad", WeightGradAttrs(conv, (3, 3), False), (x, x), (w,)),
    ]


def pick() -> str:
    return fastest(problems())
