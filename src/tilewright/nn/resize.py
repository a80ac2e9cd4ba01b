"""Resizing layers: each is the op of the same name."""

from __future__ import annotations

from typing import Any

from tilewright.nn.module import Module
from tilewright.ops.resize import pixel_shuffle, pixel_unshuffle, resize
from tilewright.tensor import Tensor


class Upsample(Module):
    """`tilewright.resize`."""

    def __init__(self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool = False) -> None:
        super().__init__()
        self.options = (size, scale_factor, mode, align_corners)

    def forward(self, x: Tensor) -> Tensor:
        return resize(x, *self.options)


class PixelShuffle(Module):
    """`tilewright.pixel_shuffle`."""

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.factor = upscale_factor

    def forward(self, x: Tensor) -> Tensor:
        return pixel_shuffle(x, self.factor)


class PixelUnshuffle(PixelShuffle):
    """`tilewright.pixel_unshuffle`."""

    def forward(self, x: Tensor) -> Tensor:
        return pixel_unshuffle(x, self.factor)
