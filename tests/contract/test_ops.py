"""Every op in the registry keeps the contract. Adding an op file is all it takes to be tested here."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tests.contract import _contract
from tilewright import devices
from tilewright.ops._op import OPS

devices.get("cpu")
NAMES = sorted(OPS)


@pytest.mark.parametrize("name", NAMES)
def test_samples_and_shape_rule(name):
    op = OPS[name]
    samples = op.samples()
    assert samples, f"{name} has no samples"
    for sample in samples:
        _contract.check_infer(op, sample)
        assert op.cost(sample.attrs, *_contract.specs(sample)).bytes >= 0


@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].vjp is not None])
def test_gradient(name):
    op = OPS[name]
    checked = 0
    for sample in op.samples():
        if sample.grad and all(a is None or a.spec.size <= 20000 for a in sample.inputs):
            _contract.check_gradient(op, sample)
            checked += 1
    assert checked or not any(s.grad for s in op.samples())


@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].vjp is not None])
def test_gradients_only_where_needed(name):
    op = OPS[name]
    samples = [s for s in op.samples() if all(a is None or 0 < a.spec.size <= 2000 for a in s.inputs)]
    for sample in samples[:3]:
        _contract.check_needs(op, sample)


@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].errors()])
def test_errors(name):
    for bad in OPS[name].errors():
        with pytest.raises(bad.error) as caught:
            bad.call()
        assert type(caught.value) is bad.error
        assert str(caught.value) == bad.message


def test_public_functions_are_documented():
    public = {n: f for n, f in vars(tw.ops).items() if n[0].islower() and callable(f) and getattr(f, "__module__", "").startswith("tilewright.ops.")}
    assert len(public) > 100
    assert [n for n, f in public.items() if not f.__doc__] == []


@pytest.mark.parametrize("name", ["mul", "conv2d", "matmul", "tanh", "sigmoid", "softmax", "log_softmax", "standardize", "avg_pool2d", "exp"])
def test_second_order(name):
    """The gradient of the gradient, by differences, on the first smooth sample."""
    op = OPS[name]
    sample = next(s for s in op.samples() if s.grad and all(a is None or 1 < a.spec.size <= 300 for a in s.inputs))
    values = _contract.arrays(sample, dtype=tw.float64)
    lies = _contract.specs(sample, tw.float64)
    floats = [i for i, v in enumerate(values) if v is not None]
    leaves = [tw.tensor(values[i], layout=lies[i].layout, requires_grad=True) for i in floats]

    def first_order(*xs):
        given = [None] * len(values)
        for i, x in zip(floats, xs, strict=True):
            given[i] = x
        out = tw.ops._call.call(op, tuple(given), sample.attrs)
        out = out[0] if isinstance(out, tuple) else out
        return tw.grad((out * out).sum(), list(xs), create_graph=True)

    assert tw.gradcheck(first_order, leaves, atol=1e-5, rtol=1e-4)


def test_inputs_are_unchanged_and_not_aliased():
    x = tw.tensor(np.arange(6.0))
    y = x + 0.0
    assert y.buffer is not x.buffer
    np.testing.assert_array_equal(x.numpy(), np.arange(6.0))
