"""Resizing: coordinates of each mode worked out by hand, gradients, and the shuffles as each other's inverse."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import ArgumentError, ShapeError

LAYOUTS = ("contiguous", "channels_last")


def line(values, **options):
    x = tw.tensor(np.asarray(values, np.float64).reshape(1, 1, 1, -1))
    return tw.resize(x, **options).numpy().ravel()


def test_nearest_takes_the_floor():
    np.testing.assert_array_equal(line([0, 1, 2], size=(1, 6)), [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(line([0, 1, 2, 3, 4], size=(1, 3)), [0, 1, 3])
    np.testing.assert_array_equal(line([0, 1, 2, 3, 4], scale_factor=(1, 1.5)), [0, 0, 1, 2, 2, 3, 4])


def test_bilinear_between_pixel_centres():
    np.testing.assert_allclose(line([0, 1], size=(1, 4), mode="bilinear"), [0, 0.25, 0.75, 1])
    np.testing.assert_allclose(line([0, 1, 2, 3], size=(1, 2), mode="bilinear"), [0.5, 2.5])
    np.testing.assert_allclose(line([0, 3], size=(1, 4), mode="bilinear", align_corners=True), [0, 1, 2, 3])
    np.testing.assert_allclose(line([5, 7, 9], size=(1, 1), mode="bilinear", align_corners=True), [5])


def test_a_scale_factor_scales_the_coordinates_as_given():
    np.testing.assert_allclose(line([0, 1, 2], scale_factor=(1, 1.25), mode="bilinear"), [0, 0.7, 1.5])


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_the_same_size_changes_nothing(mode):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    np.testing.assert_array_equal(tw.resize(tw.tensor(x), (5, 4), mode=mode).numpy(), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"size": (8, 3)},
        {"scale_factor": 2},
        {"size": (8, 3), "mode": "bilinear"},
        {"size": (3, 9), "mode": "bilinear", "align_corners": True},
        {"scale_factor": (1.7, 0.6), "mode": "bilinear"},
    ],
    ids=str,
)
def test_gradients_of_first_and_second_order(options, layout):
    x = tw.tensor(np.random.default_rng(0).standard_normal((2, 2, 4, 5)), layout=layout, requires_grad=True)
    assert tw.resize(x, **options).layout == layout
    assert tw.gradcheck(lambda x: tw.resize(x, **options), [x])
    assert tw.gradcheck(lambda x: tw.grad(tw.sum(tw.resize(x, **options) ** 3.0), [x], create_graph=True)[0], [x], atol=1e-4)


def test_an_empty_batch():
    x = tw.zeros(0, 2, 3, 3, requires_grad=True)
    y = tw.resize(x, scale_factor=2, mode="bilinear")
    assert y.shape == (0, 2, 6, 6)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shuffles_undo_each_other(layout):
    x = tw.tensor(np.arange(2 * 8 * 3 * 2, dtype=np.float64).reshape(2, 8, 3, 2), layout=layout, requires_grad=True)
    y = tw.pixel_shuffle(x, 2)
    assert y.shape == (2, 2, 6, 4)
    np.testing.assert_array_equal(y.numpy()[0, 0, :2, :2], x.numpy()[0, :4, 0, 0].reshape(2, 2))
    np.testing.assert_array_equal(tw.pixel_unshuffle(y, 2).numpy(), x.numpy())
    assert tw.gradcheck(lambda x: tw.pixel_shuffle(x, 2), [x])


def test_errors_name_what_is_wrong():
    with pytest.raises(ArgumentError, match="mode 'cubic' must be"):
        tw.resize(tw.zeros(1, 1, 2, 2), 4, mode="cubic")
    with pytest.raises(ArgumentError, match="one or two positive integers"):
        tw.resize(tw.zeros(1, 1, 2, 2), (0, 2))
    with pytest.raises(ShapeError, match="at least one row and column"):
        tw.resize(tw.zeros(1, 1, 0, 2), 4)
    with pytest.raises(ShapeError, match=r"multiple of 2\^2"):
        tw.pixel_shuffle(tw.zeros(1, 3, 2, 2), 2)
    with pytest.raises(ShapeError, match="multiples of 2"):
        tw.pixel_unshuffle(tw.zeros(1, 1, 3, 2), 2)
