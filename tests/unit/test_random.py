"""Random numbers: the stream's known answers, ranges and moments of every type, and dropout."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tilewright as tw
from tilewright import random as stream
from tilewright.devices.cpu.numpy.random import words
from tilewright.errors import ArgumentError, DTypeError
from tilewright.ops.random import philox

KNOWN = [  # counter, key, block: the generator's published known answers (Random123, kat_vectors)
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN)
def test_known_answers(counter, key, block):
    assert philox(counter, key) == block


@pytest.mark.parametrize("start", [0, 2**32 - 3])
def test_kernel_follows_the_definition(start):
    seed = 0x1234567890ABCDEF
    found = words(np.array([seed, start], np.int64), 30)
    wanted = [w for i in range(8) for w in philox(((start + i) & 0xFFFFFFFF, (start + i) >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))]
    np.testing.assert_array_equal(found, wanted[:30])


def test_kernel_is_the_same_in_pieces_and_on_all_cores():
    n = 1 << 21
    whole = words(np.array([7, 0], np.int64), n)
    for block in (0, 4095, 4096, 262143, 262144, n // 4 - 2):
        np.testing.assert_array_equal(whole[4 * block : 4 * block + 8], words(np.array([7, block], np.int64), 8))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_uniform_never_gives_high(dtype):
    tw.manual_seed(1)
    for low, high in ((0.0, 1.0), (-1.0, 1.0), (3.0, 5.0), (0.0, 1e-3), (1.0, 1.01)):
        x = tw.uniform(1 << 18, low=low, high=high, dtype=dtype)
        high = float(tw.tensor(high, dtype=dtype).item())
        values = x.numpy().astype(np.float64)
        assert values.min() >= float(tw.tensor(low, dtype=dtype).item())
        assert values.max() < high
    assert (tw.uniform(3, low=2.0, high=2.0, dtype=dtype).numpy() == 2).all()


def test_float64_uniform_has_53_bits():
    tw.manual_seed(2)
    scaled = tw.rand(4096, dtype="float64").numpy() * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert ((scaled % 2**26) != 0).mean() > 0.99
    assert abs(scaled.mean() / 2.0**53 - 0.5) < 0.02


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_normal_moments(dtype):
    tw.manual_seed(3)
    x = tw.randn(1 << 18, dtype=dtype).numpy().astype(np.float64)
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x**3).mean()) < 0.03
    assert abs((x**4).mean() - 3) < 0.08


def test_randint():
    tw.manual_seed(4)
    x = tw.randint(-3, 4, 70000).numpy()
    assert x.dtype == np.int64
    counts = np.bincount(x + 3, minlength=7)
    assert len(counts) == 7
    assert abs(counts - 10000).max() < 400
    wide = tw.randint(-(2**63), 2**63, 4096).numpy()
    assert wide.min() < -(2**62)
    assert wide.max() > 2**62
    assert abs((wide < 0).mean() - 0.5) < 0.05
    big = tw.randint(0, 2**62 + 12345, 1000).numpy()
    assert (big >= 0).all()
    assert (big % 2).any()
    with pytest.raises(ArgumentError, match="randint: low 0 must be less than high 0"):
        tw.randint(0, 0, 3)
    with pytest.raises(ArgumentError, match="int64"):
        tw.randint(0, 2**63 + 1, 3)


def test_randperm():
    tw.manual_seed(5)
    a, b = tw.randperm(1000).numpy(), tw.randperm(1000).numpy()
    assert sorted(a.tolist()) == list(range(1000))
    assert (a != b).any()
    tw.manual_seed(5)
    np.testing.assert_array_equal(tw.randperm(1000).numpy(), a)
    assert tw.randperm(0).shape == (0,)
    first = np.bincount([tw.randperm(4).numpy()[0] for _ in range(2000)], minlength=4)
    assert abs(first - 500).max() < 100


def test_dropout():
    tw.manual_seed(6)
    x = tw.ones(1000, 100, requires_grad=True)
    y = tw.dropout(x, 0.3)
    kept = y.numpy() != 0
    assert abs(kept.mean() - 0.7) < 0.01
    np.testing.assert_allclose(y.numpy()[kept], 1 / 0.7, rtol=1e-6)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    odd = tw.tensor([np.inf, -np.inf, np.nan, 1.0], requires_grad=True)
    gone = tw.dropout(odd, 1.0)
    assert gone.tolist() == [0, 0, 0, 0]
    gone.sum().backward()
    assert odd.grad.tolist() == [0, 0, 0, 0]
    channels = tw.dropout2d(tw.ones(8, 16, 5, 5), 0.5).numpy()
    assert ((channels == 0).all((2, 3)) | (channels == 2).all((2, 3))).all()
    with pytest.raises(ArgumentError, match="p 2 must lie in 0 to 1"):
        tw.dropout(x, 2)
    assert tw.dropout(x, 0.5, training=False) is x


def test_bernoulli():
    tw.manual_seed(7)
    assert abs(tw.bernoulli(0.25, 100000).numpy().mean() - 0.25) < 0.01
    assert not tw.bernoulli(0.0, 1000).numpy().any()
    assert tw.bernoulli(1.0, 1000).numpy().all()
    with pytest.raises(ArgumentError, match=r"bernoulli: p 1\.5"):
        tw.bernoulli(1.5, 3)


def test_bad_draws():
    with pytest.raises(DTypeError, match="uniform: dtype int32"):
        tw.rand(3, dtype="int32")
    with pytest.raises(ArgumentError, match="uniform: low 2"):
        tw.uniform(3, low=2, high=1)
    with pytest.raises(ArgumentError, match="seed"):
        tw.manual_seed(-1)


def test_layout_does_not_change_the_numbers():
    tw.manual_seed(8)
    a = tw.randn(2, 3, 4, 5)
    tw.manual_seed(8)
    b = tw.randn(2, 3, 4, 5, layout="channels_last")
    np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_generators_stand_apart_and_threads_draw_apart():
    one, other = stream.Generator(9), stream.Generator(9)
    a = tw.randn(10, generator=one)
    state = one.get_state()
    b = tw.randn(10, generator=one)
    np.testing.assert_array_equal(a.numpy(), tw.randn(10, generator=other).numpy())
    other.set_state(state)
    np.testing.assert_array_equal(b.numpy(), tw.randn(10, generator=other).numpy())
    drawn = []
    threads = [threading.Thread(target=lambda: drawn.extend(tw.rand(4, generator=one).tolist() for _ in range(50))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({tuple(d) for d in drawn}) == 200
