"""Augmentation: against plain definitions, in both layouts and dtypes, and under the seed."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.data import (
    BatchRandom,
    CenterCrop,
    ColorJitter,
    Compose,
    Cutout,
    HorizontalFlip,
    Mixup,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
)
from tilewright.errors import ArgumentError, DTypeError, ShapeError

IMAGES = [
    CenterCrop((5, 4)),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    Cutout(5),
    HorizontalFlip(),
    Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)),
    RandomAffine(20, 0.1, (0.8, 1.2), 10),
    RandomCrop((7, 6), padding=2),
    RandomErasing(),
    RandomResizedCrop((6, 5)),
    Resize((5, 9)),
]


def pictures(n=6, c=3, h=8, w=7, dtype=np.uint8, seed=0):
    x = np.random.default_rng(seed).integers(0, 256, (n, c, h, w)).astype(np.uint8)
    return x if dtype == np.uint8 else (x / 255).astype(dtype)


def nhwc(x):
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def rng(n=6, seed=0, epoch=0):
    return BatchRandom(seed, epoch, range(n))


@pytest.mark.parametrize("transform", IMAGES, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_contract(transform, dtype):
    x, y = pictures(dtype=dtype), np.arange(6)
    before = x.copy()
    out, labels = transform(x, y, rng())
    np.testing.assert_array_equal(x, before)
    assert labels is y
    assert out.dtype == (np.float32 if isinstance(transform, Normalize) else dtype)
    assert not np.shares_memory(out, x) or out is x
    # The layout stays, and changes nothing else.
    last, _ = transform(nhwc(x), y, rng())
    assert last.transpose(0, 2, 3, 1).flags.c_contiguous
    assert out.flags.c_contiguous
    np.testing.assert_allclose(last.astype(float), out.astype(float), atol=1 if dtype == np.uint8 else 1e-5)
    # A view with negative strides is as good as a copy.
    flipped, _ = transform(x[:, :, ::-1, ::-1], y, rng())
    np.testing.assert_array_equal(flipped, transform(x[:, :, ::-1, ::-1].copy(), y, rng())[0])
    # The same seed does the same; a sample is treated alike in any batch; another epoch differs.
    np.testing.assert_array_equal(out, transform(x, y, rng())[0])
    alone, _ = transform(x[3:4], y[3:4], BatchRandom(0, 0, [3]))
    np.testing.assert_allclose(alone[0].astype(float), out[3].astype(float), atol=1 if dtype == np.uint8 else 1e-5)
    if not isinstance(transform, CenterCrop | Normalize | Resize):
        assert not np.array_equal(out, transform(x, y, rng(epoch=1))[0])
    # No samples are no trouble.
    empty, _ = transform(x[:0], y[:0], rng(0))
    assert empty.shape == (0, *out.shape[1:])
    assert transform(nhwc(x[:0]), None, rng(0))[1] is None


@pytest.mark.parametrize("transform", IMAGES, ids=lambda t: type(t).__name__)
def test_what_is_not_a_batch_of_images_is_refused(transform):
    with pytest.raises(ShapeError, match=r"takes a batch of images \(N, C, H, W\), got shape \(3, 8, 7\)"):
        transform(pictures()[0], None, rng())
    with pytest.raises(DTypeError, match="got int64"):
        transform(pictures().astype(np.int64), None, rng())


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomCrop(0),
        lambda: RandomCrop(4, padding=-1),
        lambda: Resize((4, 0)),
        lambda: HorizontalFlip(1.5),
        lambda: RandomResizedCrop(4, scale=(0.5, 0.2)),
        lambda: RandomResizedCrop(4, ratio=(0, 1)),
        lambda: RandomErasing(p=-1),
        lambda: RandomErasing(scale=(0, 0.5)),
        lambda: RandomAffine(scale=(0, 1)),
        lambda: RandomAffine(shear=90),
        lambda: ColorJitter(brightness=-1),
        lambda: ColorJitter(hue=0.6),
        lambda: Normalize(0, 0),
        lambda: Cutout(0),
        lambda: Mixup(0),
        lambda: Mixup(3, 0),
    ],
)
def test_bad_options(make):
    with pytest.raises(ArgumentError):
        make()


# -- each against its definition ---------------------------------------------------------------------------------------


def test_normalize():
    x = pictures()
    mean, std = np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.6, 0.7])
    want = (x / 255 - mean[:, None, None]) / std[:, None, None]
    for layout in (x, nhwc(x)):
        np.testing.assert_allclose(Normalize(mean, std)(layout, None, None)[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(Normalize()(x, None, None)[0], x / 255, rtol=1e-6)
    np.testing.assert_allclose(Normalize(0.5, 2)(x / 255, None, None)[0], (x / 255 - 0.5) / 2, rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="gives 2 values for 3 channels"):
        Normalize((0, 0))(x, None, None)


def test_flip():
    x = pictures(200)
    out, _ = HorizontalFlip()(x, None, rng(200))
    flipped = [np.array_equal(a, b[..., ::-1]) for a, b in zip(out, x, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(out, x, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 70 < sum(flipped) < 130
    np.testing.assert_array_equal(HorizontalFlip(1)(x, None, rng(200))[0], x[..., ::-1])
    np.testing.assert_array_equal(HorizontalFlip(0)(x, None, rng(200))[0], x)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 7), st.data())
def test_crop_is_a_window_of_the_padded_image(h, w, padding, data):
    size = (data.draw(st.integers(1, h + 2 * padding)), data.draw(st.integers(1, w + 2 * padding)))
    x = np.arange(1, 2 * h * w + 1, dtype=np.float32).reshape(2, 1, h, w)
    out, _ = RandomCrop(size, padding, fill=-1)(x, None, rng(2, data.draw(st.integers(0, 50))))
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=-1)
    for a, b in zip(out, padded, strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(b[0], size)
        assert (windows == a[0]).all((2, 3)).any()


def test_crops_reach_every_place():
    x = np.zeros((1, 1, 3, 3), np.uint8)
    x[0, 0, 1, 1] = 1
    places = {tuple(np.argwhere(RandomCrop(3, 1)(x, None, BatchRandom(0, 0, [i]))[0][0, 0])[0]) for i in range(200)}
    assert len(places) == 9


@pytest.mark.parametrize("transform", [RandomCrop(9), RandomCrop((2, 10), 1), CenterCrop((9, 2))])
def test_crops_beyond_the_image(transform):
    with pytest.raises(ShapeError, match="images are 8x7"):
        transform(pictures(), None, rng())


def test_center_crop():
    x = pictures()
    np.testing.assert_array_equal(CenterCrop((4, 3))(x, None, None)[0], x[:, :, 2:6, 2:5])


def test_resize():
    x = np.full((2, 3, 8, 8), 77, np.uint8)
    assert (Resize((3, 11))(x, None, None)[0] == 77).all()
    ramp = np.arange(8, dtype=np.float32).repeat(2).reshape(1, 1, 1, 16).repeat(4, 2)
    np.testing.assert_allclose(Resize((4, 8))(ramp, None, None)[0][0, 0, 0, 1:-1], np.arange(1, 7), atol=0.05)
    two = pictures(c=2)
    np.testing.assert_array_equal(Resize((4, 4))(two, None, None)[0][:, 1:], Resize((4, 4))(two[:, 1:], None, None)[0])
    assert Resize((8, 7))(two, None, None)[0] is two
    with pytest.raises(ShapeError, match="0x7"):
        Resize(4)(two[:, :, :0], None, None)


def test_resized_crop_of_the_whole_is_a_resize():
    x = pictures(h=8, w=8)
    np.testing.assert_array_equal(RandomResizedCrop(5, (1, 1), (1, 1))(x, None, rng())[0], Resize(5)(x, None, None)[0])


def test_affine_without_motion_is_the_identity():
    for x in (pictures(), pictures(dtype=np.float32)):
        np.testing.assert_allclose(RandomAffine()(x, None, rng())[0], x, atol=1e-6)


class Fixed:
    """Random numbers of the test's choosing."""

    def __init__(self, *values):
        self.values = np.array([values], float)

    def uniform(self, count):
        assert count == self.values.shape[1]
        return self.values


def test_affine_turns_anticlockwise_by_right_angles():
    x = pictures(1, h=7, w=7, dtype=np.float32)
    for turns in (-1, 1, 2):
        out, _ = RandomAffine(degrees=180)(x, None, Fixed(0.5 + turns / 4, 0.5, 0, 0.5, 0.5))
        np.testing.assert_allclose(out[0], np.rot90(x[0], turns, (1, 2)), atol=1e-5)


def test_affine_shifts_scales_and_fills():
    x = pictures(1, h=8, w=8, dtype=np.float32)
    out, _ = RandomAffine(translate=0.25, fill=-3)(x, None, Fixed(0.5, 0.5, 0, 1.0, 0.0))
    np.testing.assert_allclose(out[0, :, 2:, :-2], x[0, :, :-2, 2:], atol=1e-5)
    assert (out[0, :, :2] == -3).all()
    assert (out[0, :, :, -2:] == -3).all()
    # A linear picture stays linear: twice as large about the centre has half the slope.
    ramp = (np.arange(9.0)[:, None] + 10 * np.arange(9.0)).astype(np.float32)[None, None]
    out, _ = RandomAffine(scale=(2, 2))(ramp, None, Fixed(0.5, 0.5, 0, 0.5, 0.5))
    np.testing.assert_allclose(out, 44 + (ramp - 44) / 2, atol=1e-4)
    # Shear moves rows sideways in proportion to their height above the centre.
    out, _ = RandomAffine(shear=45)(ramp, None, Fixed(0.5, 1.0, 0, 0.5, 0.5))
    row, column = np.mgrid[:9, :9]
    inside = np.abs(column - (row - 4) - 4) <= 3.5
    np.testing.assert_allclose(out[0, 0][inside], (row + 10 * (column - (row - 4)))[inside], atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.floats(-180, 180, allow_subnormal=False), st.floats(0.5, 2), st.floats(-0.3, 0.3, allow_subnormal=False))
def test_affine_agrees_with_a_pixel_by_pixel_reference(angle, scale, shift):
    h, w = 6, 5
    x = pictures(1, 1, h, w, np.float64)
    out, _ = RandomAffine(180, 0.3, (scale, scale), fill=0.5)(x, None, Fixed((angle / 180 + 1) / 2, 0.5, 0, (shift / 0.3 + 1) / 2, 0.5))
    t, cy, cx = np.deg2rad(angle), (h - 1) / 2, (w - 1) / 2
    for r in range(h):
        for c in range(w):
            dy, dx = r - cy - shift * h, c - cx
            sy = (np.cos(t) * dy + np.sin(t) * dx) / scale + cy
            sx = (-np.sin(t) * dy + np.cos(t) * dx) / scale + cx
            y0, x0 = int(np.floor(sy)), int(np.floor(sx))
            want = sum(
                wy * wx * (x[0, 0, yy, xx] if 0 <= yy < h and 0 <= xx < w else 0.5)
                for yy, wy in ((y0, 1 - sy + y0), (y0 + 1, sy - y0))
                for xx, wx in ((x0, 1 - sx + x0), (x0 + 1, sx - x0))
            )
            assert abs(out[0, 0, r, c] - want) < 1e-4


def test_affine_of_many_large_images_goes_in_parts():
    x = pictures(5, 1, 300, 300)
    transform = RandomAffine(20, 0.1)
    out, _ = transform(x, None, rng(5))
    np.testing.assert_array_equal(out[4:], transform(x[4:], None, BatchRandom(0, 0, [4]))[0])


def test_jitter_at_its_centre_is_the_identity():
    x = pictures(1, dtype=np.float32)
    out = ColorJitter(0.5, 0.5, 0.5, 0.3)(x, None, Fixed(0.5, 0.5, 0.5, 0.5))[0]
    np.testing.assert_allclose(out, x, atol=1e-5)


def test_jitter_against_definitions():
    x = pictures(1, dtype=np.float32)
    grey = np.tensordot([0.299, 0.587, 0.114], x[0].astype(float), 1)
    np.testing.assert_allclose(ColorJitter(brightness=0.5)(x, None, Fixed(1, 0.5, 0.5, 0.5))[0], np.clip(x * 1.5, 0, 1), atol=1e-5)
    out = ColorJitter(contrast=0.5)(x, None, Fixed(0.5, 0, 0.5, 0.5))[0]
    np.testing.assert_allclose(out, 0.5 * x + 0.5 * grey.mean(), atol=1e-5)
    out = ColorJitter(saturation=1)(x, None, Fixed(0.5, 0.5, 0, 0.5))[0]
    np.testing.assert_allclose(out[0], np.repeat(grey[None], 3, 0), atol=1e-5)
    # All four, one after the other, where nothing is clipped.
    soft = (0.4 + 0.2 * x).astype(np.float32)
    whole = ColorJitter(0.2, 0.2, 0.2, 0.1)(soft, None, Fixed(0.9, 0.2, 0.7, 0.8))[0]
    step = soft
    for i, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        values = [0.5] * 4
        values[i] = (0.9, 0.2, 0.7, 0.8)[i]
        step = ColorJitter(**{name: 0.1 if name == "hue" else 0.2})(step, None, Fixed(*values))[0]
    np.testing.assert_allclose(whole, step, atol=1e-4)


def test_hue_turns_colours_and_leaves_grey():
    x = np.full((1, 3, 2, 2), 0.4, np.float32)
    np.testing.assert_allclose(ColorJitter(hue=0.5)(x, None, Fixed(0.5, 0.5, 0.5, 0.9))[0], x, atol=1e-5)
    x[0, 0], x[0, 2] = 0.6, 0.5
    out = ColorJitter(hue=0.5)(x, None, Fixed(0.5, 0.5, 0.5, 1.0))[0]
    luma = np.array([0.299, 0.587, 0.114])
    assert abs(luma @ out[0, :, 0, 0] - luma @ x[0, :, 0, 0]) < 1e-5
    # Half a turn mirrors about grey: the hue is the opposite one.
    before, after = colorsys.rgb_to_yiq(*x[0, :, 0, 0].tolist()), colorsys.rgb_to_yiq(*out[0, :, 0, 0].tolist())
    np.testing.assert_allclose(after[1:], [-before[1], -before[2]], atol=0.01)


def test_jitter_of_grey_images_and_of_other_channels():
    x = pictures(1, 1, dtype=np.float32)
    np.testing.assert_allclose(ColorJitter(0, 0, 0.9, 0.5)(x, None, Fixed(0.1, 0.2, 0.3, 0.4))[0], x, atol=1e-6)
    bright = ColorJitter(brightness=1)(pictures(1, 1), None, Fixed(1, 0.5, 0.5, 0.5))[0]
    np.testing.assert_array_equal(bright, np.minimum(pictures(1, 1).astype(int) * 2, 255))
    with pytest.raises(ShapeError, match="got 4"):
        ColorJitter(0.1)(pictures(c=4), None, rng())


def test_erasing_rectangles():
    x = np.ones((300, 3, 20, 16), np.float32)
    out, _ = RandomErasing(0.5, (0.1, 0.3), (0.5, 2), fill=0)(x, None, rng(300))
    erased = (out == 0).all((1, 2, 3)) | (out == 0).any((1, 2, 3))
    assert 110 < erased.sum() < 190
    for image in out[erased]:
        rows, columns = np.where(image[0] == 0)
        box = image[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (box == 0).all()
        assert 0.05 < box[0].size / 320 < 0.4


def test_cutout_is_centred_anywhere():
    x = np.ones((400, 1, 9, 9), np.uint8)
    out, _ = Cutout(3, fill=0)(x, None, rng(400))
    counts = (out == 0).sum((1, 2, 3))
    assert set(counts.tolist()) == {4, 6, 9}
    assert (out == 0).any(0)[0].all()


def test_mixup():
    x, y = pictures(dtype=np.float32), np.array([0, 1, 2, 0, 1, 2])
    out, soft = Mixup(3, 1.0)(x, y, rng())
    lam, other = rng().batch, None
    share = np.float32(lam.beta(1.0, 1.0))
    other = lam.permutation(6)
    np.testing.assert_allclose(out, x * share + x[other] * (1 - share), atol=1e-6)
    np.testing.assert_allclose(soft.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(soft, np.eye(3)[y] * share + np.eye(3)[y[other]] * (1 - share), atol=1e-6)
    again, softer = Mixup(3, 1.0)(out, soft, rng())
    assert softer.shape == (6, 3)
    assert again.dtype == np.float32
    last, _ = Mixup(3)(nhwc(x), y, rng())
    assert last.transpose(0, 2, 3, 1).flags.c_contiguous


@pytest.mark.parametrize(
    "error, x, y",
    [
        (DTypeError, pictures(), np.arange(6) % 3),
        (ArgumentError, pictures(dtype=np.float32), None),
        (ArgumentError, pictures(dtype=np.float32), np.arange(6)),
        (ShapeError, pictures(dtype=np.float32), np.zeros((6, 2), np.float32)),
        (ShapeError, pictures(dtype=np.float32), np.zeros(6, np.float32)),
    ],
)
def test_mixup_that_does_not_fit(error, x, y):
    with pytest.raises(error):
        Mixup(3)(x, y, rng())


def test_compose_goes_on_in_each_samples_stream():
    x = pictures()
    both = Compose([RandomCrop(8, 1), HorizontalFlip()])
    r = rng()
    step, _ = RandomCrop(8, 1)(x, None, r)
    step, _ = HorizontalFlip()(step, None, r)
    np.testing.assert_array_equal(both(x, None, rng())[0], step)
    assert Compose([])(x, None, rng())[0] is x
