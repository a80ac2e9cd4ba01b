"""Where a model's time goes, and the limits that it is held against."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import tilewright as tw
from tilewright import devices, models, nn
from tilewright.errors import ArgumentError
from tilewright.nn import profile
from tilewright.ops._op import find
from tilewright.tune import roofline
from tilewright.tune.roofline import Ceilings, ceilings

CPU = devices.get("cpu")


def test_each_call_is_known_by_its_layer():
    net = models.mobilenet_small(num_classes=10)
    found = profile(net, (2, 1, 28, 28), budget_s=0.1, least=2)
    layers = {c.layer for c in found.calls if c.problem.op == "conv2d"}
    assert layers == {name for name, m in net.named_modules() if isinstance(m, nn.Conv2d)}  # folded with their batch norms
    assert all(c.direction == "forward" and len(c.samples) >= 2 for c in found.calls)
    assert found.kernels_s > 0


def test_gradients_are_known_by_the_layer_they_belong_to():
    net = models.lenet()
    found = profile(net, (2, 1, 28, 28), train=True, budget_s=0.1, least=2)
    back = [c for c in found.calls if c.direction == "backward"]
    grads = {(c.layer, c.problem.op) for c in back if c.problem.op.startswith("conv2d_")}
    assert grads == {("conv1", "conv2d_weight_grad"), ("conv2", "conv2d_weight_grad"), ("conv2", "conv2d_input_grad")}
    assert {c.layer for c in back if c.problem.op == "matmul"} >= {"fc1", "fc2", "fc3"}


def test_a_profiled_model_is_as_it_was():
    net = models.lenet().eval()
    before = net(tw.ones((1, 1, 28, 28))).numpy()
    plans = CPU.plans
    profile(net, (1, 1, 28, 28), train=True, budget_s=0.05, least=2)
    assert CPU.plans is plans
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    assert np.array_equal(net(tw.ones((1, 1, 28, 28))).numpy(), before)
    assert "forward" not in net.__dict__


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ArgumentError, match="profile: the model has no parameters"):
        profile(nn.ReLU(), (1, 1, 4, 4))


def test_which_limit_binds():
    c = Ceilings(100e9, ((1 << 14, 50e9), (1 << 20, 50e9), (1 << 28, 10e9)), 5e-6)
    assert c.limit(1e9, 1e6) == ("compute", 0.01)
    assert c.limit(1e3, 1e3) == ("launch", 5e-6)
    name, seconds = c.limit(1e6, 1 << 28)
    assert name == "memory"
    assert seconds == pytest.approx((1 << 28) / 10e9)
    assert c.bandwidth(1) == 50e9
    assert c.bandwidth(1 << 24) == pytest.approx(math.sqrt(50e9 * 10e9))
    assert c.bandwidth(1 << 40) == 10e9


def test_ceilings_are_measured_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    made = Ceilings(1e11, ((1 << 14, 5e10),), 1e-6)
    count = []
    monkeypatch.setattr(roofline, "measure", lambda *a: count.append(1) or made)
    assert ceilings(CPU, find) == ceilings(CPU, find) == made
    assert len(count) == 1
    (file,) = tmp_path.glob("ceilings-*.json")
    for damage in ("", "{", json.dumps({"format": 1}), file.read_text().replace("100000000000.0", '"fast"'), file.read_text().replace("1e-06", "-1")):
        file.write_text(damage)
        assert ceilings(CPU, find) == made
    assert len(count) == 6
    monkeypatch.setattr(CPU, "_identity", ("another", "", "", 1))
    ceilings(CPU, find)
    assert len(count) == 7


def test_ceilings_of_this_device():
    found = roofline.measure(CPU, find)
    assert found.flops > 1e8
    assert found.launch_s > 0
    rates = [r for _, r in found.bandwidths]
    assert rates == sorted(rates, reverse=True)
