"""The tape: accumulation, pruning, long chains, memory, modes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import tilewright as tw
from tilewright import nn
from tilewright.errors import AutogradError, DTypeError, ShapeError


def test_gradients_accumulate_and_can_be_dropped():
    x = tw.tensor([1.0, 2.0], requires_grad=True)
    (x * 3.0).sum().backward()
    (x * 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [6, 6])


def test_diamond():
    x = tw.tensor(3.0, requires_grad=True)
    y = x * x
    (y * y + y).backward()
    assert x.grad.item() == 4 * 27 + 6


def test_second_and_third_order():
    x = tw.tensor(2.0, dtype="float64", requires_grad=True)
    y = x * x * x * x
    first = tw.grad(y, x, create_graph=True)
    second = tw.grad(first, x, create_graph=True)
    third = tw.grad(second, x)
    assert (first.item(), second.item(), third.item()) == (32, 48, 48)


def test_batch_norm_second_order():
    x = tw.tensor(np.random.default_rng(0).standard_normal((4, 3, 2, 2)), requires_grad=True)
    w = tw.tensor(np.random.default_rng(1).standard_normal(3), requires_grad=True)

    def first_order(x, w):
        y = tw.batch_norm(x, None, None, w, None, training=True)
        return tw.grad((y * y * y).sum(), [x, w], create_graph=True)

    assert tw.gradcheck(first_order, [x, w], atol=1e-4, rtol=1e-3)


def test_a_first_convolution_computes_no_input_gradient():
    tw.device("cpu").plans.clear()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    net(tw.normal(1, 3, 8, 8)).sum().backward()
    assert sum(p.problem.op == "conv2d_input_grad" for p in tw.device("cpu").plans.values()) == 1


def test_grad_computes_only_what_leads_to_its_inputs():
    tw.device("cpu").plans.clear()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = tw.normal(1, 3, 8, 8)
    x.requires_grad_()
    g = tw.grad(net(x).sum(), x)
    assert g.shape == x.shape
    assert not any(p.problem.op == "conv2d_weight_grad" for p in tw.device("cpu").plans.values())
    assert all(p.grad is None for p in net.parameters())


def test_grad_of_computed_and_unused_tensors():
    x, z = tw.tensor(2.0, requires_grad=True), tw.tensor(1.0, requires_grad=True)
    y = x * x
    assert tw.grad(y * 5.0, y).item() == 5
    assert tw.grad(x * x, [x, z], allow_unused=True)[1] is None
    with pytest.raises(AutogradError, match="do not depend on input 0"):
        tw.grad(x * x, z)


def test_long_chains():
    x = tw.tensor(1.0, requires_grad=True)
    y = x
    for _ in range(20000):
        y = y + 0.0
    y.backward()
    assert x.grad.item() == 1
    z = x
    for _ in range(20000):
        z = z * 1.0
    del z, y


def test_saved_tensors_are_freed_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        x = tw.ones(4, requires_grad=True)
        y = tw.sigmoid(x * 2.0)
        refs = [weakref.ref(y.buffer), weakref.ref(y)]
        y.sum().backward()
        del y
        assert [r() for r in refs] == [None, None]
    finally:
        gc.enable()


def test_grad_has_the_leafs_layout_and_dtype():
    w = tw.normal(4, 3, 3, 3).channels_last()
    w.requires_grad_()
    (w.contiguous() * 2.0).sum().backward()
    assert w.grad.spec is w.spec


def test_modes_nest_and_restore():
    x = tw.tensor(1.0, requires_grad=True)
    with tw.no_grad():
        assert not (x * 2.0).requires_grad
        with tw.enable_grad():
            assert (x * 2.0).requires_grad
        assert not tw.is_grad_enabled()
    assert tw.is_grad_enabled()

    @tw.no_grad()
    def f():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        f()
    assert tw.is_grad_enabled()


def test_errors():
    x = tw.ones(3, requires_grad=True)
    with pytest.raises(AutogradError, match="only a one-element tensor has an implied gradient"):
        (x * 2.0).backward()
    with pytest.raises(AutogradError, match="has no gradient history"):
        tw.ones(1).backward()
    with pytest.raises(ShapeError, match="they must be equal"):
        (x * 2.0).backward(tw.ones(2))
    with pytest.raises(DTypeError, match="only floating dtypes do"):
        tw.arange(3).requires_grad_()
    with pytest.raises(AutogradError, match="would change a tensor"):
        x[0] = 1.0
    with pytest.raises(AutogradError, match="gradcheck: input 0"):
        tw.gradcheck(lambda x: tw.floor(x) * x, [tw.tensor([0.999999999], dtype="float64", requires_grad=True)])


def test_retain_grad():
    x = tw.tensor([1.0, 2.0], requires_grad=True)
    y = (x * 2.0).retain_grad()
    (y * y).sum().backward()
    np.testing.assert_array_equal(y.grad.numpy(), [4, 8])


@pytest.mark.parametrize("change", ["copy_", "setitem", "optimizer", "detached", "writable"])
def test_a_saved_tensor_changed_before_backward_is_an_error(change):
    x, w = tw.tensor([1.0, 2.0], requires_grad=True), tw.tensor([3.0, 4.0], requires_grad=True)
    y = (x * w).sum()
    w.grad = tw.ones(2)
    if change == "copy_":
        w.copy_([0.0, 0.0])
    elif change == "setitem":
        with tw.no_grad():
            w[0] = 0.0
    elif change == "optimizer":
        tw.optim.SGD([w], lr=0.1).step()
        y2 = (x * w).sum()
        tw.optim.SGD([w], lr=0.1).step()
        with pytest.raises(AutogradError, match="was changed in place"):
            y2.backward()
        return
    elif change == "detached":
        w.detach().zero_()
    else:
        w.numpy(writable=True)[0] = 0.0
    with pytest.raises(AutogradError, match=r"mul: its input 1, of shape \(2,\), is needed for the gradient and was changed in place"):
        y.backward()


def test_a_changed_tensor_that_no_gradient_reads_is_no_error():
    x, w = tw.tensor([1.0, 2.0]), tw.tensor([3.0, 4.0], requires_grad=True)
    y = (x * w).sum()
    z = (w + 1.0).sum()
    w.copy_([0.0, 0.0])
    np.from_dlpack(x)
    (y + z).backward()
    np.testing.assert_array_equal(w.grad.numpy(), [2, 3])


def test_saved_results_are_watched_too():
    y = tw.sigmoid(tw.ones(2, requires_grad=True))
    y.detach().zero_()
    with pytest.raises(AutogradError, match="sigmoid: its result"):
        y.sum().backward()


def test_hooks():
    x = tw.tensor([1.0, 2.0], requires_grad=True)
    seen = []
    y = x * 3.0
    y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: g * 10.0)
    remove = x.register_hook(lambda g: g + 1.0)
    (y + y).sum().backward()
    assert seen == [[2, 2]]
    np.testing.assert_array_equal(x.grad.numpy(), [61, 61])
    assert tw.grad((x * 1.0).sum(), x).tolist() == [2, 2]
    remove()
    assert tw.grad((x * 1.0).sum(), x).tolist() == [1, 1]
    x.register_hook(lambda g: g.sum())
    x.grad = None
    with pytest.raises(AutogradError, match="a hook must return None or a Tensor"):
        (x * 1.0).sum().backward()
    assert x.grad is None
    with pytest.raises(AutogradError, match="requires no gradient"):
        tw.ones(1).register_hook(print)


def test_gradients_share_no_memory():
    a, b, g = tw.ones(3, requires_grad=True), tw.ones(3, requires_grad=True), tw.full((3,), 2.0)
    (a + b).backward(g)
    a.grad.zero_()
    assert b.grad.tolist() == [2, 2, 2]
    assert g.tolist() == [2, 2, 2]


def test_an_error_in_a_gradient_leaves_no_trace():
    x = tw.ones(2, requires_grad=True)
    y = x * 2.0
    y.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert tw.is_grad_enabled()
    assert x.grad is None
    (x * 2.0).sum().backward()
    assert x.grad.tolist() == [2, 2]
