"""Augmentation: callables `transform(x, y, random) -> (x, y)` on whole batches.

`x` is (N, C, H, W), uint8 in 0..255 or floating-point (0..1 where colour matters, before `Normalize`); `y` is
the labels or None; `random` is a `BatchRandom`. A transform never writes to its input, keeps the memory
layout (channels-last stays channels-last), and draws a fixed number of values per sample, so that what
happens to a sample depends on the seed, the epoch and the sample alone. Any function of the same signature
will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tilewright.data._random import BatchRandom
from tilewright.errors import ArgumentError, DTypeError, ShapeError

Transform = Callable[[np.ndarray, "np.ndarray | None", BatchRandom], "tuple[np.ndarray, np.ndarray | None]"]
Size = int | tuple[int, int]

# ITU-R BT.601 luma, and RGB -> YIQ, whose first row it is.
LUMA = np.array([0.299, 0.587, 0.114])
YIQ = np.array([LUMA, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])


def _rule(holds: bool, transform: object, rule: str) -> None:
    if not holds:
        raise ArgumentError(f"{transform}: {rule}")


def _pair(size: Size) -> tuple[int, int]:
    if isinstance(size, tuple | list):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _sized(transform: object, size: Size) -> None:
    _rule(min(_pair(size)) >= 1, transform, "height and width must be at least 1 pixel")


def _images(transform: object, x: np.ndarray) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise ShapeError(f"{transform}: takes a batch of images (N, C, H, W), got shape {x.shape}")
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise DTypeError(f"{transform}: takes uint8 or floating-point images, got {x.dtype}")
    n, c, h, w = x.shape
    return n, c, h, w


def _nhwc(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1)


def _channels_last(x: np.ndarray) -> bool:
    return abs(x.strides[1]) < abs(x.strides[3])


def _new(like: np.ndarray, h: int, w: int, dtype: object = None) -> np.ndarray:
    """Uninitialised (N, C, h, w), lying in memory as `like` does."""
    n, c = like.shape[:2]
    if _channels_last(like):
        return np.empty((n, h, w, c), dtype or like.dtype).transpose(0, 3, 1, 2)  # type: ignore[arg-type]
    return np.empty((n, c, h, w), dtype or like.dtype)  # type: ignore[arg-type]


def _store(out: np.ndarray, values: np.ndarray) -> None:
    """Write floating-point `values` to `out`, rounding and clipping where it holds integers."""
    out[...] = np.clip(np.rint(values), 0, 255) if out.dtype == np.uint8 else values


@dataclass(frozen=True)
class Compose:
    """One transform after another."""

    transforms: Sequence[Transform]

    def __call__(self, x, y, random):
        for transform in self.transforms:
            x, y = transform(x, y, random)
        return x, y


@dataclass(frozen=True)
class Normalize:
    """(x - mean) / std in float32; uint8 is first brought to 0..1. The default brings to 0..1 and no more.

    Args:
        mean, std: a number, or one per channel, in units of the 0..1 scale.
    """

    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0

    def __post_init__(self):
        _rule(bool(np.all(np.asarray(self.std) > 0)), self, "std must be above 0")

    def __call__(self, x, y, random):
        n, c, h, w = _images(self, x)
        std = np.asarray(self.std, np.float64)
        scale = 1 / (std * 255) if x.dtype == np.uint8 else 1 / std
        shift = -np.asarray(self.mean, np.float64) / std
        for values in (scale, shift):
            if values.ndim > 1 or values.size not in (1, c):
                raise ShapeError(f"{self}: gives {values.size} values for {c} channels")
        scale = np.broadcast_to(scale.astype(np.float32), c)
        shift = np.broadcast_to(shift.astype(np.float32), c)
        out = _new(x, h, w, np.float32)
        if _channels_last(x):
            # Whole rows at a time: an inner loop over three channels would cost several times more.
            rows = _nhwc(out).reshape(n, h, w * c)
            source = np.ascontiguousarray(_nhwc(x)).reshape(n, h, w * c)
            np.multiply(source, np.tile(scale, w), out=rows, dtype=np.float32, casting="same_kind")
            rows += np.tile(shift, w)
        else:
            np.multiply(x, scale[:, None, None], out=out, dtype=np.float32, casting="same_kind")
            out += shift[:, None, None]
        return out, y


def _resample(x: np.ndarray, h: int, w: int, boxes: np.ndarray | None = None) -> np.ndarray:
    """Bilinear, antialiased resize of each image, or of its box (left, top, right, bottom), to (h, w)."""
    out = _new(x, h, w)
    n, c = x.shape[:2]
    for i in range(n):
        box = None if boxes is None else tuple(boxes[i])
        if x.dtype == np.uint8 and c == 3:
            image = Image.fromarray(np.ascontiguousarray(x[i].transpose(1, 2, 0)))
            resized = image.resize((w, h), Image.Resampling.BILINEAR, box)
            out[i] = np.asarray(resized).transpose(2, 0, 1)
            continue
        for k in range(c):
            plane = x[i, k] if x.dtype == np.uint8 else x[i, k].astype(np.float32)
            image = Image.fromarray(np.ascontiguousarray(plane))
            out[i, k] = np.asarray(image.resize((w, h), Image.Resampling.BILINEAR, box))
    return out


@dataclass(frozen=True)
class Resize:
    """Resize to exactly (height, width), bilinear and antialiased; the aspect is not kept."""

    size: Size

    def __post_init__(self):
        _sized(self, self.size)

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        if 0 in (h, w):
            raise ShapeError(f"{self}: cannot resize images of {h}x{w} pixels")
        return (x, y) if (h, w) == _pair(self.size) else (_resample(x, *_pair(self.size)), y)


@dataclass(frozen=True)
class CenterCrop:
    """The central (height, width) pixels."""

    size: Size

    def __post_init__(self):
        _sized(self, self.size)

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        oh, ow = _pair(self.size)
        if oh > h or ow > w:
            raise ShapeError(f"{self}: images are {h}x{w}; resize them first")
        out = _new(x, oh, ow)
        top, left = (h - oh) // 2, (w - ow) // 2
        out[...] = x[:, :, top : top + oh, left : left + ow]
        return out, y


@dataclass(frozen=True)
class RandomCrop:
    """(height, width) pixels at a random place of the image, framed by `padding` pixels of `fill`."""

    size: Size
    padding: int = 0
    fill: float = 0

    def __post_init__(self):
        _sized(self, self.size)
        _rule(self.padding >= 0, self, "padding must be at least 0")

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        (oh, ow), p = _pair(self.size), self.padding
        if oh > h + 2 * p or ow > w + 2 * p:
            raise ShapeError(f"{self}: images are {h}x{w}, {h + 2 * p}x{w + 2 * p} when padded; resize them first")
        places = [h + 2 * p - oh + 1, w + 2 * p - ow + 1]
        corners = (random.uniform(2) * places).astype(np.int64) - p
        out = _new(x, oh, ow)
        if p:
            out[...] = self.fill
        for i, (top, left) in enumerate(corners.tolist()):
            y0, x0, y1, x1 = max(top, 0), max(left, 0), min(top + oh, h), min(left + ow, w)
            if y0 < y1 and x0 < x1:
                out[i, :, y0 - top : y1 - top, x0 - left : x1 - left] = x[i, :, y0:y1, x0:x1]
        return out, y


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of the image, resized to (height, width) (Szegedy et al., arXiv:1409.4842).

    Args:
        scale: range of the part's area, as a share of the image's.
        ratio: range of its width / height, drawn evenly on a log scale; clipped where it leaves the image.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self):
        _sized(self, self.size)
        _rule(0 < self.scale[0] <= self.scale[1] <= 1, self, "scale must rise within 0 to 1")
        _rule(0 < self.ratio[0] <= self.ratio[1], self, "ratio must rise and be above 0")

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        if 0 in (h, w):
            raise ShapeError(f"{self}: cannot resize images of {h}x{w} pixels")
        top, left, bh, bw = _random_boxes(random.uniform(4), h, w, self.scale, self.ratio)
        return _resample(x, *_pair(self.size), np.stack([left, top, left + bw, top + bh], 1).astype(float)), y


def _random_boxes(u, h, w, scale, ratio) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(top, left, height, width) of boxes within (h, w), from four uniform numbers each."""
    area = h * w * (scale[0] + u[:, 0] * (scale[1] - scale[0]))
    aspect = np.exp(np.log(ratio[0]) + u[:, 1] * (np.log(ratio[1]) - np.log(ratio[0])))
    bh = np.clip(np.rint(np.sqrt(area / aspect)), 1, h).astype(np.int64)
    bw = np.clip(np.rint(np.sqrt(area * aspect)), 1, w).astype(np.int64)
    top = (u[:, 2] * (h - bh + 1)).astype(np.int64)
    left = (u[:, 3] * (w - bw + 1)).astype(np.int64)
    return top, left, bh, bw


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirror left and right with probability p."""

    p: float = 0.5

    def __post_init__(self):
        _rule(0 <= self.p <= 1, self, "p must lie in 0 to 1")

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        flip = random.uniform(1)[:, 0] < self.p
        out = _new(x, h, w)
        for i, flipped in enumerate(flip.tolist()):
            out[i] = x[i, :, :, ::-1] if flipped else x[i]
        return out, y


@dataclass(frozen=True)
class RandomAffine:
    """Rotate, shift, scale and shear about the centre, bilinear; what comes from outside the image is `fill`.

    Args:
        degrees: the angle is even in -degrees .. degrees.
        translate: the shift is even in -translate .. translate, as a share of the height and of the width.
        scale: range of the factor of magnification.
        shear: the horizontal shear angle is even in -shear .. shear degrees.
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shear: float = 0.0
    fill: float = 0.0

    def __post_init__(self):
        _rule(0 < self.scale[0] <= self.scale[1], self, "scale must rise and be above 0")
        _rule(abs(self.shear) < 90, self, "shear must lie below 90 degrees")

    def __call__(self, x, y, random):
        n, _, h, w = _images(self, x)
        u = random.uniform(5)
        angle, shear = (
            np.deg2rad(self.degrees * (2 * u[:, 0] - 1)),
            np.deg2rad(self.shear * (2 * u[:, 1] - 1)),
        )
        scale = self.scale[0] + u[:, 2] * (self.scale[1] - self.scale[0])
        shift = self.translate * (2 * u[:, 3:5] - 1) * [h, w]
        cos, sin, tan = np.cos(angle), np.sin(angle), np.tan(shear)
        # Forward, in (row, column) about the centre: anticlockwise rotation times shear. Output looks up the inverse.
        forward = np.stack([cos - sin * tan, -sin, sin + cos * tan, cos], 1).reshape(n, 2, 2)
        inverse = np.linalg.inv(forward * scale[:, None, None])
        out = _new(x, h, w)
        step = max(1, (1 << 18) // max(1, h * w))  # images at a time: bounds the index arrays to a few MB
        for i in range(0, n if h * w else 0, step):
            part = slice(i, i + step)
            _store(_nhwc(out[part]), _warp(_nhwc(x[part]), inverse[part], shift[part], self.fill))
        return out, y


def _warp(x: np.ndarray, inverse: np.ndarray, shift: np.ndarray, fill: float) -> np.ndarray:
    """Bilinear: out(p) = x(inverse (p - centre - shift) + centre); x is (N, H, W, C), the result float32."""
    n, h, w, c = x.shape
    framed = np.full((n, h + 2, w + 2, c), fill, np.float32)
    framed[:, 1:-1, 1:-1] = x
    centre = np.array([(h - 1) / 2, (w - 1) / 2])
    offset = centre - np.einsum("nij,nj->ni", inverse, centre + shift)
    rows, columns = np.arange(h)[:, None], np.arange(w)

    def place(axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        a, b, t = (v[:, None, None] for v in (inverse[:, axis, 0], inverse[:, axis, 1], offset[:, axis]))
        where = np.clip(a * rows + b * columns + t, -1, size)
        low = np.minimum(np.floor(where), size - 1)
        return low.astype(np.int64) + 1, (where - low).astype(np.float32)[..., None]

    (top, wy), (left, wx) = place(0, h), place(1, w)
    base = (np.arange(n)[:, None, None] * (h + 2) + top) * (w + 2) + left
    flat = framed.reshape(-1, c)
    upper = flat[base] * (1 - wx) + flat[base + 1] * wx
    lower = flat[base + w + 2] * (1 - wx) + flat[base + w + 3] * wx
    return upper * (1 - wy) + lower * wy


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue at random, in this order; the result is clipped once.

    Each image's change is one affine map of its colours: brightness scales, contrast moves away from the
    image's mean grey, saturation moves away from each pixel's grey (ITU-R BT.601), hue turns the I-Q plane of
    YIQ.

    Args:
        brightness, contrast, saturation: the factor is even in max(0, 1 - value) .. 1 + value.
        hue: the angle is even in -hue .. hue turns, at most 0.5.

    Floating-point images must lie in 0..1. Saturation and hue leave grey images alone.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self):
        _rule(min(self.brightness, self.contrast, self.saturation) >= 0, self, "values must be at least 0")
        _rule(0 <= self.hue <= 0.5, self, "hue must lie in 0 to 0.5 turns")

    def __call__(self, x, y, random):
        n, c, h, w = _images(self, x)
        if c not in (1, 3):
            raise ShapeError(f"{self}: takes 1 (grey) or 3 (red, green, blue) channels, got {c}")
        u = random.uniform(4)

        def factor(column: int, spread: float) -> np.ndarray:
            low = max(0.0, 1 - spread)
            return low + u[:, column] * (1 + spread - low)

        brightness, contrast, saturation = (factor(i, s) for i, s in enumerate((self.brightness, self.contrast, self.saturation)))
        mix = np.eye(c)[None].repeat(n, 0)
        luma = LUMA if c == 3 else np.ones(1)
        if c == 3:
            turn = 2 * np.pi * self.hue * (2 * u[:, 3] - 1)
            plane = np.eye(3)[None].repeat(n, 0)
            plane[:, 1, 1] = plane[:, 2, 2] = np.cos(turn)
            plane[:, 1, 2], plane[:, 2, 1] = -np.sin(turn), np.sin(turn)
            s = saturation[:, None, None]
            mix = np.linalg.inv(YIQ) @ plane @ YIQ @ (s * mix + (1 - s) * luma)
        # Both of these keep grey grey, so that contrast's constant passes through them unchanged.
        mean = x.mean((2, 3), dtype=np.float64) @ luma if h * w else np.zeros(n)
        mix = (mix * (brightness * contrast)[:, None, None]).astype(np.float32)
        constant = ((1 - contrast) * brightness * mean).astype(np.float32)

        out = _new(x, h, w)
        if _channels_last(x):
            values = _nhwc(x).astype(np.float32).reshape(n, h * w, c) @ mix.transpose(0, 2, 1)
        else:
            values = mix @ x.astype(np.float32).reshape(n, c, h * w)
        values += constant[:, None, None]
        np.clip(values, 0, 255 if x.dtype == np.uint8 else 1, out=values)
        if _channels_last(x):
            _store(_nhwc(out), values.reshape(n, h, w, c))
        else:
            _store(out, values.reshape(x.shape))
        return out, y


def _erase(x: np.ndarray, boxes: np.ndarray, which: np.ndarray, fill: float) -> np.ndarray:
    """A copy of x with boxes (top, left, bottom, right) of the images in `which` set to `fill`."""
    out = _new(x, *x.shape[2:])
    out[...] = x
    for i in np.flatnonzero(which):
        top, left, bottom, right = boxes[i]
        out[i, :, top:bottom, left:right] = fill
    return out


@dataclass(frozen=True)
class Cutout:
    """Blank a square of `size` pixels centred anywhere (DeVries & Taylor, arXiv:1708.04552)."""

    size: int
    fill: float = 0.0

    def __post_init__(self):
        _sized(self, self.size)

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        top, left = (random.uniform(2) * [h, w]).astype(np.int64).T - self.size // 2
        edges = [top, left, top + self.size, left + self.size]
        boxes = np.stack([np.clip(e, 0, limit) for e, limit in zip(edges, (h, w, h, w), strict=True)], 1)
        return _erase(x, boxes, np.ones(len(x), bool), self.fill), y


@dataclass(frozen=True)
class RandomErasing:
    """With probability p, blank a rectangle within the image (Zhong et al., arXiv:1708.04896).

    Args:
        scale: range of its area, as a share of the image's.
        ratio: range of its width / height, drawn evenly on a log scale; clipped where it leaves the image.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    fill: float = 0.0

    def __post_init__(self):
        _rule(0 <= self.p <= 1, self, "p must lie in 0 to 1")
        _rule(0 < self.scale[0] <= self.scale[1] <= 1, self, "scale must rise within 0 to 1")
        _rule(0 < self.ratio[0] <= self.ratio[1], self, "ratio must rise and be above 0")

    def __call__(self, x, y, random):
        _, _, h, w = _images(self, x)
        u = random.uniform(5)
        if 0 in (h, w):
            return x.copy(), y
        top, left, bh, bw = _random_boxes(u[:, 1:], h, w, self.scale, self.ratio)
        return _erase(x, np.stack([top, left, top + bh, left + bw], 1), u[:, 0] < self.p, self.fill), y


@dataclass(frozen=True)
class Mixup:
    """Mix each sample with another of its batch, labels alike (Zhang et al., arXiv:1710.09412).

    One lam per batch, from Beta(alpha, alpha). Images must be floating-point: put `Normalize` before. Labels
    (N,) of integers become (N, num_classes) float32 of probabilities, which `cross_entropy` takes; (N,
    num_classes) stay so.
    """

    num_classes: int
    alpha: float = 0.2

    def __post_init__(self):
        _rule(self.num_classes >= 1, self, "num_classes must be at least 1")
        _rule(self.alpha > 0, self, "alpha must be above 0")

    def __call__(self, x, y, random):
        if x.dtype.kind != "f":
            raise DTypeError(f"{self}: takes floating-point images, got {x.dtype}; put Normalize before it")
        if y is None:
            raise ArgumentError(f"{self}: needs labels, and the data set has none")
        soft = self._soft(y)
        lam = np.float32(random.batch.beta(self.alpha, self.alpha))
        other = random.batch.permutation(len(x))
        mixed = (x * lam).astype(x.dtype, copy=False)
        mixed += (x[other] * (1 - lam)).astype(x.dtype, copy=False)
        return mixed, soft * lam + soft[other] * (1 - lam)

    def _soft(self, y: np.ndarray) -> np.ndarray:
        if y.ndim == 2 and y.shape[1] == self.num_classes and y.dtype.kind == "f":
            return y.astype(np.float32)
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise ShapeError(f"{self}: takes integer labels (N,) or probabilities (N, C), got {y.dtype} {y.shape}")
        if y.size and not 0 <= y.min() <= y.max() < self.num_classes:
            raise ArgumentError(f"{self}: labels run from {y.min()} to {y.max()}")
        return np.eye(self.num_classes, dtype=np.float32)[y]
