"""Reductions where they usually go wrong: NaN, nothing, integers, half types, ties, large means, long columns."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.devices.api import Problem, registered
from tilewright.errors import ShapeError
from tilewright.ops._op import OPS
from tilewright.ops.reduce import ReduceAttrs

CPU = tw.device("cpu")
FLOATS = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000])
def test_a_nan_shows_wherever_it_stands(n, dtype):
    for place in {0, n // 2, n - 1}:
        values = np.arange(n, dtype=np.float64)
        values[place] = np.nan
        x = tw.tensor(values, dtype=dtype)
        for f in (tw.max, tw.min, tw.sum, tw.mean, tw.var, tw.prod, tw.logsumexp):
            assert np.isnan(float(f(x).item())), f
        assert tw.argmax(x).item() == place
        assert tw.argmin(x).item() == place
        column = tw.tensor(np.stack([values, np.zeros(n)], 1), dtype=dtype)
        got = tw.max(column, 0).numpy().astype(np.float64)
        assert np.isnan(got[0])
        assert got[1] == 0


def test_maximum_of_two_with_nan():
    assert np.isnan(tw.max(tw.tensor([float("nan"), 1.0])).item())
    assert np.isnan(tw.max(tw.tensor([2.0, float("nan")])).item())


def test_reductions_of_nothing():
    x = tw.zeros(0, 3)
    assert tw.sum(x).item() == 0
    assert tw.prod(x).item() == 1
    assert np.isnan(tw.mean(x).item())
    assert tw.logsumexp(x).item() == -np.inf
    assert not tw.any(x).item()
    assert tw.all(x).item()
    assert tw.sum(x, 1).shape == (0,)
    assert tw.max(x, 1).shape == (0,)
    np.testing.assert_array_equal(tw.sum(x, 0).numpy(), np.zeros(3))
    for f in (tw.max, tw.min, tw.argmax, tw.argmin):
        with pytest.raises(ShapeError, match="no elements"):
            f(x, 0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64"])
def test_integers_add_up_in_int64(dtype):
    x = tw.ones(300, 2, dtype=dtype) if dtype == "bool" else tw.full((300, 2), 100, dtype=dtype)
    value = 1 if dtype == "bool" else 100
    assert tw.sum(x).dtype is tw.int64
    assert tw.sum(x).item() == 600 * value
    assert tw.cumsum(x, 0).dtype is tw.int64
    assert tw.cumsum(x, 0).numpy()[-1, 0] == 300 * value
    assert tw.prod(x[:4]).item() == value**8
    assert tw.mean(x).dtype is tw.float32
    assert tw.mean(x).item() == value
    assert tw.var(x).dtype is tw.float32
    assert tw.max(x).dtype is x.dtype


def test_half_types_add_up_in_float32():
    x = tw.full((70000,), 3.0, dtype="float16")
    assert tw.mean(x).item() == 3.0
    assert np.isinf(tw.sum(x).item())  # 210000 is beyond float16, as it should be
    ones = tw.ones(4096, dtype="bfloat16")
    assert float(tw.sum(ones).item()) == 4096
    assert float(tw.var(tw.full((70000,), 300.0, dtype="float16")).item()) == 0


def test_float64_stays_float64():
    x = tw.tensor(np.array([1.0, 1e-12, -1.0]), requires_grad=True)
    tw.sum(x * x * 0.5 + x).backward()
    assert tw.sum(x).item() == pytest.approx(1e-12, rel=1e-3)
    np.testing.assert_array_equal(x.grad.numpy(), x.numpy() + 1)


def test_variance_of_a_large_mean():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((64, 100))
    for offset in (0.0, 1e4, 1e6):
        x = (noise + offset).astype(np.float32)
        got = tw.var(tw.tensor(x), 0).numpy()
        np.testing.assert_allclose(got, x.astype(np.float64).var(0, ddof=1), rtol=1e-4)
        assert (tw.std(tw.tensor(x), 1).numpy() > 0).all()


def test_gradient_of_std_where_nothing_varies():
    x = tw.full((2, 3), 5.0, requires_grad=True)
    tw.std(x, 1).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros((2, 3)))


def test_ties_share_the_gradient():
    x = tw.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    (tw.max(x, 1) * tw.tensor([1.0, 6.0])).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [[0, 0.5, 0.5], [2, 2, 2]])


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_gradient_of_a_product_with_zeros(zeros):
    values = np.array([2.0, -3.0, 0.5, 4.0])
    values[:zeros] = 0
    x = tw.tensor(values, requires_grad=True)
    tw.prod(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), [np.prod(np.delete(values, i)) for i in range(4)])


def test_logsumexp_at_the_ends():
    x = tw.tensor([[-np.inf, -np.inf], [1000.0, 1000.0], [-np.inf, 2.0], [np.inf, 0.0]], requires_grad=True)
    y = tw.logsumexp(x, 1)
    np.testing.assert_allclose(y.numpy(), [-np.inf, 1000 + np.log(2), 2, np.inf], rtol=1e-6)
    y[:3].sum().backward()
    np.testing.assert_allclose(x.grad.numpy()[:3], [[0, 0], [0.5, 0.5], [0, 1]], rtol=1e-4)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_is_the_head_of_a_sort(largest):
    rng = np.random.default_rng(0)
    x = rng.permutation(4 * 50 * 3).reshape(4, 50, 3).astype(np.float32)
    values, index = tw.topk(tw.tensor(x), 7, 1, largest)
    order = np.sort(x, 1)
    np.testing.assert_array_equal(values.numpy(), order[:, ::-1][:, :7] if largest else order[:, :7])
    np.testing.assert_array_equal(np.take_along_axis(x, index.numpy(), 1), values.numpy())
    best, where = tw.topk(tw.tensor([1.0, np.nan, 3.0, 3.0]), 3)
    np.testing.assert_array_equal(best.numpy(), [np.nan, 3, 3])
    np.testing.assert_array_equal(where.numpy(), [1, 2, 3])


_COLUMNS = (
    ((4, 64, 40, 40), (0, 2, 3)),
    ((4, 64, 40, 40), (2, 3)),
    ((16, 130, 13, 13), (0, 2, 3)),
    ((3, 1, 300, 500), (0, 2)),
    ((2, 64, 64, 64), (1, 2)),
)


@pytest.mark.parametrize("kernel", [k for op in ("sum", "mean") for k in registered("cpu", op)], ids=lambda k: k.id)
@pytest.mark.parametrize(("shape", "axes"), _COLUMNS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_long_columns(kernel, shape, axes, layout):
    x = np.random.default_rng(0).random(shape, np.float32)
    op, given = OPS[kernel.op], tw.tensor(x, layout=layout)
    for keep in (False, True):
        attrs = ReduceAttrs(axes, keep)
        (out,) = op.outputs(attrs, given.spec)
        problem = Problem(op.name, attrs, (given.spec,), (out,))
        if kernel.reject(problem, CPU):
            continue
        buffer = CPU.allocate(out.nbytes)
        buffer.raw[:] = 0xFF
        kernel.prepare(problem, next(iter(kernel.configs(problem, CPU))), CPU)([given.buffer], [buffer])
        want = op.reference(attrs, x.astype(np.float64))
        np.testing.assert_allclose(CPU.download(buffer, out), want, rtol=1e-4 if "numpy" in kernel.id else 5e-6)


def test_blocks_of_sums_cover_every_row():
    from tilewright.devices.cpu.onednn.reduction import _block

    for rows in (*range(1, 2000), 200704, 12544, 2**20 + 1):
        block = _block(rows)
        assert rows % block == 0
        assert 1 <= block <= 512


def test_gradients_reach_every_layout():
    for layout in ("contiguous", "channels_last"):
        for f in (tw.sum, tw.mean, tw.var, tw.max, tw.prod, tw.logsumexp):
            x = tw.tensor(np.random.default_rng(1).random((2, 3, 4, 5)), layout=layout, requires_grad=True)
            assert tw.gradcheck(lambda t, f=f: f(t, (0, 2)), [x])
            assert tw.gradcheck(lambda t, f=f: tw.grad((f(t, (2, 3)) ** 2).sum(), t, create_graph=True), [x], atol=1e-5, rtol=1e-4)
