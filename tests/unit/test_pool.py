"""Pooling at its edges: NaN and infinities, ceil_mode, divisors, indices, and gradients of first and second order."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import ArgumentError, DTypeError, ShapeError

LAYOUTS = ("contiguous", "channels_last")


def filled(shape, value, layout="contiguous"):
    return tw.tensor(np.full(shape, value, np.float32), layout=layout)


def ramp(*shape, dtype=np.float64):
    """Distinct values in a shuffled order, so that no maximum is tied."""
    n = int(np.prod(shape))
    return ((np.random.default_rng(0).permutation(n) - n / 2) * 0.25).reshape(shape).astype(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_window_of_minus_infinity_is_minus_infinity(layout, channels, padding):
    x = np.full((1, channels, 6, 6), -np.inf, np.float32)
    x[..., 4:, 4:] = 1
    y, at = tw.max_pool2d(tw.tensor(x, layout=layout), 2, padding=padding, return_indices=True)
    assert (y.numpy()[..., 0, 0] == -np.inf).all()
    assert (y.numpy()[..., -1, -1] == 1).all()
    flat = x.reshape(1, channels, 36)
    np.testing.assert_array_equal(np.take_along_axis(flat, at.numpy().reshape(1, channels, -1), 2).reshape(y.shape), y.numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at", range(4))
def test_a_nan_anywhere_in_a_window_wins(layout, at):
    x = np.ones((2, 16, 4, 4), np.float32)
    x[1, 7, at // 2, at % 2] = np.nan
    x[1, 7, 1 - at // 2, 1 - at % 2] = np.inf
    y = tw.max_pool2d(tw.tensor(x, layout=layout), 2).numpy()
    assert np.isnan(y[1, 7, 0, 0])
    assert np.isnan(y).sum() == 1


def test_very_large_finite_values():
    x = tw.tensor(np.full((1, 16, 4, 4), 3e38, np.float32), layout="channels_last")
    assert (tw.max_pool2d(x, 2).numpy() == np.float32(3e38)).all()


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "out"),
    [
        ((6, 7), 1, 2, 0, 1, (3, 4)),
        ((4, 4), 3, 2, 1, 1, (3, 3)),
        ((5, 5), 2, 2, 0, 1, (3, 3)),
        ((4, 3), (3, 1), (3, 2), 0, (2, 1), (1, 2)),  # a window longer than the input, cut short
        ((3, 4), (3, 3), (2, 3), (1, 0), (1, 2), (2, 1)),
    ],
)
def test_ceil_mode_sizes(size, kernel, stride, padding, dilation, out):
    """Sizes by PyTorch's rule, worked out by hand."""
    x = tw.ones(1, 1, *size)
    y = tw.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode=True)
    assert y.shape[2:] == out
    assert (y.numpy() == 1).all()


def test_ceil_mode_does_not_stretch_without_end():
    with pytest.raises(ShapeError, match="does not fit the input"):
        tw.max_pool2d(tw.ones(1, 1, 2, 2), 4, 1, ceil_mode=True)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_integers_stay_integers(dtype):
    low = np.iinfo(dtype).min
    x = np.full((1, 1, 3, 3), low, dtype)
    y = tw.max_pool2d(tw.tensor(x), 3, 1, 1)
    assert y.numpy().dtype == dtype
    assert (y.numpy() == low).all()


def test_divisors_at_the_border():
    x = tw.ones(1, 1, 4, 4)

    def corner(**options):
        return tw.avg_pool2d(x, 3, 2, 1, **options).numpy()[0, 0, 0, 0]

    assert corner() == np.float32(4 / 9)
    assert corner(count_include_pad=False) == 1
    assert corner(divisor_override=2) == 2
    y = tw.avg_pool2d(x, 3, 2, 1, ceil_mode=True).numpy()[0, 0]
    assert y[2, 2] == np.float32(1 / 4)  # rows 3 and 4 of the padded input; row 5 lies past the padding
    assert (tw.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False).numpy() == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_indices_point_at_the_maximum_of_their_plane(layout):
    x = ramp(2, 16, 7, 6, dtype=np.float32)
    y, at = tw.max_pool2d(tw.tensor(x, layout=layout), 3, 2, 1, return_indices=True)
    assert at.dtype is tw.int64
    taken = np.take_along_axis(x.reshape(2, 16, -1), at.numpy().reshape(2, 16, -1), 2)
    np.testing.assert_array_equal(taken.reshape(y.shape), y.numpy())


def test_windows_of_more_than_256_taps():
    x = ramp(1, 2, 20, 20)
    y, at = tw.max_pool2d(tw.tensor(x), 18, 1, return_indices=True)
    for i in range(3):
        for j in range(3):
            np.testing.assert_array_equal(y.numpy()[:, :, i, j], x[:, :, i : i + 18, j : j + 18].max((2, 3)))
    np.testing.assert_array_equal(np.take_along_axis(x.reshape(1, 2, -1), at.numpy().reshape(1, 2, -1), 2).reshape(y.shape), y.numpy())
    t = tw.tensor(x, requires_grad=True)
    assert tw.gradcheck(lambda t: tw.max_pool2d(t, 18, 1), [t])


POOLS = {
    "max overlapping": lambda x: tw.max_pool2d(x, 3, 1, 1),
    "max gaps": lambda x: tw.max_pool2d(x, 2, 3),
    "max asymmetric": lambda x: tw.max_pool2d(x, 3, 2, (0, 1, 2, 0)),
    "max dilated": lambda x: tw.max_pool2d(x, 2, 1, dilation=(2, 3)),
    "max ceil": lambda x: tw.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg": lambda x: tw.avg_pool2d(x, 3, 2, 1),
    "avg ceil": lambda x: tw.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg asymmetric": lambda x: tw.avg_pool2d(x, 3, 2, (0, 1, 2, 0), count_include_pad=False),
    "avg divisor": lambda x: tw.avg_pool2d(x, (2, 3), (3, 1), divisor_override=5),
    "adaptive avg even": lambda x: tw.adaptive_avg_pool2d(x, (7, 3)),
    "adaptive avg": lambda x: tw.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive max": lambda x: tw.adaptive_max_pool2d(x, (3, 4)),
    "adaptive larger": lambda x: tw.adaptive_avg_pool2d(x, (9, None)),
    "global avg": tw.global_avg_pool2d,
    "global max": tw.global_max_pool2d,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_first_and_second_order(name, layout):
    x = tw.tensor(ramp(2, 2, 7, 6), layout=layout, requires_grad=True)
    pool = POOLS[name]
    assert tw.gradcheck(pool, [x])

    def slope(x):
        return tw.grad(tw.sum(pool(x) ** 3.0), [x], create_graph=True)[0]

    assert tw.gradcheck(slope, [x], atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_float32_follows_float64(name, layout):
    """The kernels for float32 (oneDNN where it is used) against those for float64, forward and backward."""
    values = ramp(2, 16, 7, 6)
    found = []
    for dtype in (np.float64, np.float32):
        x = tw.tensor(values.astype(dtype), layout=layout, requires_grad=True)
        y = POOLS[name](x)
        assert y.layout == layout
        y.backward(tw.tensor(np.cos(np.arange(y.size)).reshape(y.shape).astype(dtype), layout=layout))
        found.append((y.detach().numpy(), x.grad.numpy()))
    for exact, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


def test_adaptive_bins_cover_the_input():
    x = np.arange(10.0).reshape(1, 1, 1, 10)
    np.testing.assert_allclose(tw.adaptive_avg_pool2d(tw.tensor(x), (1, 4)).numpy().ravel(), [1, 3, 6, 8])
    np.testing.assert_allclose(tw.adaptive_max_pool2d(tw.tensor(x), (1, 4)).numpy().ravel(), [2, 4, 7, 9])


def test_one_dimension():
    x = np.arange(7.0).reshape(1, 1, 7)
    np.testing.assert_array_equal(tw.max_pool1d(tw.tensor(x), 3, 2, 1).numpy().ravel(), [1, 3, 5, 6])
    np.testing.assert_allclose(tw.avg_pool1d(tw.tensor(x), 3, 2, 1).numpy().ravel(), [1 / 3, 2, 4, 11 / 3])
    np.testing.assert_allclose(tw.avg_pool1d(tw.tensor(x), 3, 2, 1, count_include_pad=False).numpy().ravel(), [0.5, 2, 4, 5.5])


def test_an_empty_batch_has_empty_gradients():
    for pool in POOLS.values():
        x = tw.zeros(0, 3, 7, 6, requires_grad=True)
        y = pool(x)
        assert y.shape[:2] == (0, 3)
        y.sum().backward()
        assert x.grad.shape == (0, 3, 7, 6)


def test_errors_name_what_is_wrong():
    with pytest.raises(ArgumentError, match="must be less than the window's span"):
        tw.max_pool2d(tw.zeros(1, 1, 4, 4), 2, padding=2)
    with pytest.raises(ShapeError, match=r"must have 4 axes \(N,C,H,W\)"):
        tw.avg_pool2d(tw.zeros(1, 4, 4), 2)
    with pytest.raises(DTypeError, match="max_pool2d: x must be a Tensor"):
        tw.max_pool2d(np.zeros((1, 1, 4, 4)), 2)
    with pytest.raises(ShapeError, match=r"max_pool1d: input \(1, 4\) must have 3 axes"):
        tw.max_pool1d(tw.zeros(1, 4), 2)
