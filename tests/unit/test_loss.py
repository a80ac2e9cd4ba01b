"""Losses: what they return where everything is ignored, at extreme logits, and that they honour the gradient coming in."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import ArgumentError, AutogradError, ShapeError

NAN, INF = float("nan"), float("inf")


def leaf(values) -> tw.Tensor:
    return tw.tensor(np.asarray(values, np.float64), requires_grad=True)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# -- cross entropy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_target_ignored(reduction, smoothing):
    """The loss is 0 and the gradient zeros, not NaN: as documented."""
    for loss in (tw.cross_entropy, tw.nll_loss):
        if smoothing and loss is tw.nll_loss:
            continue
        more = {"label_smoothing": smoothing} if loss is tw.cross_entropy else {}
        x = leaf([[1.0, 2.0, 3.0]])
        y = loss(x, tw.tensor([-1]), ignore_index=-1, reduction=reduction, **more)
        assert y.numpy().sum() == 0
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.zeros((1, 3)))
    x = leaf(np.zeros((0, 3)))
    y = tw.cross_entropy(x, tw.zeros(0, dtype="int64"), reduction=reduction)
    assert y.numpy().sum() == 0
    y.sum().backward()
    assert x.grad.shape == (0, 3)


def test_ignored_rows_change_nothing_even_if_they_are_not_finite():
    x, t = random(4, 3), np.array([0, 2, 1, 2])
    spoilt = np.concatenate([x, [[NAN, INF, 0.0]]])
    a, b = leaf(x), leaf(spoilt)
    one, two = tw.cross_entropy(a, tw.tensor(t)), tw.cross_entropy(b, tw.tensor(np.append(t, -100)))
    assert one.item() == pytest.approx(two.item(), rel=1e-12)
    one.backward()
    two.backward()
    np.testing.assert_allclose(b.grad.numpy(), np.concatenate([a.grad.numpy(), np.zeros((1, 3))]), rtol=1e-12)


def test_extreme_logits():
    x = leaf([[1000.0, -1000.0], [-1000.0, 1000.0], [0.0, -INF]])
    y = tw.cross_entropy(x, tw.tensor([0, 0, 0]), reduction="none")
    np.testing.assert_array_equal(y.numpy(), [0, 2000, 0])
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[0, 0], [-1, 1], [0, 0]])
    small = tw.cross_entropy(tw.tensor([[0.0, -18.0]]), tw.tensor([0]))
    assert small.item() == pytest.approx(np.log1p(np.exp(-18.0)), abs=1e-7)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_maps_of_classes(layout):
    x, t = random(2, 5, 3, 4), np.random.default_rng(1).integers(0, 5, (2, 3, 4))
    flat = tw.cross_entropy(leaf(np.moveaxis(x, 1, -1).reshape(-1, 5)), tw.tensor(t.reshape(-1)), reduction="none")
    maps = tw.tensor(x, layout=layout, requires_grad=True)
    y = tw.cross_entropy(maps, tw.tensor(t), reduction="none")
    assert y.shape == (2, 3, 4)
    np.testing.assert_allclose(y.numpy().reshape(-1), flat.numpy(), rtol=1e-12)
    y.sum().backward()
    assert maps.grad.layout == layout
    assert tw.gradcheck(lambda z: tw.cross_entropy(z, tw.tensor(t), label_smoothing=0.2), [maps.detach().requires_grad_()])


def test_class_indices_are_one_hot_probabilities():
    x, t = random(6, 4), np.array([0, 3, 1, 1, 2, 0])
    for smoothing in (0.0, 0.3):
        a, b = leaf(x), leaf(x)
        one = tw.cross_entropy(a, tw.tensor(t), label_smoothing=smoothing)
        two = tw.cross_entropy(b, tw.tensor(np.eye(4)[t]), label_smoothing=smoothing)
        assert one.item() == pytest.approx(two.item(), rel=1e-12)
        one.backward()
        two.backward()
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-10, atol=1e-15)
    for dtype in ("int32", "uint8"):
        assert tw.cross_entropy(leaf(x), tw.tensor(t, dtype=dtype)).item() == tw.cross_entropy(leaf(x), tw.tensor(t)).item()


def test_gradient_of_probabilities_and_of_gradients():
    x = leaf(random(3, 4))
    p = tw.softmax(leaf(random(3, 4, seed=1)), 1).detach().requires_grad_()
    w = tw.tensor([1.0, 2.0, 0.5, 0.0], dtype="float64")
    assert tw.gradcheck(lambda z, q: tw.cross_entropy(z, q, w, label_smoothing=0.1), [x, p])
    t = tw.tensor([0, 3, 2])
    for reduction in ("mean", "sum", "none"):

        def first(z, r=reduction):
            loss = tw.cross_entropy(z, t, w, label_smoothing=0.1, reduction=r)
            return tw.grad((loss * loss).sum(), z, create_graph=True)

        assert tw.gradcheck(first, [x], atol=1e-5, rtol=1e-4)


def test_half_types_lose_nothing_in_the_sum():
    x = tw.zeros(4096, 100, dtype="float16")
    loss = tw.cross_entropy(x, tw.zeros(4096, dtype="int64"))
    assert loss.dtype is tw.float16
    assert float(loss.item()) == pytest.approx(np.log(100), rel=1e-3)


def test_targets_that_do_not_fit():
    x = tw.zeros(2, 3)
    for target in ([0, 3], [-1, 0], [0, 10**12]):
        with pytest.raises(ArgumentError, match="outside the classes 0 to 2"):
            tw.cross_entropy(x, tw.tensor(target))
        with pytest.raises(ArgumentError, match="outside the classes 0 to 2"):
            tw.nll_loss(x, tw.tensor(target))
    with pytest.raises(ShapeError, match="must be"):
        tw.cross_entropy(x, tw.zeros(2))
    with pytest.raises(ShapeError, match=r"input \(3,\) of float32 must be \(N, classes, ...\)"):
        tw.cross_entropy(tw.zeros(3), tw.tensor([0]))
    with pytest.raises(AutogradError, match="class weights have no gradient"):
        tw.cross_entropy(x, tw.tensor([0, 1]), tw.ones(3, requires_grad=True))


def test_a_call_seen_before_prepares_nothing():
    cpu = tw.device("cpu")
    x, t = tw.zeros(4, 7, requires_grad=True), tw.zeros(4, dtype="int64")
    tw.cross_entropy(x, t).backward()
    before = len(cpu.plans)
    for _ in range(5):
        tw.cross_entropy(x, t).backward()
    assert len(cpu.plans) <= before + 1  # the addition into .grad


# -- all of them -------------------------------------------------------------------------------------------------------

_T = np.random.default_rng(5).uniform(0.1, 0.9, (4, 3))
PAIRS = {
    "mse": tw.mse_loss,
    "l1": tw.l1_loss,
    "smooth_l1": lambda x, t, reduction="mean": tw.smooth_l1_loss(x, t, beta=0.7, reduction=reduction),
    "huber": lambda x, t, reduction="mean": tw.huber_loss(x, t, delta=0.7, reduction=reduction),
    "bce": tw.bce_with_logits,
    "bce_weighted": lambda x, t, reduction="mean": tw.bce_with_logits(
        x, t, tw.tensor([1.0, 2.0, 3.0], dtype="float64"), pos_weight=tw.tensor([0.5, 1.0, 4.0], dtype="float64"), reduction=reduction
    ),
    "kl": tw.kl_div,
    "kl_log": lambda x, t, reduction="mean": tw.kl_div(x, t, log_target=True, reduction=reduction),
}


@pytest.mark.parametrize("name", PAIRS)
def test_reductions_agree_and_scale_with_the_gradient_coming_in(name):
    f, t = PAIRS[name], tw.tensor(_T)
    x = random(4, 3)
    each = f(leaf(x), t, reduction="none").numpy()
    assert each.shape == (4, 3)
    assert f(leaf(x), t, reduction="sum").item() == pytest.approx(each.sum())
    assert f(leaf(x), t).item() == pytest.approx(each.mean())
    whole, scaled = leaf(x), leaf(x)
    f(whole, t).backward()
    (f(scaled, t) * 8.0).backward()
    np.testing.assert_allclose(scaled.grad.numpy(), 8 * whole.grad.numpy(), rtol=1e-12)
    f(scaled, t).backward()  # accumulates
    np.testing.assert_allclose(scaled.grad.numpy(), 9 * whole.grad.numpy(), rtol=1e-12)
    single = leaf(x)
    g = random(4, 3, seed=2)
    f(single, t, reduction="none").backward(tw.tensor(g))
    np.testing.assert_allclose(single.grad.numpy(), whole.grad.numpy() * 12 * g, rtol=1e-10)
    for reduction in ("mean", "sum", "none"):
        assert tw.gradcheck(lambda a, b, r=reduction: f(a, b, reduction=r), [leaf(x), leaf(_T)])
    with pytest.raises(ArgumentError, match="reduction 'avg' must be one of"):
        f(leaf(x), t, reduction="avg")
    with pytest.raises(ShapeError, match="must have one shape"):
        f(leaf(x), t[:1])


def test_cross_entropy_scales_with_the_gradient_coming_in():
    x, t = random(4, 3), tw.tensor([0, 1, 2, 1])
    a, b = leaf(x), leaf(x)
    tw.cross_entropy(a, t).backward()
    (tw.cross_entropy(b, t) * 8.0).backward()
    np.testing.assert_allclose(b.grad.numpy(), 8 * a.grad.numpy(), rtol=1e-12)
    g, c = random(4, seed=3), leaf(x)
    tw.cross_entropy(c, t, reduction="none").backward(tw.tensor(g))
    np.testing.assert_allclose(c.grad.numpy(), a.grad.numpy() * 4 * g[:, None], rtol=1e-12)


def test_binary_cross_entropy_where_others_fail():
    for target in (0.0, 0.25, 1.0):
        x = leaf([0.0])
        tw.bce_with_logits(x, tw.tensor([target], dtype="float64")).backward()
        assert x.grad.item() == pytest.approx(0.5 - target)
    logits = np.array([1000.0, -1000.0, 30.0, -30.0, 20.0, -20.0], np.float32)
    targets = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], np.float32)
    got = tw.bce_with_logits(tw.tensor(logits), tw.tensor(targets), reduction="none").numpy()
    wide = logits.astype(np.float64)
    want = targets * np.logaddexp(0, -wide) + (1 - targets) * np.logaddexp(0, wide)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_kinks():
    x = leaf([1.0, 3.0, -2.0])
    tw.l1_loss(x, tw.tensor([1.0, 1.0, 1.0], dtype="float64"), reduction="sum").backward()
    np.testing.assert_array_equal(x.grad.numpy(), [0, 1, -1])
    t = tw.zeros(3, dtype="float64")
    np.testing.assert_allclose(tw.smooth_l1_loss(x, t, beta=2.0, reduction="none").numpy(), [0.25, 2, 1])
    np.testing.assert_allclose(tw.huber_loss(x, t, delta=2.0, reduction="none").numpy(), [0.5, 4, 2])
    np.testing.assert_array_equal(tw.smooth_l1_loss(x, t, beta=0.0, reduction="none").numpy(), [1, 3, 2])
    for bad in (lambda: tw.smooth_l1_loss(x, t, beta=-1.0), lambda: tw.huber_loss(x, t, delta=0.0)):
        with pytest.raises(ArgumentError, match="must be"):
            bad()


def test_divergence_from_a_distribution_with_zeros():
    p = np.array([[0.5, 0.5, 0.0]])
    logq = leaf(np.log([[0.25, 0.75, 1e-300]]) + np.array([[0, 0, -INF]]))
    loss = tw.kl_div(logq, tw.tensor(p), reduction="batchmean")
    assert loss.item() == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))
    loss.backward()
    np.testing.assert_allclose(logq.grad.numpy(), -p)


def test_one_hot_and_embedding():
    np.testing.assert_array_equal(tw.one_hot(tw.tensor([[2, 0]]), 3).numpy(), [[[0, 0, 1], [1, 0, 0]]])
    for bad in ([3], [-1]):
        with pytest.raises(ArgumentError, match="outside the 3 classes"):
            tw.one_hot(tw.tensor(bad), 3)
    table = leaf(random(5, 2))
    index = tw.tensor([[1, 1], [4, 0]])
    rows = tw.embedding(index, table)
    np.testing.assert_array_equal(rows.numpy(), table.numpy()[index.numpy()])
    rows.sum().backward()
    np.testing.assert_array_equal(table.grad.numpy()[:, 0], [1, 2, 0, 0, 1])
