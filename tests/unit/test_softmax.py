"""Softmax at the ends of the number line, in every layout, with its gradients."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.devices.api import Problem, registered
from tilewright.errors import ShapeError


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("width", [3, 20, 1000])
def test_a_nan_spoils_its_own_line_and_no_other(name, width, cpu):
    x = np.random.default_rng(0).standard_normal((4, width)).astype(np.float32)
    clean = x.copy()
    x[1, width // 2] = np.nan
    x[2, 0] = np.inf
    t = tw.tensor(x)
    for kernel in registered("cpu", name):
        problem = Problem(name, 1, (t.spec,), (t.spec,))
        if kernel.reject(problem, cpu):
            continue
        out = cpu.allocate(t.nbytes)
        kernel.prepare(problem, (), cpu)([t.buffer], [out])
        got = out.array(t.spec)
        assert np.isnan(got[1]).all()
        assert np.isnan(got[2, 0])
        want = np.exp(clean - clean.max(1, keepdims=True))
        want /= want.sum(1, keepdims=True)
        np.testing.assert_allclose(got[[0, 3]], (np.log(want) if "log" in name else want)[[0, 3]], rtol=2e-5, atol=2e-6)


def test_extreme_logits():
    x = tw.tensor([[1000.0, -1000.0, 0.0], [-np.inf, 0.0, 0.0], [1e38, -1e38, 1e38]])
    np.testing.assert_allclose(tw.softmax(x).numpy(), [[1, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]], rtol=1e-6)
    logs = tw.log_softmax(x).numpy()
    np.testing.assert_allclose(logs[0], [0, -2000, -1000], rtol=1e-6)
    np.testing.assert_allclose(logs[1], [-np.inf, -np.log(2), -np.log(2)], rtol=1e-5)
    assert np.isfinite(tw.log_softmax(tw.tensor([[-200.0, 0.0]])).numpy()).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_any_axis_of_any_layout(layout, axis):
    x = np.random.default_rng(0).standard_normal((2, 21, 5, 6)).astype(np.float32)
    e = np.exp(x - x.max(axis, keepdims=True)).astype(np.float64)
    want = e / e.sum(axis, keepdims=True)
    y = tw.softmax(tw.tensor(x, layout=layout), axis)
    assert y.layout == layout
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(tw.log_softmax(tw.tensor(x, layout=layout), axis).numpy(), np.log(want), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("f", [tw.softmax, tw.log_softmax])
def test_gradients_of_every_order(f):
    for layout in ("contiguous", "channels_last"):
        x = tw.tensor(np.random.default_rng(0).standard_normal((2, 4, 3)), layout=layout, requires_grad=True)
        for axis in (0, 1, 2):
            assert tw.gradcheck(lambda t, a=axis: f(t, a), [x])
            assert tw.gradcheck(lambda t, a=axis: tw.grad((f(t, a) ** 3).sum(), t, create_graph=True), [x], atol=1e-5, rtol=1e-4)


def test_no_classes_no_rows_no_axis():
    assert tw.softmax(tw.zeros(0, 3)).shape == (0, 3)
    assert tw.log_softmax(tw.zeros(3, 0)).shape == (3, 0)
    assert tw.softmax(tw.tensor([[3, 4]])).dtype is tw.float32
    with pytest.raises(ShapeError, match="softmax: a 0-d tensor has no axis"):
        tw.softmax(tw.zeros(()))
