"""Normalisation at its edges: large means, NaN, running statistics, fused activations, gradients of both orders."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.devices.api import Problem, registered
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops._activation import derivative, reference
from tilewright.ops.norm import BATCH_NORM_GRAD, BATCH_NORM_TRAIN, MaskedAttrs

LAYOUTS = ("contiguous", "channels_last")
ACTIVATIONS = (None, "relu", "relu6", "silu")
RNG = np.random.default_rng


def exact(x, w, b, eps=1e-5):
    """Batch norm of (N, C, H, W) in float64, worked out plainly."""
    x = x.astype(np.float64)
    m, v = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - m) / np.sqrt(v + eps) * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e6, -1e6])
def test_a_mean_far_from_zero(mean, layout):
    x = (RNG(0).standard_normal((16, 32, 14, 14)) * (8 if abs(mean) == 1e6 else 1) + mean).astype(np.float32)
    rm, rv = tw.zeros(32), tw.ones(32)
    w, b = tw.ones(32), tw.zeros(32)
    y = tw.batch_norm(tw.tensor(x, layout=layout), rm, rv, w, b, training=True, momentum=1.0).numpy()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(rv.numpy(), wide.var((0, 2, 3), ddof=1), rtol=2e-5 if abs(mean) < 1e6 else 2e-4)
    np.testing.assert_allclose(rm.numpy(), wide.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    # x - mean is exact to half a step of float32 at the mean, in units of a deviation
    step = np.spacing(np.float32(abs(mean))) / wide.std()
    np.testing.assert_allclose(y, exact(x, np.ones(32), np.zeros(32)), atol=2e-5 + step)


@pytest.mark.parametrize("value", [0.0, 3.0, 1e6])
def test_a_channel_that_does_not_vary_gives_the_bias(value):
    x = tw.tensor(np.full((4, 16, 5, 5), value, np.float32), layout="channels_last")
    y = tw.batch_norm(x, None, None, tw.ones(16), tw.full(16, 0.25), training=True).numpy()
    np.testing.assert_array_equal(y, np.full(x.shape, 0.25, np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("where", ["x", "weight", "bias"])
def test_nan_stays_nan_in_its_channel(layout, training, activation, where):
    given = {"x": RNG(0).standard_normal((4, 16, 6, 6)), "weight": np.ones(16), "bias": np.zeros(16)}
    given = {k: v.astype(np.float32) for k, v in given.items()}
    if where == "x":
        given["x"][1, 3, 2, 2] = np.nan
    else:
        given[where][3] = np.nan
    x, w, b = tw.tensor(given["x"], layout=layout), tw.tensor(given["weight"]), tw.tensor(given["bias"])
    y = tw.batch_norm(x, tw.zeros(16), tw.ones(16), w, b, training=training, activation=activation).numpy()
    lost = np.isnan(y)
    if where == "x" and not training:
        assert lost[1, 3, 2, 2]
        assert lost.sum() == 1
    else:
        assert lost[:, 3].all()
        assert lost.sum() == lost[:, 3].size


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0])
def test_running_statistics_move_by_momentum_and_are_unbiased(momentum):
    x = RNG(0).standard_normal((4, 3, 5, 5)).astype(np.float32)
    rm, rv = tw.full(3, 0.5), tw.full(3, 2.0)
    stamp = rm.buffer.stamp.version
    tw.batch_norm(tw.tensor(x), rm, rv, training=True, momentum=momentum)
    np.testing.assert_allclose(rm.numpy(), (1 - momentum) * 0.5 + momentum * x.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rv.numpy(), (1 - momentum) * 2 + momentum * x.var((0, 2, 3), ddof=1), rtol=1e-5)
    assert rm.buffer.stamp.version > stamp  # what was derived from them (a folded convolution) is made anew
    before = rm.numpy().copy()
    tw.batch_norm(tw.tensor(x), rm, rv)
    np.testing.assert_array_equal(rm.numpy(), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_activation_is_the_activation(layout, training, activation):
    """Values and gradients in float32 against float64, with outputs on both sides of relu6's bounds."""
    x = RNG(0).standard_normal((4, 16, 6, 7))
    w, b = RNG(1).uniform(3, 6, 16), RNG(2).standard_normal(16)
    g = RNG(3).standard_normal(x.shape)
    found = []
    for dtype in (np.float64, np.float32):
        tx = tw.tensor(x.astype(dtype), layout=layout, requires_grad=True)
        p = [tw.tensor(v.astype(dtype), requires_grad=True) for v in (w, b)]
        rm, rv = tw.zeros(16, dtype=tx.dtype), tw.ones(16, dtype=tx.dtype)
        y = tw.batch_norm(tx, rm, rv, *p, training=training, activation=activation)
        y.backward(tw.tensor(g.astype(dtype), layout=layout))
        found.append([y.detach().numpy(), tx.grad.numpy(), *[t.grad.numpy() for t in p]])
    pre = exact(x, w, b) if training else x / np.sqrt(1 + 1e-5) * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)
    np.testing.assert_allclose(found[0][0], reference(activation, 0.0, 6.0, pre), rtol=1e-9, atol=1e-9)
    slope = 1.0 if activation is None else derivative(activation, 0.0, 6.0, pre if activation == "silu" else found[0][0])
    np.testing.assert_allclose(found[0][3], (g * slope).sum((0, 2, 3)), rtol=1e-8, atol=1e-8)
    if activation == "relu6":
        assert 0 < (found[0][0] == 6).mean() < 0.3
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (1, 8, 5, 1), (5, 8, 181, 181), (3, 24, 101, 97)])
def test_every_kernel_packs_relu6s_mask_alike(shape, cpu):
    """Sizes past a block and past one thread's share, ends that fill no whole byte or block."""
    x = tw.tensor(RNG(0).standard_normal(shape).astype(np.float32), layout="channels_last")
    w, b = tw.full(shape[1], 4.0), tw.zeros(shape[1])
    attrs = MaskedAttrs(1e-5, "relu6", x.layout)
    specs = (x.spec, w.spec, b.spec)
    problem = Problem(BATCH_NORM_TRAIN.name, attrs, specs, BATCH_NORM_TRAIN.outputs(attrs, *specs))
    wide = exact(x.numpy(), np.full(shape[1], 4.0), np.zeros(shape[1]))
    margin = 5e-4  # oneDNN's float32 sums over 164,000 elements leave the variance off by 5e-5 of itself on one thread
    near = (np.abs(wide) < margin) | (np.abs(wide - 6) < margin)  # these may fall on either side
    for kernel in registered("cpu", BATCH_NORM_TRAIN.name):
        if kernel.reject(problem, cpu):
            continue
        outs = [cpu.allocate(s.nbytes) for s in problem.outputs]
        kernel.prepare(problem, (), cpu)([t.buffer for t in (x, w, b)], outs)
        np.testing.assert_allclose(outs[0].array(x.spec), np.clip(wide, 0, 6), atol=margin)
        bits = np.unpackbits(outs[3].array(problem.outputs[3]), bitorder="little")
        want = np.moveaxis((wide > 0) & (wide < 6), 1, -1).ravel()
        sure = ~np.moveaxis(near, 1, -1).ravel()
        np.testing.assert_array_equal(bits[: x.size][sure], want[sure])
        assert not bits[x.size :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "relu6"])
def test_gradients_of_first_and_second_order(layout, training, activation):
    x = tw.tensor(RNG(0).standard_normal((3, 2, 4, 3)), layout=layout, requires_grad=True)
    w, b = tw.tensor(np.array([4.0, -1.5]), requires_grad=True), tw.tensor(np.array([0.3, -0.2]), requires_grad=True)
    rm, rv = tw.tensor(np.array([0.1, -0.3])), tw.tensor(np.array([1.5, 0.7]))

    def f(x, w, b):
        return tw.batch_norm(x, None if training else rm, None if training else rv, w, b, training, activation=activation)

    assert tw.gradcheck(f, [x, w, b])

    def slope(x, w):
        return tuple(tw.grad(tw.sum(f(x, w, b) ** 2.0), [x, w], create_graph=True))

    assert tw.gradcheck(slope, [x, w], atol=1e-4)


def test_an_empty_batch():
    for training in (True, False):
        x, w, b = (tw.zeros(*s, requires_grad=True) for s in ((0, 3, 4, 4), (3,), (3,)))
        rm = tw.full(3, 0.5)
        y = tw.batch_norm(x, rm, tw.ones(3), w, b, training, activation="relu6")
        y.sum().backward()
        assert x.grad.shape == (0, 3, 4, 4)
        assert not w.grad.numpy().any()
        assert (rm.numpy() == 0.5).all()


def test_the_gradient_is_taken_from_the_mask_alone():
    """A bit that is clear lets nothing through, whatever the values."""
    x = tw.tensor(RNG(0).standard_normal((2, 8, 4, 4)).astype(np.float32), layout="channels_last")
    c = tw.ones(8)
    blocked = tw.zeros(x.size // 8, dtype="uint8")
    dx, dw, db = tw.ops._call.call(BATCH_NORM_GRAD, (x, x, tw.zeros(8), c, c, blocked), MaskedAttrs(1e-5, "relu6", x.layout))
    assert not any(t.numpy().any() for t in (dx, dw, db))


def rows(x, axes, eps=1e-5):
    m, v = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - m) / np.sqrt(v + eps)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_group_and_instance_norm(layout, dtype):
    x = RNG(0).standard_normal((3, 8, 5, 4)) + 3
    t = tw.tensor(x.astype(dtype), layout=layout)
    tol = 1e-10 if dtype is np.float64 else 2e-5
    w, b = RNG(1).standard_normal(8), RNG(2).standard_normal(8)
    tb = [tw.tensor(v.astype(dtype)) for v in (w, b)]
    side = (1, 8, 1, 1)
    np.testing.assert_allclose(tw.layer_norm(t, (5, 4)).numpy(), rows(x, (2, 3)), rtol=tol, atol=tol)
    grouped = rows(x.reshape(3, 2, -1), 2).reshape(x.shape) * w.reshape(side) + b.reshape(side)
    np.testing.assert_allclose(tw.group_norm(t, 2, *tb).numpy(), grouped, rtol=tol, atol=tol * 5)
    np.testing.assert_allclose(tw.instance_norm(t).numpy(), rows(x, (2, 3)), rtol=tol, atol=tol)
    assert tw.group_norm(t, 4).layout == layout


@pytest.mark.parametrize("norm", [lambda x: tw.layer_norm(x, (4, 3)), lambda x: tw.group_norm(x, 2), tw.instance_norm])
def test_gradients_over_each_sample(norm):
    x = tw.tensor(RNG(0).standard_normal((2, 4, 4, 3)), requires_grad=True)
    assert tw.gradcheck(norm, [x])
    assert tw.gradcheck(lambda x: tw.grad(tw.sum(norm(x) ** 3.0), [x], create_graph=True)[0], [x], atol=1e-4)


def test_errors_name_what_is_wrong():
    with pytest.raises(ArgumentError, match="running_mean and running_var must be given"):
        tw.batch_norm(tw.zeros(2, 3, 4, 4))
    with pytest.raises(ShapeError, match="training needs more than one value per channel"):
        tw.batch_norm(tw.zeros(1, 3, 1, 1), training=True)
    with pytest.raises(ArgumentError, match="'swoosh' is not known"):
        tw.batch_norm(tw.zeros(2, 3, 4, 4), training=True, activation="swoosh")
    with pytest.raises(ShapeError, match=r"must end in the normalized shape \(5,\)"):
        tw.layer_norm(tw.zeros(2, 4), 5)
    with pytest.raises(ShapeError, match="multiple of groups=3"):
        tw.group_norm(tw.zeros(2, 4, 2, 2), 3)
