"""Optimizers and schedules, each against its published rule written out per parameter in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tilewright as tw
from tilewright import nn, optim
from tilewright.errors import ArgumentError, CheckpointError
from tilewright.optim.optimizer import SMALL


def sgd(p, g, s, t, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * p
    if momentum:
        s["v"] = momentum * s.get("v", 0) + g
        g = g + momentum * s["v"] if nesterov else s["v"]
    return p - lr * g


def adam(p, g, s, t, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
    if decoupled:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g**2
    return p - lr * (s["m"] / (1 - betas[0] ** t)) / (np.sqrt(s["v"] / (1 - betas[1] ** t)) + eps)


def adamw(p, g, s, t, **options):
    return adam(p, g, s, t, decoupled=True, **options)


def rmsprop(p, g, s, t, lr, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0):
    g = g + weight_decay * p
    s["s"] = alpha * s.get("s", 0) + (1 - alpha) * g**2
    step = g / (np.sqrt(s["s"]) + eps)
    if momentum:
        step = s["v"] = momentum * s.get("v", 0) + step
    return p - lr * step


CASES = [
    (optim.SGD, sgd, {"lr": 0.1}),
    (optim.SGD, sgd, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, adam, {"lr": 0.01}),
    (optim.Adam, adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    (optim.AdamW, adamw, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.AdamW, adamw, {"lr": 0.01, "weight_decay": 0.0}),
    (optim.RMSprop, rmsprop, {"lr": 0.01}),
    (optim.RMSprop, rmsprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9}),
]
IDS = [f"{o.__name__}-{'-'.join(f'{k}={v}' for k, v in kw.items())}" for o, _, kw in CASES]
SHAPES = [(3,), (), (4, 3, 3, 3), (1, 70), (SMALL + 7,), (0, 2), (5, SMALL // 4)]  # gathered ones, and some that go alone


def parameters(dtype="float32"):
    rng = np.random.default_rng(0)
    return [nn.Parameter(tw.tensor(rng.standard_normal(s), dtype, layout="channels_last" if len(s) == 4 else "contiguous")) for s in SHAPES], rng


@pytest.mark.parametrize(("make", "rule", "options"), CASES, ids=IDS)
def test_twenty_steps_follow_the_rule(make, rule, options):
    params, rng = parameters()
    expected = [p.numpy().astype(np.float64) for p in params]
    state = [{} for _ in params]
    optimizer = make(params, **options)
    for t in range(1, 21):
        for i, p in enumerate(params):
            g = rng.standard_normal(p.shape)
            p.grad = tw.tensor(g, "float32", layout=p.layout)
            expected[i] = np.asarray(rule(expected[i], g.astype(np.float32).astype(np.float64), state[i], t, **options))
        optimizer.step()
    for p, e in zip(params, expected, strict=True):
        np.testing.assert_allclose(p.numpy(), e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes_take_a_step(dtype):
    params, rng = parameters(dtype)
    before = [p.numpy().astype(np.float64) for p in params]
    optimizer = optim.AdamW(params, lr=0.25, weight_decay=0.5)
    for p in params:
        p.grad = tw.tensor(rng.choice([-1.0, 1.0], p.shape), dtype, layout=p.layout)
    optimizer.step()
    for p, b in zip(params, before, strict=True):
        expected = adamw(b, p.grad.numpy().astype(np.float64), {}, 1, lr=0.25, weight_decay=0.5)
        np.testing.assert_allclose(p.numpy().astype(np.float64), expected, atol=4 * p.dtype.eps * 4)


def test_a_parameter_without_gradient_stays():
    params, _ = parameters()
    before = [np.array(p.numpy()) for p in params]
    optimizer = optim.SGD(params, lr=1.0, momentum=0.9, weight_decay=0.5)
    params[0].grad = tw.ones_like(params[0].detach())
    optimizer.step()
    np.testing.assert_allclose(params[0].numpy(), before[0] - (1 + 0.5 * before[0]), rtol=1e-6)
    assert all(np.array_equal(p.numpy(), b) for p, b in zip(params[1:], before[1:], strict=True))


def test_gradients_may_lie_in_another_layout():
    p = nn.Parameter(tw.zeros(2, 3, 4, 5, layout="channels_last"))
    g = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    optimizer = optim.SGD([p], lr=1.0)
    p.grad = tw.tensor(g)
    optimizer.step()
    assert np.array_equal(p.numpy(), -g)


def test_groups_have_options_of_their_own():
    a, b = nn.Parameter(tw.ones(2)), nn.Parameter(tw.ones(2))
    optimizer = optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "weight_decay": 1.0}], lr=0.5)
    a.grad = b.grad = tw.ones(2)
    optimizer.step()
    assert a.tolist() == [0, 0]
    assert b.tolist() == [0, 0]
    assert [g["lr"] for g in optimizer.groups] == [1.0, 0.5]


def test_the_hyper_parameters_make_no_new_plans():
    p = nn.Parameter(tw.ones(3))
    optimizer = optim.Adam([p])
    plans = tw.devices.get("cpu").plans
    p.grad = tw.ones(3)
    optimizer.step()
    before = len(plans)
    for i in range(5):
        optimizer.groups[0]["lr"] = 0.1 / (i + 1)
        optimizer.step()
    assert len(plans) == before


def test_a_step_is_seen_by_packed_and_folded_weights():
    """Kernels keep packed weights, and evaluation keeps folded ones; both must follow the step."""
    conv, norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
    optimizer = optim.SGD([*conv.parameters(), *norm.parameters()], lr=1.0)
    x = tw.tensor(np.random.default_rng(0).standard_normal((2, 16, 8, 8)), "float32")
    norm.eval()
    for _ in range(3):
        with tw.no_grad():
            y = nn.conv_bn_act(conv, norm, x, "relu")
        w = tw.tensor(conv.weight.numpy())  # memory of its own
        bias = norm.bias.detach().reshape(1, 16, 1, 1)
        expected = tw.relu(tw.conv2d(x, w, None, 1, 1) / math.sqrt(1 + norm.eps) * norm.weight.detach().reshape(1, 16, 1, 1) + bias)
        np.testing.assert_allclose(y.numpy(), expected.numpy(), atol=1e-4)
        for p in (*conv.parameters(), *norm.parameters()):
            p.grad = tw.full(p.shape, 0.1)
        optimizer.step()


def test_state_goes_on_where_it_stopped():
    for make, _, options in CASES:
        one, rng = parameters()
        grads = [[rng.standard_normal(p.shape).astype(np.float32) for p in one] for _ in range(6)]

        def run(optimizer, params, steps, grads=grads):
            for k in steps:
                for p, g in zip(params, grads[k], strict=True):
                    p.grad = tw.tensor(g, layout=p.layout)
                optimizer.step()

        whole = make(one, **options)
        run(whole, one, range(6))
        two, _ = parameters()
        first = make(two, **options)
        run(first, two, range(3))
        three, _ = parameters()
        second = make(three, **{**options, "lr": 99.0})
        for p, q in zip(three, two, strict=True):
            p.copy_(q)
        second.load_state_dict(first.state_dict())
        run(second, three, range(3, 6))
        for p, q in zip(one, three, strict=True):
            assert np.array_equal(p.numpy(), q.numpy()), make


def test_state_of_another_model_is_refused_whole():
    a, _ = parameters()
    first = optim.Adam(a)
    held = first.state_dict()
    held["state"][0]["mean"][2] = np.zeros(5, np.float32)
    held["groups"][0]["lr"] = 7.0
    with pytest.raises(CheckpointError, match=r"Adam.load_state_dict: .*nothing was changed"):
        first.load_state_dict(held)
    assert first.groups[0]["lr"] == 1e-3
    with pytest.raises(CheckpointError, match="nothing was changed"):
        optim.SGD(a, momentum=0.9).load_state_dict(first.state_dict())


def test_a_model_moved_to_another_dtype_keeps_its_state():
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    start = model.weight.numpy().astype(np.float64)
    for dtype in ("float32", "float64"):
        model.to(dtype)
        for p in model.parameters():
            p.grad = tw.ones_like(p.detach())
        optimizer.step()
    np.testing.assert_allclose(model.weight.numpy(), start - 0.5 * 1 - 0.5 * 1.5, rtol=1e-6)
    assert model.weight.dtype.name == "float64"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD([]), "SGD: there are no parameters"),
        (lambda p: optim.SGD([p, p]), "given twice"),
        (lambda p: optim.SGD([p], lr=-1), "lr -1 must be at least 0 and finite"),
        (lambda p: optim.SGD([p], nesterov=True), "nesterov needs a momentum"),
        (lambda p: optim.Adam([{"params": [p], "momentum": 0.9}]), "options .'momentum'. are not known; use lr, betas"),
        (lambda p: optim.Adam([p * 2]), "must be a floating leaf tensor"),
        (lambda p: optim.Adam([tw.zeros(2, dtype="int64")]), "must be a floating leaf tensor"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make(nn.Parameter(tw.ones(2)))


def test_zero_grad():
    p = nn.Parameter(tw.ones(2))
    optimizer = optim.SGD([p])
    p.grad = tw.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is None


# -- gradients and averages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_clip_by_norm(dtype):
    a, b = nn.Parameter(tw.zeros(2, dtype=dtype)), nn.Parameter(tw.zeros(1, dtype=dtype))
    a.grad, b.grad = tw.tensor([300.0, 0.0], dtype), tw.tensor([400.0], dtype)  # the squares overflow a half
    assert optim.clip_grad_norm_([a, b, nn.Parameter(tw.zeros(1))], 1000.0) == pytest.approx(500)
    assert a.grad.tolist() == [300, 0]
    assert optim.clip_grad_norm_([a, b], 5.0) == pytest.approx(500)
    np.testing.assert_allclose(a.grad.numpy().astype(float), [3, 0], rtol=1e-2)
    np.testing.assert_allclose(b.grad.numpy().astype(float), [4], rtol=1e-2)
    assert a.grad.dtype.name == dtype


def test_clip_with_a_norm_that_is_not_finite():
    p = nn.Parameter(tw.zeros(2))
    p.grad = tw.tensor([float("nan"), 1.0])
    assert math.isnan(optim.clip_grad_norm_([p], 1.0))
    assert np.isnan(p.grad.numpy()).all()


def test_clip_by_value():
    p = nn.Parameter(tw.zeros(3))
    p.grad = tw.tensor([-5.0, 0.5, 5.0])
    optim.clip_grad_value_([p, nn.Parameter(tw.zeros(1))], 1.0)
    assert p.grad.tolist() == [-1, 0.5, 1]


def test_moving_average_of_weights():
    model = nn.Conv2d(2, 2, 3)
    ema = optim.EMA(model, 0.9)
    expected = model.weight.numpy().astype(np.float64)
    rng = np.random.default_rng(0)
    for _ in range(5):
        model.weight.copy_(rng.standard_normal(model.weight.shape))
        ema.update()
        expected = 0.9 * expected + 0.1 * model.weight.numpy()
    last = np.array(model.weight.numpy())
    with ema.applied():
        np.testing.assert_allclose(model.weight.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(model.weight.numpy(), last)
    other = optim.EMA(model, 0.9)
    other.load_state_dict(ema.state_dict())
    np.testing.assert_allclose(other.averages[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(CheckpointError, match="another model"):
        optim.EMA(nn.Linear(2, 2)).load_state_dict(ema.state_dict())


# -- schedules ---------------------------------------------------------------------------------------------------------


def rates(make, steps, lr=0.5):
    optimizer = optim.SGD([{"params": [nn.Parameter(tw.zeros(1))]}, {"params": [nn.Parameter(tw.zeros(1))], "lr": 2 * lr}], lr=lr)
    schedule = make(optimizer)
    out = []
    for _ in range(steps):
        first, second = (g["lr"] for g in optimizer.groups)
        out.append(first)
        if not isinstance(schedule, optim.OneCycle):
            assert second == pytest.approx(2 * first)
        schedule.step()
    return out


def test_step():
    assert rates(lambda o: optim.Step(o, 3, 0.1), 7) == pytest.approx([0.5] * 3 + [0.05] * 3 + [0.005])


def test_multi_step():
    assert rates(lambda o: optim.MultiStep(o, [4, 2], 0.5), 6) == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])


def test_cosine():
    expected = [0.1 + 0.4 * (1 + math.cos(math.pi * min(t, 8) / 8)) / 2 for t in range(12)]
    assert rates(lambda o: optim.CosineAnnealing(o, 8, floor=0.2), 12) == pytest.approx(expected)


def test_one_cycle():
    got = rates(lambda o: optim.OneCycle(o, 1.0, 11, up=0.5), 14)
    assert got[0] == pytest.approx(1 / 25)
    assert got[10] == got[13] == pytest.approx(1 / 25 / 1e4)  # the last step of the run is the lowest
    peak = 0.5 * 11 - 1
    assert got[4] == pytest.approx(1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * 4 / peak)) / 2)
    assert got[5] == pytest.approx(1 / 25e4 + (1 - 1 / 25e4) * (1 + math.cos(math.pi * (5 - peak) / (10 - peak))) / 2)
    assert max(got) == got[4 if got[4] > got[5] else 5]


@pytest.mark.parametrize(("total", "up"), [(1, 0.3), (2, 0.3), (3, 0.0), (5, 1.0)])
def test_one_cycle_at_its_edges(total, up):
    got = rates(lambda o: optim.OneCycle(o, 1.0, total, up=up), total + 2)
    assert all(0 < r <= 1 for r in got)


def test_warm_up_alone_and_before_another():
    assert rates(lambda o: optim.LinearWarmup(o, 4), 6) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    chained = rates(lambda o: optim.LinearWarmup(o, 2, optim.Step(o, 2, 0.1), start=0.5), 7)
    assert chained == pytest.approx([0.375, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005])
    chained = rates(lambda o: optim.LinearWarmup(o, 2, optim.CosineAnnealing(o, 4)), 6)
    assert chained == pytest.approx([0.25, 0.5, *[0.25 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: optim.Step(o, 2),
        lambda o: optim.MultiStep(o, [2, 4]),
        lambda o: optim.CosineAnnealing(o, 9),
        lambda o: optim.OneCycle(o, 1.0, 9),
        lambda o: optim.LinearWarmup(o, 3, optim.CosineAnnealing(o, 5)),
    ],
)
def test_a_schedule_goes_on_where_it_stopped(make):
    def fresh():
        return optim.SGD([nn.Parameter(tw.zeros(1))], lr=0.5)

    first = fresh()
    schedule = make(first)
    for _ in range(3):
        schedule.step()
    second = fresh()
    again = make(second)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(schedule.state_dict())
    for _ in range(5):
        assert first.groups[0]["lr"] == second.groups[0]["lr"]
        schedule.step()
        again.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: optim.Step(o, 0),
        lambda o: optim.CosineAnnealing(o, 0),
        lambda o: optim.OneCycle(o, 1.0, 0),
        lambda o: optim.OneCycle(o, 1.0, 9, up=2),
    ],
)
def test_impossible_schedules_are_refused(make):
    with pytest.raises(ArgumentError):
        make(optim.SGD([nn.Parameter(tw.zeros(1))]))
