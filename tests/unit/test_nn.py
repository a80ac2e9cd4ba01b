"""Modules, layers, initial values, folding and the summary."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest

import tilewright as tw
from tilewright import nn
from tilewright.errors import ArgumentError, CheckpointError, ShapeError
from tilewright.nn import init

RNG = np.random.default_rng(0)


def data(*shape, layout=None):
    return tw.tensor(RNG.standard_normal(shape), "float32", layout=layout or ("channels_last" if len(shape) == 4 else None))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.scale = nn.Parameter(tw.ones(1))
        self.register_buffer("seen", tw.zeros(2))
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])
        self.named = nn.ModuleDict({"a": nn.Identity()})

    def forward(self, x):
        y = tw.global_avg_pool2d(self.body(x)).flatten(1) * self.scale
        return [head(y) for head in self.heads]


def values(module):
    return {k: np.array(v.numpy()) for k, v in module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_names_of_what_a_module_holds():
    net = Net()
    assert [n for n, _ in net.named_parameters()] == [
        "scale", "body.0.weight", "body.1.weight", "body.1.bias", "heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias",
    ]  # fmt: skip
    assert [n for n, _ in net.named_buffers()] == ["seen", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"]
    assert [n for n, _ in net.named_children()] == ["body", "heads", "named"]
    assert [n for n, _ in net.named_modules()] == ["", "body", "body.0", "body.1", "body.2", "heads", "heads.0", "heads.1", "named", "named.a"]
    assert set(net.state_dict()) == {n for n, _ in net.named_parameters()} | {n for n, _ in net.named_buffers()}


def test_what_is_shared_is_listed_once():
    linear = nn.Linear(3, 3)
    net = nn.Sequential(linear, linear)
    assert len(list(net.parameters())) == 2
    other = nn.Linear(3, 3)
    other.weight = linear.weight
    assert len(list(nn.Sequential(linear, other).parameters())) == 3


def test_assigning_deleting_and_replacing():
    net = Net()
    del net.scale
    assert "scale" not in dict(net.named_parameters())
    net.body = nn.Identity()
    assert not any(n.startswith("body.") for n, _ in net.named_parameters())
    net.seen = tw.ones(2)
    assert net.state_dict()["seen"].tolist() == [1, 1]
    head = net.heads[0]
    head.bias = None
    assert [n for n, _ in head.named_parameters()] == ["weight"]
    with pytest.raises(ArgumentError, match=r"Linear\.weight is a Parameter and the value a plain Tensor; assign Parameter"):
        head.weight = tw.zeros(2, 4)

    class Early(nn.Module):
        def __init__(self):
            self.a = nn.Linear(1, 1)

    with pytest.raises(ArgumentError, match="Early: call super"):
        Early()


def test_the_tree_is_shown():
    assert repr(nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)))) == (
        "Sequential(\n  (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), bias=False)\n"
        "  (1): Sequential(\n    (0): ReLU()\n    (1): Dropout(p=0.1)\n  )\n)"
    )


def test_containers():
    a, b, c = nn.ReLU(), nn.Tanh(), nn.Flatten()
    s = nn.Sequential(a, b)
    s.append(c)
    assert list(s) == [a, b, c]
    assert s[-1] is c
    assert list(s[:2]) == [a, b]
    assert list(nn.Sequential({"x": a, "y": b})._modules) == ["x", "y"]
    d = nn.ModuleDict({"x": a})
    d["y"] = b
    assert list(d) == ["x", "y"]
    assert d["y"] is b
    assert len(nn.ModuleList([a, b])) == 2
    with pytest.raises(NotImplementedError, match="ModuleDict has no forward"):
        d(1)


def test_train_eval_and_apply():
    net = Net()
    assert net.eval() is net
    assert not any(m.training for m in net.modules())
    net.train()
    assert all(m.training for m in net.modules())
    seen = []
    net.apply(lambda m: seen.append(type(m).__name__))
    assert seen[:4] == ["Conv2d", "BatchNorm2d", "ReLU", "Sequential"]
    assert seen[-1] == "Net"
    net.requires_grad_(False)
    assert not any(p.requires_grad for p in net.parameters())


def test_hooks_see_and_change_outputs_until_removed():
    layer = nn.Linear(2, 2)
    x, seen = data(1, 2), []
    remove = layer.register_forward_hook(lambda module, args, out: seen.append((module, args[0], out)))
    plain = layer(x)
    assert seen[0][0] is layer
    assert seen[0][1] is x
    assert seen[0][2] is plain
    double = layer.register_forward_hook(lambda module, args, out: out * 2)
    np.testing.assert_allclose(layer(x).numpy(), 2 * plain.numpy())
    double()
    remove()
    np.testing.assert_array_equal(layer(x).numpy(), plain.numpy())
    assert len(seen) == 2


def test_moving_to_a_dtype_and_a_device():
    net = Net()
    x = data(2, 2, 6, 6)
    expected = [o.numpy() for o in net.eval()(x)]
    assert net.to("float64") is net
    assert {p.dtype.name for p in net.parameters()} == {"float64"}
    assert net.body[1].num_batches_tracked.dtype.name == "int64"
    assert net.body[0].weight.layout == "channels_last"
    for got, e in zip(net(x.to("float64")), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), e, rtol=1e-4, atol=1e-5)
    net.to("null")
    assert net(tw.empty(2, 2, 6, 6, dtype="float64", device="null"))[1].shape == (2, 3)


def test_copies_and_pickles_stand_alone():
    net = Net().eval()
    x = data(2, 2, 6, 6)
    with tw.no_grad():
        nn.conv_bn_act(net.body[0], net.body[1], x)  # leaves folded weights behind, which are no part of a copy
        expected = net(x)[0].numpy()
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert same(values(net), values(other))
            assert not other.training
            assert "_folded" not in other.body[1].__dict__
            assert other.body[0].weight.layout == "channels_last"
            np.testing.assert_array_equal(other(x)[0].numpy(), expected)
            other.scale.copy_(np.array([5.0]))
            assert net.scale.tolist() == [1]


# -- state -------------------------------------------------------------------------------------------------------------


def test_state_loads_from_tensors_and_arrays():
    a, b, c = Net(), Net(), Net()
    b.load_state_dict(a.state_dict())
    c.load_state_dict(values(a))
    assert same(values(a), values(b))
    assert same(values(a), values(c))
    assert not np.shares_memory(a.scale.numpy(), b.scale.numpy())


def test_every_misfit_is_named_and_nothing_changes():
    net = Net()
    before = values(net)
    state = {k: v + 1 for k, v in before.items()}
    del state["scale"], state["heads.1.bias"]
    state["other"] = np.zeros(1)
    state["heads.0.weight"] = np.zeros((4, 2))
    state["body.1.num_batches_tracked"] = np.array(1.5)
    with pytest.raises(CheckpointError) as error:
        net.load_state_dict(state)
    assert str(error.value) == (
        "Net.load_state_dict: the state does not fit: missing scale, heads.1.bias; not in the model other; of another kind "
        "body.1.num_batches_tracked: float64 given, int64 in the model, heads.0.weight: (4, 2) given, (2, 4) in the model; nothing was changed"
    )
    assert same(before, values(net))
    with pytest.raises(CheckpointError, match=r"heads\.0\.weight: \(4, 2\) given") as error:
        net.load_state_dict(state, strict=False)
    assert "missing" not in str(error.value)
    assert same(before, values(net))


def test_what_is_there_loads_without_strict():
    net = Net()
    before = values(net)
    net.load_state_dict({"scale": np.array([3.0]), "other": np.zeros(1)}, strict=False)
    after = values(net)
    assert after.pop("scale").tolist() == [3]
    before.pop("scale")
    assert same(before, after)


def test_many_misfits_stay_readable():
    with pytest.raises(CheckpointError, match="and 4 more") as error:
        Net().load_state_dict({})
    assert len(str(error.value)) < 500


# -- layers ------------------------------------------------------------------------------------------------------------

IMAGE, LINE, ROWS = (2, 4, 8, 8), (2, 4, 9), (3, 4)
LAYERS = [
    (lambda: nn.Conv1d(4, 6, 3, 2, 1, groups=2), LINE, lambda m, x: tw.conv1d(x, m.weight, m.bias, 2, 1, 1, 2), (2, 6, 5)),
    (lambda: nn.Conv2d(4, 6, (3, 1), 2, "same", bias=False), IMAGE, lambda m, x: tw.conv2d(x, m.weight, None, 2, "same"), (2, 6, 4, 4)),
    (lambda: nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4), IMAGE, lambda m, x: tw.conv2d(x, m.weight, m.bias, 1, 2, 2, 4), (2, 8, 8, 8)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2), LINE, lambda m, x: tw.conv_transpose1d(x, m.weight, m.bias, 2, 1, 1, 2), (2, 6, 18)),
    (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, dilation=2),
        IMAGE,
        lambda m, x: tw.conv_transpose2d(x, m.weight, m.bias, 2, 1, 1, 1, 2),
        (2, 6, 18, 18),
    ),
    (lambda: nn.Linear(4, 5), ROWS, lambda m, x: tw.linear(x, m.weight, m.bias), (3, 5)),
    (lambda: nn.Linear(9, 5, bias=False), LINE, lambda m, x: tw.linear(x, m.weight), (2, 4, 5)),
    (lambda: nn.BatchNorm1d(4), ROWS, lambda m, x: tw.batch_norm(x, None, None, m.weight, m.bias, True), ROWS),
    (lambda: nn.BatchNorm1d(4, affine=False), LINE, lambda m, x: tw.batch_norm(x, training=True), LINE),
    (lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(), IMAGE, lambda m, x: tw.batch_norm(x, None, None, m.weight, m.bias, True), IMAGE),
    (lambda: nn.LayerNorm((8, 8)), IMAGE, lambda m, x: tw.layer_norm(x, (8, 8), m.weight, m.bias), IMAGE),
    (lambda: nn.LayerNorm(9, elementwise_affine=False), LINE, lambda m, x: tw.layer_norm(x, 9), LINE),
    (lambda: nn.GroupNorm(2, 4), IMAGE, lambda m, x: tw.group_norm(x, 2, m.weight, m.bias), IMAGE),
    (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE, lambda m, x: tw.instance_norm(x, m.weight, m.bias), IMAGE),
    (lambda: nn.MaxPool1d(3, 2, 1), LINE, lambda m, x: tw.max_pool1d(x, 3, 2, 1), (2, 4, 5)),
    (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE, lambda m, x: tw.max_pool2d(x, 3, 2, 1, ceil_mode=True), (2, 4, 5, 5)),
    (lambda: nn.AvgPool1d(3, 2, 1), LINE, lambda m, x: tw.avg_pool1d(x, 3, 2, 1), (2, 4, 5)),
    (
        lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        IMAGE,
        lambda m, x: tw.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        (2, 4, 4, 4),
    ),
    (lambda: nn.AdaptiveAvgPool2d((3, 5)), IMAGE, lambda m, x: tw.adaptive_avg_pool2d(x, (3, 5)), (2, 4, 3, 5)),
    (lambda: nn.AdaptiveMaxPool2d(1), IMAGE, lambda m, x: tw.adaptive_max_pool2d(x, 1), (2, 4, 1, 1)),
    (lambda: nn.Upsample(scale_factor=2), IMAGE, lambda m, x: tw.resize(x, None, 2), (2, 4, 16, 16)),
    (lambda: nn.Upsample((5, 3), mode="bilinear"), IMAGE, lambda m, x: tw.resize(x, (5, 3), mode="bilinear"), (2, 4, 5, 3)),
    (lambda: nn.PixelShuffle(2), IMAGE, lambda m, x: tw.pixel_shuffle(x, 2), (2, 1, 16, 16)),
    (lambda: nn.PixelUnshuffle(2), IMAGE, lambda m, x: tw.pixel_unshuffle(x, 2), (2, 16, 4, 4)),
    (lambda: nn.Flatten(), IMAGE, lambda m, x: tw.flatten(x, 1), (2, 256)),
    (lambda: nn.Flatten(0, 2), IMAGE, lambda m, x: tw.flatten(x, 0, 2), (64, 8)),
    (lambda: nn.Identity(), ROWS, lambda m, x: x, ROWS),
    (lambda: nn.ReLU(inplace=True), ROWS, lambda m, x: tw.relu(x), ROWS),
    (lambda: nn.ReLU(True), ROWS, lambda m, x: tw.relu(x), ROWS),
    (lambda: nn.ReLU6(), ROWS, lambda m, x: tw.relu6(x), ROWS),
    (lambda: nn.LeakyReLU(0.2, True), ROWS, lambda m, x: tw.leaky_relu(x, 0.2), ROWS),
    (lambda: nn.PReLU(4), IMAGE, lambda m, x: tw.prelu(x, m.weight), IMAGE),
    (lambda: nn.ELU(0.5), ROWS, lambda m, x: tw.elu(x, 0.5), ROWS),
    (lambda: nn.SELU(), ROWS, lambda m, x: tw.selu(x), ROWS),
    (lambda: nn.GELU(), ROWS, lambda m, x: tw.gelu(x), ROWS),
    (lambda: nn.GELU("tanh"), ROWS, lambda m, x: tw.gelu(x, "tanh"), ROWS),
    (lambda: nn.GELU(approximate="tanh"), ROWS, lambda m, x: tw.gelu(x, approximate="tanh"), ROWS),
    (lambda: nn.SiLU(), ROWS, lambda m, x: tw.silu(x), ROWS),
    (lambda: nn.Mish(), ROWS, lambda m, x: tw.mish(x), ROWS),
    (lambda: nn.Sigmoid(), ROWS, lambda m, x: tw.sigmoid(x), ROWS),
    (lambda: nn.Tanh(), ROWS, lambda m, x: tw.tanh(x), ROWS),
    (lambda: nn.Softplus(2.0), ROWS, lambda m, x: tw.softplus(x, 2.0), ROWS),
    (lambda: nn.Softsign(), ROWS, lambda m, x: tw.softsign(x), ROWS),
    (lambda: nn.Hardsigmoid(), ROWS, lambda m, x: tw.hard_sigmoid(x), ROWS),
    (lambda: nn.Hardswish(), ROWS, lambda m, x: tw.hard_swish(x), ROWS),
    (lambda: nn.Hardtanh(-0.5, 0.25), ROWS, lambda m, x: tw.hard_tanh(x, -0.5, 0.25), ROWS),
    (lambda: nn.Softmax(1), LINE, lambda m, x: tw.softmax(x, 1), LINE),
    (lambda: nn.LogSoftmax(), LINE, lambda m, x: tw.log_softmax(x, -1), LINE),
    (lambda: nn.Dropout(0.0), ROWS, lambda m, x: x, ROWS),
    (lambda: nn.Dropout2d(0.9).eval(), IMAGE, lambda m, x: x, IMAGE),
]


@pytest.mark.parametrize(("make", "shape", "op", "out"), LAYERS, ids=[f"{i}-{type(m()).__name__}" for i, (m, *_) in enumerate(LAYERS)])
def test_a_layer_is_its_op_and_trains(make, shape, op, out):
    layer = make()
    x = data(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == out
    np.testing.assert_array_equal(y.numpy(), op(layer, x).numpy())
    (y * data(*out, layout="contiguous")).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.shape == p.shape


def test_every_public_layer_is_tested_here():
    tested = {type(make()) for make, *_ in LAYERS} | {nn.Embedding, nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict}
    layers = {v for v in vars(nn).values() if isinstance(v, type) and issubclass(v, nn.Module)}
    assert {v.__name__ for v in layers - tested} == {v.__name__ for v, *_ in LOSSES}


def test_embedding():
    layer = nn.Embedding(5, 3)
    index = tw.tensor([[0, 4], [4, 4]])
    out = layer(index)
    np.testing.assert_array_equal(out.numpy(), layer.weight.numpy()[index.numpy()])
    out.sum().backward()
    assert layer.weight.grad.numpy()[:, 0].tolist() == [1, 0, 0, 0, 3]


LOSSES = [
    (nn.CrossEntropyLoss, {"label_smoothing": 0.1}, tw.cross_entropy),
    (nn.NLLLoss, {}, tw.nll_loss),
    (nn.BCEWithLogitsLoss, {}, tw.bce_with_logits),
    (nn.MSELoss, {"reduction": "sum"}, tw.mse_loss),
    (nn.L1Loss, {}, tw.l1_loss),
    (nn.SmoothL1Loss, {}, tw.smooth_l1_loss),
    (nn.HuberLoss, {}, tw.huber_loss),
    (nn.KLDivLoss, {}, tw.kl_div),
]


@pytest.mark.parametrize(("make", "options", "op"), LOSSES)
def test_a_loss_is_its_op(make, options, op):
    x = data(4, 3)
    y = tw.tensor([0, 2, 1, 1]) if make in (nn.CrossEntropyLoss, nn.NLLLoss) else tw.softmax(data(4, 3))
    assert make(**options)(x, y).item() == op(x, y, **options).item()


def test_class_weights_move_with_the_loss():
    loss = nn.CrossEntropyLoss(weight=tw.tensor([1.0, 2.0, 3.0])).to("float64")
    x, y = data(4, 3).to("float64"), tw.tensor([0, 2, 1, 1])
    assert loss(x, y).item() == tw.cross_entropy(x, y, weight=tw.tensor([1.0, 2.0, 3.0], "float64")).item()
    assert loss(x, y).dtype.name == "float64"


@pytest.mark.parametrize(("groups", "ins", "outs"), [(0, 4, 4), (3, 4, 6), (2, 4, 5)])
def test_groups_must_divide_the_channels(groups, ins, outs):
    with pytest.raises(ArgumentError, match=f"Conv2d: groups {groups} must divide in_channels {ins} and out_channels {outs}"):
        nn.Conv2d(ins, outs, 3, groups=groups)


def test_a_step_converts_no_weight():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    optimizer = tw.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    cpu = tw.devices.get("cpu")

    def step():
        net(data(2, 3, 9, 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    cpu.plans.clear()
    step()
    assert {p.layout for p in net.parameters() if p.ndim == 4} == {"channels_last"}
    assert "to_layout" not in {plan.op.name for plan in cpu.plans.values()}
    assert "conv2d" in {plan.op.name for plan in cpu.plans.values()}


def test_dropouts_keep_masks_and_rates_of_their_own():
    """Fault S1: a second dropout must not scale as the first, and backward must use forward's mask."""
    for p in (0.25, 0.5):
        for layer, per in ((nn.Dropout(p), (1,)), (nn.Dropout2d(p), (1, 16))):
            x = tw.ones(64, 16, 4, 4, requires_grad=True)
            y = layer(x)
            kept = y.numpy() != 0
            np.testing.assert_allclose(y.numpy()[kept], 1 / (1 - p), rtol=1e-6)
            assert abs(kept.mean() - (1 - p)) < 0.06
            if len(per) > 1:
                assert ((kept.sum((2, 3)) == 16) | (kept.sum((2, 3)) == 0)).all()
            y.sum().backward()
            np.testing.assert_array_equal(x.grad.numpy(), y.numpy())


def test_batch_norm_counts_and_averages():
    bn, mean = nn.BatchNorm2d(3, momentum=None), np.zeros(3)
    batches = [data(4, 3, 5, 5) for _ in range(3)]
    for x in batches:
        bn(x)
        mean += x.numpy().mean((0, 2, 3)) / 3
    assert bn.num_batches_tracked.item() == 3
    np.testing.assert_allclose(bn.running_mean.numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(bn.running_var.numpy(), np.mean([x.numpy().var((0, 2, 3), ddof=1) for x in batches], 0), rtol=1e-5)
    bn.eval()(batches[0])
    assert bn.num_batches_tracked.item() == 3


def test_gradients_reach_a_parameter_through_a_cast():
    """Fault S14: mixed precision casts the parameter, and the gradient must come back to it."""
    layer = nn.Linear(4, 2)
    x = data(3, 4).to("bfloat16")
    tw.linear(x, layer.weight.to("bfloat16"), layer.bias.to("bfloat16")).sum().backward()
    assert layer.weight.grad.dtype.name == "float32"
    np.testing.assert_allclose(layer.weight.grad.numpy()[0], x.numpy().astype(np.float32).sum(0), rtol=2e-2, atol=2e-2)


# -- initial values ----------------------------------------------------------------------------------------------------


def bounds(t):
    a = t.numpy()
    return float(np.abs(a).max()), float(a.std())


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(64, 64, 3, groups=4), lambda: nn.Conv2d(16, 64, 3), lambda: nn.Linear(144, 99)])
def test_default_weights_lie_within_the_fan(make):
    layer = make()
    bound = 1 / math.sqrt(144)
    for t in (layer.weight, layer.bias):
        largest, std = bounds(t)
        assert largest <= bound
        assert largest > 0.9 * bound
    assert std == pytest.approx(bound / math.sqrt(3), rel=0.25)
    assert bounds(layer.weight)[1] == pytest.approx(bound / math.sqrt(3), rel=0.03)


@pytest.mark.parametrize(
    ("fill", "std"),
    [
        (lambda t: init.kaiming_normal_(t, mode="fan_out", nonlinearity="relu", groups=4), math.sqrt(2 / (16 * 9))),
        (lambda t: init.kaiming_normal_(t, nonlinearity="relu"), math.sqrt(2 / (32 * 9))),
        (lambda t: init.kaiming_uniform_(t, a=0.5), math.sqrt(2 / 1.25 / (32 * 9))),
        (lambda t: init.xavier_normal_(t, groups=4), math.sqrt(2 / (48 * 9))),
        (lambda t: init.xavier_uniform_(t, gain=2.0), 2 * math.sqrt(2 / (96 * 9))),
        (lambda t: init.normal_(t, 0.0, 0.3), 0.3),
        (lambda t: init.uniform_(t, -1.0, 1.0), 1 / math.sqrt(3)),
        (lambda t: init.trunc_normal_(t, 0.0, 0.5, -5.0, 5.0), 0.5),
    ],
)
def test_spread_of_initialisers(fill, std):
    t = fill(tw.empty(64, 32, 3, 3, layout="channels_last"))
    assert t.layout == "channels_last"
    assert bounds(t)[1] == pytest.approx(std, rel=0.03)
    assert abs(t.numpy().mean()) < 0.05 * std


def test_truncated_normal_stays_inside():
    t = init.trunc_normal_(tw.empty(5000), 0.0, 1.0, -0.5, 1.0)
    assert t.numpy().min() >= -0.5
    assert t.numpy().max() <= 1.0
    for impossible in ((0.0, 1.0, 50.0, 60.0), (0.0, 0.0, -1.0, 1.0), (0.0, 1.0, 1.0, -1.0)):
        with pytest.raises(ArgumentError, match="widen the range"):
            init.trunc_normal_(tw.empty(3), *impossible)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 2, 3, 3)])
def test_orthogonal(shape):
    a = init.orthogonal_(tw.empty(*shape), 2.0).numpy().reshape(shape[0], -1)
    product = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-5)


def test_initialisers_refuse_what_has_no_meaning():
    with pytest.raises(ShapeError, match="has no fan"):
        init.kaiming_normal_(tw.empty(3))
    with pytest.raises(ArgumentError, match="nonlinearity 'swoosh'"):
        init.kaiming_normal_(tw.empty(3, 3), nonlinearity="swoosh")
    with pytest.raises(ArgumentError, match="mode 'in'"):
        init.kaiming_normal_(tw.empty(3, 3), mode="in")


def test_a_seed_gives_the_same_weights():
    tw.manual_seed(5)
    a = values(Net())
    tw.manual_seed(5)
    assert same(a, values(Net()))
    assert not same(a, values(Net()))


# -- folding -----------------------------------------------------------------------------------------------------------


def pair(bias=False, affine=True, **options):
    conv, bn = nn.Conv2d(4, 6, 3, padding=1, bias=bias, **options), nn.BatchNorm2d(6, affine=affine)
    bn.running_mean.copy_(RNG.standard_normal(6))
    bn.running_var.copy_(RNG.uniform(0.5, 2, 6))
    if affine:
        bn.weight.copy_(RNG.standard_normal(6))
        bn.bias.copy_(RNG.standard_normal(6))
    bn.eval()
    return conv, bn


def apart(conv, bn, x, activation=None, residual=None):
    y = bn(conv(x))
    y = y if residual is None else y + residual
    return (y if activation is None else getattr(tw, activation)(y)).numpy()


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "hard_swish", "silu", "gelu", "tanh"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"affine": False}, {"groups": 2, "dilation": 2, "stride": 1}])
def test_folding_changes_no_value(activation, residual, options):
    conv, bn = pair(**options)
    x = data(2, 4, 7, 7)
    res = data(*conv(x).shape) if residual else None
    with tw.no_grad():
        got = nn.conv_bn_act(conv, bn, x, activation, res)
        assert "_folded" in bn.__dict__
    np.testing.assert_allclose(got.numpy(), apart(conv, bn, x, activation, res), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["conv.weight", "conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"])
@pytest.mark.parametrize("how", ["copy_", "numpy", "another tensor"])
def test_folded_weights_follow_every_change(source, how):
    conv, bn = pair(bias=True)
    x = data(2, 4, 7, 7)
    with tw.no_grad():
        nn.conv_bn_act(conv, bn, x)
        held = bn.__dict__["_folded"][1]
        nn.conv_bn_act(conv, bn, x)
        assert bn.__dict__["_folded"][1] is held  # kept while nothing changes
        owner, name = {"conv": conv, "bn": bn}[source.split(".")[0]], source.split(".")[1]
        t = getattr(owner, name)
        new = RNG.uniform(0.5, 2, t.shape).astype(np.float32)
        if how == "copy_":
            t.copy_(new)
        elif how == "numpy":
            t.numpy(writable=True)[...] = new
        else:
            setattr(owner, name, nn.Parameter(tw.tensor(new)) if isinstance(t, nn.Parameter) else tw.tensor(new))
        got = nn.conv_bn_act(conv, bn, x).numpy()
        np.testing.assert_allclose(got, apart(conv, bn, x), rtol=1e-4, atol=1e-4)


def test_folding_never_changes_shared_weights():
    """Fault 23: one weight in two convolutions, only one of them followed by batch norm."""
    conv, bn = pair()
    plain = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    plain.weight = conv.weight
    x = data(1, 4, 6, 6)
    with tw.no_grad():
        weight, alone, together = np.array(conv.weight.numpy()), plain(x).numpy(), apart(conv, bn, x)
        for _ in range(2):
            np.testing.assert_allclose(nn.conv_bn_act(conv, bn, x).numpy(), together, atol=1e-5)
            np.testing.assert_array_equal(plain(x).numpy(), alone)
    np.testing.assert_array_equal(conv.weight.numpy(), weight)


def test_two_convolutions_may_share_a_batch_norm():
    (one, bn), (two, _) = pair(), pair()
    x = data(1, 4, 6, 6)
    with tw.no_grad():
        for conv in (one, two, one):
            np.testing.assert_allclose(nn.conv_bn_act(conv, bn, x).numpy(), apart(conv, bn, x), atol=1e-4)


@pytest.mark.parametrize("wants", ["x", "conv.weight", "conv.bias", "bn.weight", "bn.bias", "residual"])
def test_whatever_wants_a_gradient_gets_it_in_evaluation(wants):
    conv, bn = pair(bias=True)
    x, residual = data(2, 4, 7, 7), data(2, 6, 7, 7)
    for p in (*conv.parameters(), *bn.parameters()):
        p.requires_grad_(False)
    t = {"x": x, "residual": residual, "conv.weight": conv.weight, "conv.bias": conv.bias, "bn.weight": bn.weight, "bn.bias": bn.bias}[wants]
    t.requires_grad_()
    nn.conv_bn_act(conv, bn, x, "relu", residual).sum().backward()
    got = t.grad.numpy()
    t.grad = None
    tw.relu(bn(conv(x)) + residual).sum().backward()
    np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "relu", "relu6"])
def test_training_equals_the_layers_apart(activation):
    conv, bn = pair()
    other_conv, other = copy.deepcopy(conv), copy.deepcopy(bn)
    x = data(2, 4, 7, 7)
    y = nn.conv_bn_act(conv, bn.train(), x, activation)
    z = other.train()(other_conv(x))
    z = z if activation is None else getattr(tw, activation)(z)
    weights = data(*y.shape)
    np.testing.assert_allclose(y.numpy(), z.numpy(), atol=1e-5)
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    for a, b in zip((*conv.parameters(), *bn.parameters()), (*other_conv.parameters(), *other.parameters()), strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(bn.running_var.numpy(), other.running_var.numpy())


def test_hooks_see_the_layers_apart():
    conv, bn = pair()
    seen = []
    remove = bn.register_forward_hook(lambda module, args, out: seen.append(out))
    x = data(1, 4, 6, 6)
    with tw.no_grad():
        got = nn.conv_bn_act(conv, bn, x)
        assert seen[0] is got
        remove()
        np.testing.assert_allclose(nn.conv_bn_act(conv, bn, x).numpy(), got.numpy(), atol=1e-5)


def test_half_weights_fold():
    conv, bn = pair()
    x = data(1, 4, 6, 6)
    expected = apart(conv, bn, x)
    conv.to("bfloat16")
    bn.to("bfloat16")
    with tw.no_grad():
        got = nn.conv_bn_act(conv, bn, x.to("bfloat16"))
    assert got.dtype.name == "bfloat16"
    np.testing.assert_allclose(got.numpy().astype(np.float32), expected, atol=0.15)


# -- summary -----------------------------------------------------------------------------------------------------------


def test_summary_without_running():
    net = Net()
    for p in net.heads[1].parameters():
        p.requires_grad_(False)
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    before, plans = values(net), len(tw.devices.get("null").plans)
    report = nn.summary(net, (2, 2, 6, 6))
    assert not calls
    assert same(before, values(net))
    assert net.training
    assert len(tw.devices.get("null").plans) == plans
    rows = {r.name: r for r in report.rows}
    assert [r.name for r in report.rows] == ["body.0", "body.1", "body.2", "heads.0", "heads.1", ""]
    assert rows["body.0"].output == (2, 4, 4, 4)
    assert rows["body.0"].parameters == 72
    assert rows["body.0"].flops == 2 * 72 * 2 * 16
    assert rows["body.0"].activation_bytes == 4 * 128
    assert rows["heads.1"].flops == 2 * 4 * 3 * 2
    assert rows[""].output is None
    assert report.parameters == 72 + 8 + 1 + 10 + 15
    assert report.trainable == report.parameters - 15
    assert report.parameter_bytes == 4 * report.parameters
    assert report.flops == sum(r.flops for r in report.rows)
    json.dumps(report.as_dict())
    assert "parameters 106 (91 trainable" in str(report)


def test_summary_counts_a_layer_each_time_it_runs():
    layer = nn.Linear(3, 3)
    report = nn.summary(nn.Sequential(layer, layer), (1, 3))
    assert [r.flops for r in report.rows] == [18, 18]
    assert report.parameters == 12
