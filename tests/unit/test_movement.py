"""Indexing, padding, cutting and joining against NumPy, and their gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import ArgumentError, AutogradError, DTypeError, ShapeError

A = np.arange(60).reshape(3, 4, 5)
MASK = A[..., 0] % 2 == 0
KEYS = [
    ([0, 2], [1, 3]),
    (slice(None), [0, 1], [1, 2]),
    ([0, 1], slice(None), [1, 2]),
    (0, slice(None), [1, 2]),
    ([2, 0], None, 1),
    (np.array([[0], [2]]), [1, 3]),
    (..., [0, -1]),
    [True, False, True],
    (slice(None), np.array([True, False, True, True])),
    MASK,
    (MASK, 1),
    (slice(1, None), slice(None, None, -2), [4, 4, 0]),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_index_arrays_like_numpy(key):
    np.testing.assert_array_equal(tw.tensor(A)[key].numpy(), A[key])


@pytest.mark.parametrize("key", [([0, 2, 0], [1, 3, 1]), (slice(None, None, -1), [0, 0]), (0, slice(None), [1, 1])], ids=str)
def test_index_gradients(key):
    x = tw.tensor(A * 0.1, requires_grad=True)
    assert tw.gradcheck(lambda x: x[key] * x[key], [x])


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (True, ArgumentError, "not an integer"),
        (np.zeros((2, 2), bool), ShapeError, "does not fit"),
        (([0, 1], [0, 1, 2]), ShapeError, "do not broadcast"),
        (([0, 3], [0, 1]), ArgumentError, "index 3 is outside"),
        (([0.5],), DTypeError, "must be integers"),
        ((..., ...), ArgumentError, "one Ellipsis"),
    ],
    ids=str,
)
def test_bad_indices(key, error, match):
    with pytest.raises(error, match=match):
        tw.tensor(A)[key]


def test_setitem():
    t = tw.tensor(A)
    t[1:, ::-2, [0, 1]] = 7
    expected = A.copy()
    expected[1:, ::-2, [0, 1]] = 7
    np.testing.assert_array_equal(t.numpy(), expected)
    t[1:] = t[:-1]
    expected[1:] = expected[:-1].copy()
    np.testing.assert_array_equal(t.numpy(), expected)
    with pytest.raises(ArgumentError, match="out of bounds"):
        t[9] = 0
    with pytest.raises(ShapeError, match="could not broadcast"):
        t[0] = [1, 2]
    w = tw.ones(2, requires_grad=True)
    with tw.no_grad():
        w[0] = 5
    assert w.tolist() == [5, 1]
    with pytest.raises(AutogradError, match="lose the value's gradient"):
        tw.zeros(2)[0] = w[0]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_border_padding(mode, layout):
    a = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    out = tw.pad(tw.tensor(a, layout=layout), (4, 2, 3, 1), mode)
    assert out.layout == layout
    np.testing.assert_array_equal(out.numpy(), np.pad(a, ((0, 0), (0, 0), (3, 1), (4, 2)), "edge" if mode == "replicate" else mode))
    cropped = tw.pad(tw.arange(10.0).reshape(1, 10), (-1, 2), mode)
    assert cropped.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, *((8, 7) if mode == "reflect" else (9, 9))]]
    assert tw.gradcheck(lambda x: tw.pad(x, (-1, 2, 1, 0), mode) ** 2.0, [tw.tensor(a[:1, :1], requires_grad=True)])


def test_pieces():
    x = tw.tensor(np.arange(14.0).reshape(2, 7), requires_grad=True)
    a, _, c = tw.split(x, 3, 1)
    (a.sum() + 2.0 * c.sum()).backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.broadcast_to([1, 1, 1, 0, 0, 0, 2], (2, 7)))
    assert [t.shape for t in tw.chunk(tw.zeros(5), 4)] == [(2,), (2,), (1,)]
    assert [t.tolist() for t in x.detach()] == x.tolist()
    assert tw.split(tw.zeros(0), 2)[0].shape == (0,)
    assert tw.concat([tw.tensor([1]), tw.tensor([0.5])]).dtype is tw.float64  # int64 with float32, as NumPy
    for axis, shift in ((0, 1), (1, -2), (None, 3)):
        np.testing.assert_array_equal(x.detach().roll(shift, axis).numpy(), np.roll(x.detach().numpy(), shift, axis))
    np.testing.assert_array_equal(x.detach().tril(1).numpy(), np.tril(x.detach().numpy(), 1))
    np.testing.assert_array_equal(x.detach().triu(-1).numpy(), np.triu(x.detach().numpy(), -1))


def test_half_types_add_up_widely():
    n = 4096
    for dtype in ("float16", "bfloat16"):
        index, ones = tw.zeros(n, dtype="int64"), tw.full((n,), 1.0, dtype=dtype)
        assert tw.index_add(tw.zeros(1, dtype=dtype), 0, index, ones).item() == n
        assert tw.scatter_add(tw.zeros(1, dtype=dtype), 0, index, ones).item() == n


def test_an_empty_list_takes_nothing():
    assert tw.tensor(A)[[]].shape == (0, 4, 5)
