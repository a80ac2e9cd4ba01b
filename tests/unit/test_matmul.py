"""Matrix products and the fully connected layer: shapes, nothing at all, packed weights, fused activations, NaN."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tilewright as tw
from tilewright.devices.api import Problem, registered
from tilewright.devices.cpu.onednn import capi
from tilewright.ops import _activation
from tilewright.ops._op import OPS
from tilewright.ops.matmul import LinearAttrs, MatmulAttrs

needs_onednn = pytest.mark.skipif(capi.available() is not None, reason=str(capi.available()))


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


_SHAPES = (
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((1, 300), (300, 70)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 2)),
    ((2, 1, 4, 3), (5, 3, 2)),
    ((2, 0), (0, 2)),
    ((0, 3), (3, 2)),
    ((5, 2, 0), (0, 3)),
    ((2, 3, 2, 0, 4), (4, 6)),
)


@pytest.mark.parametrize(("a", "b"), _SHAPES, ids=str)
def test_products_as_numpy_makes_them(a, b):
    x, y = floats(*a), floats(*b, seed=1)
    s, t = tw.tensor(x, requires_grad=True), tw.tensor(y, requires_grad=True)
    out = s @ t
    want = np.asarray(x.astype(np.float64) @ y.astype(np.float64))
    assert out.shape == want.shape
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert s.grad.shape == a
    assert t.grad.shape == b
    u, v = tw.tensor(x.astype(np.float64), requires_grad=True), tw.tensor(y.astype(np.float64), requires_grad=True)
    if x.size * y.size < 1000 and x.size and y.size:
        assert tw.gradcheck(tw.matmul, [u, v])
        assert tw.gradcheck(lambda p, q: tw.grad((tw.matmul(p, q) ** 2).sum(), [p, q], create_graph=True), [u, v], atol=1e-4, rtol=1e-4)


def test_channels_last_operands():
    x, y = floats(2, 3, 4, 5), floats(2, 3, 5, 4, seed=1)
    got = tw.tensor(x, layout="channels_last") @ tw.tensor(y, layout="channels_last")
    np.testing.assert_allclose(got.numpy(), x @ y, rtol=1e-5, atol=1e-5)
    weight = floats(6, 5, seed=2)
    np.testing.assert_allclose(tw.linear(tw.tensor(x, layout="channels_last"), tw.tensor(weight)).numpy(), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_integers_are_exact():
    rng = np.random.default_rng(0)
    for dtype in ("int64", "int32", "int8"):
        a, b = rng.integers(-5, 5, (9, 7)).astype(dtype), rng.integers(-5, 5, (7, 4)).astype(dtype)
        np.testing.assert_array_equal((tw.tensor(a) @ tw.tensor(b)).numpy(), a @ b)


def test_half_types_accumulate_in_float32():
    for dtype in ("float16", "bfloat16"):
        x, w = tw.ones(2, 4096, dtype=dtype), tw.full((3, 4096), 0.25, dtype=dtype)
        assert (tw.linear(x, w).numpy().astype(np.float32) == 1024).all()
        assert ((x @ w.T).numpy().astype(np.float32) == 1024).all()


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
def test_a_layer_without_rows_inputs_or_outputs(sizes):
    n, inputs, outputs = sizes
    x, w, b = tw.ones(n, inputs, requires_grad=True), tw.ones(outputs, inputs, requires_grad=True), tw.ones(outputs, requires_grad=True)
    y = tw.linear(x, w, b)
    assert y.shape == (n, outputs)
    np.testing.assert_array_equal(y.numpy(), np.full((n, outputs), 1 + inputs))
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full((n, inputs), outputs))
    np.testing.assert_array_equal(w.grad.numpy(), np.full((outputs, inputs), n))
    np.testing.assert_array_equal(b.grad.numpy(), np.full(outputs, n))


@pytest.mark.parametrize("shape", [(7,), (2, 7), (3, 4, 7), (2, 3, 4, 7), (0, 7), (2, 0, 7)], ids=str)
def test_leading_axes(shape):
    x, w, b = floats(*shape), floats(5, 7, seed=1), floats(5, seed=2)
    got = tw.linear(tw.tensor(x), tw.tensor(w), tw.tensor(b))
    np.testing.assert_allclose(got.numpy(), x @ w.T + b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [None, *_activation.DEFAULTS])
@pytest.mark.parametrize("rows", [1, 4])
def test_fused_activation(name, rows):
    """Training and inference, fused or not, give one function; NaN stays NaN; a second backward gives the same again."""
    x, w, b = floats(rows, 70), floats(40, 70, seed=1), floats(40, seed=2)
    x[-1, 3] = np.nan if rows > 1 else x[-1, 3]
    given = tw.tensor(x), tw.tensor(w), tw.tensor(b)
    fused = tw.linear(*given, activation=name).numpy()
    want = _activation.reference(name, *(_activation.DEFAULTS[name] if name else (0, 0)), x.astype(np.float64) @ w.T + b)
    np.testing.assert_allclose(fused, want, rtol=1e-4, atol=1e-4)
    if rows > 1:
        assert np.isnan(fused[-1]).all()
    x = floats(rows, 70)
    leaves = [tw.tensor(v, requires_grad=True) for v in (x, w, b)]
    y = tw.linear(*leaves, activation=name)
    np.testing.assert_allclose(y.numpy(), tw.linear(*[v.detach() for v in leaves], activation=name).numpy(), rtol=1e-4, atol=1e-5)
    g = tw.tensor(floats(rows, 40, seed=3))
    first = tw.grad(y, leaves, g, retain_graph=True)
    second = tw.grad(y, leaves, g)
    for a, c in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.numpy(), c.numpy())
    np.testing.assert_array_equal(g.numpy(), floats(rows, 40, seed=3))


def test_relu_of_a_row_is_exactly_zero_below_zero():
    for rows in (1, 5):
        y = tw.linear(-tw.ones(rows, 70), tw.full((40, 70), 100.0), activation="relu").numpy()
        assert (y == 0).all()


def test_weights_changed_in_place_are_seen():
    x, w = tw.tensor(floats(8, 100)), tw.tensor(floats(30, 100, seed=1))
    for step in range(4):
        for _ in range(7):  # long enough for the weights to be packed
            got = tw.linear(x, w).numpy()
            np.testing.assert_allclose(got, x.numpy() @ w.numpy().T, rtol=1e-4, atol=1e-4)
        w.copy_(floats(30, 100, seed=step + 2))


@needs_onednn
def test_weights_are_packed_once_when_they_stay_and_never_when_they_change():
    def packed(t: tw.Tensor) -> list:
        return [held[1] for held in t.buffer.stamp.derived.values() if not isinstance(held[1], int)]

    x, w = tw.tensor(floats(16, 512)), tw.tensor(floats(300, 512, seed=1))
    results = [tw.linear(x, w).numpy().tobytes() for _ in range(10)]
    assert len(packed(w)) == 1
    kept = packed(w)[0]
    tw.linear(x, w)
    assert packed(w)[0] is kept
    assert len(set(results)) == 1  # packed or not, the same bits
    trained = tw.tensor(floats(300, 512, seed=2))
    for step in range(10):
        tw.linear(x, trained)
        trained.copy_(floats(300, 512, seed=step))
        assert packed(trained) == []
    single = tw.tensor(floats(300, 512, seed=2))
    for _ in range(10):
        tw.linear(x[:1], single)
    assert packed(single) == []  # one row gains nothing from packing


@needs_onednn
def test_one_layer_from_many_threads_while_its_weights_are_packed():
    (kernel,) = (k for k in registered("cpu", "linear") if "onednn" in k.id)
    cpu = tw.device("cpu")
    x, w = tw.tensor(floats(8, 200)), tw.tensor(floats(64, 200, seed=1))
    (out,) = OPS["linear"].outputs(LinearAttrs(), x.spec, w.spec, None)
    launch = kernel.prepare(Problem("linear", LinearAttrs(), (x.spec, w.spec, None), (out,)), (), cpu)
    want, wrong = x.numpy() @ w.numpy().T, []

    def work() -> None:
        for _ in range(20):
            y = cpu.allocate(out.nbytes)
            launch([x.buffer, w.buffer, None], [y])
            if not np.allclose(y.array(out), want, rtol=1e-4, atol=1e-4):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_transposes_are_never_made():
    """The gradients of a layer are products of what is there: no transposing op runs."""
    cpu = tw.device("cpu")
    x, w, b = tw.tensor(floats(4, 6), requires_grad=True), tw.tensor(floats(5, 6), requires_grad=True), tw.zeros(5, requires_grad=True)
    cpu.plans.clear()
    tw.linear(x, w, b).sum().backward()
    seen = {plan.op.name for plan in cpu.plans.values()}
    assert seen == {"linear", "matmul", "sum", "expand"}


def test_attributes_turn_operands():
    x, y = floats(4, 3, 2), floats(4, 5, 3, seed=1)
    from tilewright.ops._call import call

    got = call(OPS["matmul"], (tw.tensor(x), tw.tensor(y)), MatmulAttrs(True, True))
    np.testing.assert_allclose(got.numpy(), np.swapaxes(x, 1, 2) @ np.swapaxes(y, 1, 2), rtol=1e-5, atol=1e-5)
