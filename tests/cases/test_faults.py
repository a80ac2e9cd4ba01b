"""Faults seen in comparable systems, each held as the right behaviour of its whole kind.

Numbers are those of the project's two fault lists: F1-F32 (other systems), S1-S25 (the two we start from). Here:
F1-F9, F12-F20, F24, F25, F30-F32, S1-S14, S16, S17, S19-S25, each on every device present where it is no matter of the host alone.
F10 and F11 (element counts past 2^32) are rows of conv_shapes.csv. F26, F28 and S18 (stores of measurements) are in
tests/unit/test_store.py, F27 there and for OpenCL's programs in test_opencl.py, F29 in test_select.py.
F21-F23 (ONNX attributes and graphs) and S15 (captured graphs) wait for what they concern; F23's and S25's part that exists
(folding, weights files) is here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import tilewright as tw
from tests.contract._contract import present
from tilewright import io, models, nn, optim
from tilewright.config import config
from tilewright.devices.api import Problem, spec
from tilewright.errors import ArgumentError, CheckpointError, ShapeError
from tilewright.ops.conv2d import CONV2D, WEIGHT_GRAD, Conv2dAttrs, InputGradAttrs, WeightGradAttrs

of_the_cpu = pytest.mark.of_the_cpu  # what it looks at is in host memory alone


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("of_the_cpu") is None:
        metafunc.parametrize("where", [d.name for d in present()], indirect=True)


@pytest.fixture(autouse=True)
def where(request, monkeypatch):
    """The device that tensors go to."""
    monkeypatch.setattr(config, "device", getattr(request, "param", "cpu"))


def grads(x, w, **options):
    tx, tw_ = tw.tensor(np.asarray(x, np.float32), requires_grad=True), tw.tensor(np.asarray(w, np.float32), requires_grad=True)
    y = tw.conv2d(tx, tw_, **options)
    y.backward(tw.ones_like(y))
    return y.detach().numpy(), tx.grad.numpy(), tw_.grad.numpy()


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [8, 16, 23, 24, 25, 48])
def test_f1_depthwise_weight_gradient(channels, dilation):
    x, w = np.ones((1, channels, 6, 6)), np.ones((channels, 1, 3, 3))
    _, _, dw = grads(x, w, stride=2, padding=1, dilation=dilation, groups=channels)
    if dilation == 1:
        np.testing.assert_array_equal(dw, np.broadcast_to([[4, 6, 6], [6, 9, 9], [6, 9, 9]], dw.shape))
    ref = CONV2D.reference(Conv2dAttrs((2, 2), (1, 1, 1, 1), (dilation,) * 2, channels), x, w)
    exact = WEIGHT_GRAD.reference(WeightGradAttrs(Conv2dAttrs((2, 2), (1, 1, 1, 1), (dilation,) * 2, channels), (3, 3), False), x, np.ones(ref.shape))
    np.testing.assert_array_equal(dw, exact)


def test_f2_last_columns_outside_every_window():
    _, dx, _ = grads(np.ones((1, 9, 32, 32)), np.ones((3, 9, 5, 5)), stride=3, padding=1)
    assert not dx[..., 31, :].any()
    assert not dx[..., :, 31].any()
    assert (dx[0, :, 2, 2] == 12).all()
    assert (dx[0, :, 0, 28:31] == 3 * dx[0, :, 0, 28:31] / 3).all()
    row = dx[0, 0, 30]  # one window row reaches it
    assert (row[28:31] == 3).all()
    assert (row[26:28] == 6).all()


def test_f3_strided_weight_view():
    w = np.arange(0, 1, 2**-10, dtype=np.float32).reshape(32, 16, 1, 2)[:, :, :, ::2]
    assert not w.flags.c_contiguous
    y = tw.conv2d(tw.ones(64, 16, 16, 16), tw.tensor(w))
    assert float(y.numpy().astype(np.float64).sum()) == 4186112.0


@pytest.mark.parametrize("r", [0, 1, 2, 5, 17, 31])
def test_f4_permuted_image_grouped(r):
    image = np.random.default_rng(0).random((1, 64, 64, 3), np.float32)
    y = tw.conv2d(tw.tensor(image).permute(0, 3, 1, 2), tw.zeros(3, 1, 1, 2 * r + 1), groups=3)
    assert y.shape == (1, 3, 64, 64 - 2 * r)
    assert not y.numpy().any()


def test_f5_dilation_matters():
    x, w = tw.normal(1, 8, 9, 9), tw.normal(8, 1, 3, 3)
    a, b = tw.conv2d(x, w, groups=8, dilation=2), tw.conv2d(x, w, groups=8)
    assert a.shape != b.shape
    ref = CONV2D.reference(Conv2dAttrs(dilation=(2, 2), groups=8), x.numpy().astype(np.float64), w.numpy().astype(np.float64))
    np.testing.assert_allclose(a.numpy(), ref, rtol=1e-5, atol=1e-5)


def test_f6_unequal_padding():
    x, w = np.ones((1, 1, 4, 4)), np.random.default_rng(0).standard_normal((2, 1, 2, 2)).astype(np.float32)
    y, _, _ = grads(x, w, padding=(0, 2, 1, 3))
    np.testing.assert_allclose(y, CONV2D.reference(Conv2dAttrs(padding=(0, 2, 1, 3)), x, w.astype(np.float64)), rtol=1e-5, atol=1e-6)
    assert y[:, 1].any()


def test_f7_padding_wider_than_the_window():
    w = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    y, dx, _ = grads(np.ones((5, 2, 11, 14)), w, padding=4)
    assert y.shape == (5, 3, 17, 20)
    np.testing.assert_allclose(dx, np.broadcast_to(w.sum((0, 2, 3))[None, :, None, None], dx.shape), rtol=1e-5, atol=1e-5)


def test_f8_transposed_with_dilation_and_padding():
    x, w = np.zeros((1, 1, 3, 3), np.float32), np.arange(1.0, 10.0, dtype=np.float32).reshape(1, 1, 3, 3)
    x[0, 0, 1, 1] = 1
    y = tw.conv_transpose2d(tw.tensor(x), tw.tensor(w), stride=2, padding=2, dilation=2).numpy()[0, 0]
    np.testing.assert_array_equal(y, [[1, 0, 2, 0, 3], [0] * 5, [4, 0, 5, 0, 6], [0] * 5, [7, 0, 8, 0, 9]])


def test_f9_nan_in_the_weight_gradient():
    g = np.ones((1, 2, 64, 64), np.float32)
    g[0, 1, 5, 5] = np.nan
    x = tw.tensor(np.ones((1, 3, 64, 64), np.float32), layout="channels_last")
    dw = tw.ops._call.call(WEIGHT_GRAD, (x, tw.tensor(g, layout="channels_last")), WeightGradAttrs(Conv2dAttrs(), (1, 1), False)).numpy()
    assert np.isnan(dw[1]).all()
    assert np.isfinite(dw[0]).all()


@of_the_cpu
def test_f12_f13_huge_extents_are_refused_not_crashed():
    big = tw.empty(46341, 1, 46341, 1, device="null")
    assert tw.conv2d(big, tw.empty(1, 1, 1, 1, device="null")).shape == (46341, 1, 46341, 1)
    with pytest.raises(ArgumentError, match="dilation 2147483648"):
        tw.conv1d(tw.zeros(1, 1, 9), tw.zeros(1, 1, 9), padding="same", dilation=2**31)
    with pytest.raises(ShapeError, match="more than can be addressed"):
        tw.empty(2**40, 2**40, device="null")


def test_f14_s19_empty_batch_and_channels():
    y, dx, dw = grads(np.zeros((0, 3, 8, 8)), np.ones((4, 3, 3, 3)))
    assert (y.shape, dx.shape) == ((0, 4, 6, 6), (0, 3, 8, 8))
    assert (dw == 0).all()
    for x, w in (((2, 0, 4, 4), (3, 0, 2, 2)), ((2, 3, 4, 4), (0, 3, 2, 2))):
        y, dx, dw = grads(np.ones(x), np.ones(w))
        assert (y == 0).all()
        assert (dx == 0).all()
        assert dw.shape == w
    assert tw.max_pool2d(tw.zeros(0, 3, 4, 4), 2).shape == (0, 3, 2, 2)
    bn = nn.BatchNorm2d(3).eval()
    assert bn(tw.zeros(0, 3, 4, 4)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("n", [3, 40000])
def test_f15_nan_propagates(n):
    x = np.ones(n, np.float32)
    x[0], x[1] = np.nan, -1
    y = tw.relu(tw.tensor(x)).numpy()
    assert np.isnan(y[0])
    assert y[1] == 0
    assert np.isnan(tw.relu6(tw.tensor(x)).numpy()[0])
    for at in (0, n // 2, n - 1):
        z = np.arange(n, dtype=np.float32)
        z[at] = np.nan
        assert np.isnan(tw.max(tw.tensor(z)).item())
        assert np.isnan(tw.min(tw.tensor(z)).item())
        assert tw.argmax(tw.tensor(z)).item() == at
    for f in (tw.maximum, tw.minimum):
        assert np.isnan(f(tw.tensor([np.nan, 2.0]), tw.tensor([1.0, np.nan])).numpy()).all()
    assert np.isnan(tw.clamp(tw.tensor([np.nan]), 0, 1).item())


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (2, 16, 8, 8)])
def test_f16_max_pool_keeps_nan(shape):
    assert np.isnan(tw.max_pool2d(tw.full(shape, float("nan")).channels_last(), 2).numpy()).all()
    x = np.zeros(shape, np.float32)
    x[..., 1, 1] = np.nan
    y = tw.max_pool2d(tw.tensor(x).channels_last(), 2).numpy()
    assert np.isnan(y[..., 0, 0]).all()
    assert (y[..., 1:, 1:] == 0).all()


def test_f17_no_window_wholly_outside():
    y = tw.max_pool2d(tw.ones(1, 1, 6, 7), 1, 2, ceil_mode=True)
    assert y.shape == (1, 1, 3, 4)
    assert (y.numpy() == 1).all()


def test_f18_average_at_the_border():
    y = tw.avg_pool2d(tw.arange(1.0, 17.0).reshape(1, 1, 4, 4), 3, 2, 1, ceil_mode=True).numpy().ravel()
    np.testing.assert_allclose(y, [14 / 9, 10 / 3, 2, 19 / 3, 11, 6, 4.5, 7.5, 4], rtol=1e-6)


def test_f19_integer_max_pool():
    x = -np.arange(1, 17, dtype=np.int32).reshape(1, 1, 4, 4)
    y = tw.max_pool2d(tw.tensor(x), 3, 1, 1)
    assert y.dtype is tw.int32
    assert y.numpy()[0, 0, 0, 0] == -1
    assert y.numpy()[0, 0, 3, 3] == -11


def test_f20_transposed_same():
    x, w = tw.tensor([[2.0, 3.0], [4.0, 5.0]]).reshape(1, 1, 2, 2), tw.arange(2.0, 11.0).reshape(1, 1, 3, 3)
    np.testing.assert_array_equal(tw.conv_transpose2d(x, w, padding="same").numpy()[0, 0], [[49, 63], [91, 105]])


def test_f23_s25_folding_leaves_shared_weights():
    conv, bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
    bn.running_mean.copy_(np.arange(4.0))
    bn.running_var.copy_(np.arange(4.0) + 0.5)
    conv.eval()
    bn.eval()
    x = tw.normal(2, 3, 8, 8)
    before = conv.weight.numpy().copy()
    plain, apart = conv(x), bn(conv(x))
    with tw.no_grad():
        folded = nn.conv_bn_act(conv, bn, x)
    np.testing.assert_allclose(folded.numpy(), apart.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(conv.weight.numpy(), before)
    np.testing.assert_array_equal(conv(x).numpy(), plain.numpy())
    bn.weight.copy_(np.full(4, 2.0))  # a change is noticed
    with tw.no_grad():
        np.testing.assert_allclose(nn.conv_bn_act(conv, bn, x).numpy(), bn(conv(x)).numpy(), rtol=1e-4, atol=1e-5)


def test_f24_every_target_ignored():
    logits = tw.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    loss = tw.cross_entropy(logits, tw.tensor([-1]), ignore_index=-1)
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad.numpy() == 0).all()


def test_f25_backward_repeats_bit_for_bit():
    x, w = np.random.default_rng(0).standard_normal((8, 16, 32, 32)), np.random.default_rng(1).standard_normal((16, 16, 3, 3))
    first, second = grads(x, w, padding=1), grads(x, w, padding=1)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


SIZES = """
import numpy as np, tilewright as tw
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
rng = np.random.default_rng(0)
net = tw.nn.Sequential(tw.nn.Conv2d(3, 64, 3), tw.nn.Conv2d(64, 64, 3), tw.nn.Conv2d(64, 64, 3))
start = None
for h, w in rng.integers(32, 301, (500, 2)):
    with tw.no_grad():
        net(tw.tensor(rng.standard_normal((1, 3, int(h), int(w))).astype("f")))
    start = start or resident()
print((resident() - start) / 2**20)
"""


@of_the_cpu
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from Linux's /proc")
def test_f30_memory_is_bounded_over_many_sizes():
    told = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 200


@of_the_cpu
def test_f31_out_of_memory_is_said_and_survived():
    from tilewright.errors import OutOfMemory

    with pytest.raises(OutOfMemory, match="could not be allocated while"):
        tw.empty(2**20, 2**20)
    np.testing.assert_array_equal((tw.ones(3) + 1.0).numpy(), [2, 2, 2])


@of_the_cpu
@pytest.mark.parametrize("damage", ["byte", "half", "empty", "flip data", "flip header", "garbage", "missing"])
def test_f32_damaged_weights(tmp_path, damage):
    model = models.lenet()
    path = tmp_path / "weights.safetensors"
    io.save_weights(path, model)
    data = bytearray(path.read_bytes())
    if damage == "byte":
        data = data[:-1]
    elif damage == "half":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = data[:0]
    elif damage == "flip data":
        data[-1000] ^= 1
    elif damage == "flip header":
        data[30] ^= 1
    elif damage == "garbage":
        data = bytearray(os.urandom(1000))
    path.write_bytes(bytes(data))
    if damage == "missing":
        path.unlink()
    before = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        io.load_weights(path, model)
    for k, v in model.state_dict().items():
        np.testing.assert_array_equal(v.numpy(), before[k])


# -- the two systems we start from -------------------------------------------------------------------------------------


def test_s1_dropout_backward_uses_its_mask():
    tw.manual_seed(0)
    for p in (0.5, 0.2):
        x = tw.ones(1000, requires_grad=True)
        y = tw.dropout(x, p)
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), y.detach().numpy())
        assert set(np.unique(y.detach().numpy())) == {0, np.float32(1 / (1 - p))}


def test_s2_fused_relu_with_dilation_and_groups():
    x, w = tw.normal(2, 4, 9, 9, dtype="float64"), tw.normal(6, 2, 3, 3, dtype="float64")
    x.requires_grad_()
    w.requires_grad_()
    y = tw.conv2d(x, w, padding=2, dilation=2, groups=2, activation="relu")
    np.testing.assert_allclose(y.detach().numpy(), tw.relu(tw.conv2d(x, w, padding=2, dilation=2, groups=2)).detach().numpy(), rtol=1e-12)
    assert (y.detach().numpy() >= 0).all()
    assert tw.gradcheck(lambda x, w: tw.conv2d(x, w, padding=2, dilation=2, groups=2, activation="relu"), [x, w])


def test_s3_losses_are_means_and_honour_the_incoming_gradient():
    for loss in (tw.mse_loss, tw.l1_loss, tw.smooth_l1_loss):
        x, t = tw.tensor([1.0, 2.0, 5.0], requires_grad=True), tw.tensor([0.0, 4.0, 4.5])
        loss(x, t).backward()
        once = x.grad.numpy().copy()
        x.grad = None
        (loss(x, t) * 8.0).backward()
        np.testing.assert_allclose(x.grad.numpy(), 8 * once)
    assert tw.mse_loss(tw.tensor([1.0, 3.0]), tw.tensor([0.0, 0.0])).item() == 5


def test_s4_backward_twice():
    x = tw.tensor([2.0], requires_grad=True)
    y = (x * x) * x
    y.backward(retain_graph=True)
    assert x.grad.item() == 12
    y.backward()
    assert x.grad.item() == 24
    with pytest.raises(tw.errors.AutogradError, match="retain_graph"):
        y.backward()


def test_s5_bce_at_zero():
    x = tw.tensor([0.0, 0.0], requires_grad=True)
    tw.bce_with_logits(x, tw.tensor([1.0, 0.0]), reduction="sum").backward()
    np.testing.assert_array_equal(x.grad.numpy(), [-0.5, 0.5])


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e6])
def test_s6_batch_norm_far_from_zero(mean):
    x = (np.random.default_rng(0).standard_normal((16, 32, 14, 14)) + mean).astype(np.float32)
    rm, rv = tw.zeros(32), tw.ones(32)
    y = tw.batch_norm(tw.tensor(x).channels_last(), rm, rv, tw.ones(32), tw.zeros(32), training=True, momentum=1.0).numpy()
    assert np.isfinite(y).all()
    exact = x.astype(np.float64).var((0, 2, 3), ddof=1)
    np.testing.assert_allclose(rv.numpy(), exact, rtol=2e-3)
    np.testing.assert_allclose(rm.numpy(), x.astype(np.float64).mean((0, 2, 3)), rtol=1e-6)


def test_s7_nothing_stale_in_broadcasts():
    for _ in range(3):
        tw.full((64, 64), float("nan"))  # leaves NaN behind in recycled memory
    a = tw.tensor(np.arange(4.0, dtype=np.float32), requires_grad=True)
    b = tw.tensor(np.ones((16, 4), np.float32), requires_grad=True)
    for f in (tw.maximum, tw.minimum, tw.mul, tw.add):
        a.grad = b.grad = None
        f(a, b).sum().backward()
        assert np.isfinite(a.grad.numpy()).all()
        assert np.isfinite(b.grad.numpy()).all()


def test_s8_float64_gradients_stay_float64():
    x = tw.tensor(np.ones((3, 1)), requires_grad=True)
    (x * tw.tensor(np.full((3, 5), 1 + 1e-12))).sum().backward()
    assert x.grad.dtype is tw.float64
    np.testing.assert_allclose(x.grad.numpy(), np.full((3, 1), 5 + 5e-12), rtol=1e-15)


def test_s9_reflect_softplus_cross_entropy():
    np.testing.assert_array_equal(tw.pad(tw.tensor([1.0, 2.0, 3.0]), (2, 2), "reflect").numpy(), [3, 2, 1, 2, 3, 2, 1])
    assert tw.softplus(tw.tensor([100.0])).item() == 100
    assert abs(tw.cross_entropy(tw.tensor([[200.0, 0.0]]), tw.tensor([1])).item() - 200) < 1e-4


def test_s10_integer_parameters():
    x = tw.tensor([-2.0, 3.0, 9.0])
    np.testing.assert_array_equal(tw.clamp(x, 0, 6).numpy(), [0, 3, 6])
    np.testing.assert_array_equal(tw.leaky_relu(x, 0).numpy(), [0, 3, 9])
    np.testing.assert_allclose(tw.elu(x, 1).numpy(), [np.expm1(-2), 3, 9], rtol=1e-6)
    np.testing.assert_allclose((-2 / x).numpy(), [1, -2 / 3, -2 / 9], rtol=1e-6)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (2, 3, 0), (3, 2, 0)])
def test_s11_max_pool_backward_any_stride(kernel, stride, padding):
    x = tw.tensor(np.random.default_rng(0).permutation(98).reshape(1, 2, 7, 7).astype(np.float64), requires_grad=True)
    assert tw.gradcheck(lambda x: tw.max_pool2d(x, kernel, stride, padding), [x])


@of_the_cpu
def test_s12_reshape_checks_the_count():
    with pytest.raises(ShapeError, match="they must be equal"):
        tw.zeros(2, 3).reshape(4, 2)


@of_the_cpu
def test_s13_the_callers_array_is_not_aliased():
    a = np.zeros(4, np.float32)
    t = tw.tensor(a)
    a[0] = 1
    assert t.numpy()[0] == 0
    shared = tw.from_numpy(a)
    a[1] = 5
    assert shared.numpy()[1] == 5


def test_s14_gradients_reach_the_parameter_through_a_cast():
    p = nn.Parameter(tw.ones(3))
    (p.to(dtype="bfloat16") * 2.0).sum().backward()
    assert p.grad.dtype is tw.float32
    np.testing.assert_array_equal(p.grad.numpy(), [2, 2, 2])


def test_s16_no_grad_is_of_the_thread():
    seen = []
    with tw.no_grad():
        t = threading.Thread(target=lambda: seen.append(tw.is_grad_enabled()))
        t.start()
        t.join()
        x = tw.ones(2, requires_grad=True)
        assert (x * 2.0).dtype is tw.float32
        assert not (x * 2.0).requires_grad
    assert seen == [True]


def test_s17_each_shape_has_its_own_plan():
    w = tw.normal(4, 3, 3, 3)
    for n in (0, 1, 5, 1):
        x = tw.normal(n, 3, 8, 8)
        ref = CONV2D.reference(Conv2dAttrs(), x.numpy().astype(np.float64), w.numpy().astype(np.float64))
        np.testing.assert_allclose(tw.conv2d(x, w).numpy(), ref, rtol=1e-4, atol=1e-5)


@of_the_cpu
def test_s21_weights_are_packed_once_per_version():
    w = tw.normal(32, 32, 3, 3).channels_last()
    x = tw.normal(1, 32, 16, 16).channels_last()
    first = tw.conv2d(x, w).numpy().copy()
    held = dict(w.buffer.stamp.derived)
    tw.conv2d(x, w)
    assert {k: id(v[1]) for k, v in w.buffer.stamp.derived.items()} == {k: id(v[1]) for k, v in held.items()}
    w.copy_(w.numpy() * 2)
    np.testing.assert_allclose(tw.conv2d(x, w).numpy(), 2 * first, rtol=1e-5, atol=1e-5)


def test_s22_backward_leaves_the_callers_gradient():
    x = tw.tensor(np.array([-1.0, 2.0], np.float32), requires_grad=True)
    g = tw.tensor(np.array([3.0, 4.0], np.float32))
    y = tw.relu(x)
    y.backward(g, retain_graph=True)
    y.backward(g)
    np.testing.assert_array_equal(g.numpy(), [3, 4])
    np.testing.assert_array_equal(x.grad.numpy(), [0, 8])


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "tanh", "silu", "mish", "hard_swish", "relu6", "sigmoid", "softplus", "elu"])
def test_s23_training_and_inference_agree(name):
    x, w = tw.normal(2, 8, 6, 6), tw.normal(8, 8, 3, 3)
    with tw.no_grad():
        fused = tw.conv2d(x, w, activation=name).numpy()
    w.requires_grad_()
    np.testing.assert_allclose(tw.conv2d(x, w, activation=name).detach().numpy(), fused, rtol=2e-4, atol=2e-5)


@of_the_cpu
def test_s24_inference_makes_no_training_primitives():
    cpu = tw.device("cpu")
    cpu.plans.clear()
    model = models.lenet().eval()
    with tw.no_grad():
        model(tw.normal(1, 1, 28, 28))
    assert not [p.problem.op for p in cpu.plans.values() if "grad" in p.problem.op]


@of_the_cpu
def test_s25_loading_verifies_shapes(tmp_path):
    io.save_weights(tmp_path / "a.safetensors", models.lenet(10))
    with pytest.raises(CheckpointError, match=r"fc3\.weight.*nothing was changed"):
        io.load_weights(tmp_path / "a.safetensors", models.lenet(11))
    state = models.resnet18().state_dict()
    assert {"bn1.running_mean", "bn1.running_var", "bn1.weight"} <= set(state)
    assert optim.SGD(models.lenet().parameters(), lr=0.1).groups


# -- of OpenCL devices alone -------------------------------------------------------------------------------------------

of_opencl = pytest.mark.parametrize("device", [pytest.param(d, id=d.name) for d in present() if d.kind == "opencl"])


@of_opencl
@of_the_cpu
@pytest.mark.parametrize("group, room", [(64, 1 << 24), (1 << 20, 16)], ids=["local memory", "work-items"])
def test_f31_more_than_a_group_may_have(device, group, room):
    from tilewright.devices.opencl.program import launcher

    source = f"""__kernel void k(__global float *x) {{ __local float a[{room}];
  a[get_local_id(0) % {room}] = x[0]; barrier(CLK_LOCAL_MEM_FENCE); x[0] = a[{room} - 1]; }}"""
    x = tw.zeros(4, device=device)
    with pytest.raises(tw.errors.TilewrightError, match=device.name):
        launcher(device, source, "k", size=(group,), group=(group,), buffers=1)(x.buffer)
        device.synchronize()
    y = tw.conv2d(tw.ones(1, 4, 5, 5, device=device), tw.ones(4, 4, 3, 3, device=device))
    np.testing.assert_array_equal(y.numpy(), np.full((1, 4, 3, 3), 36))


@of_opencl
@of_the_cpu
@pytest.mark.parametrize("group, local", [(128, 16 << 10), (64, 16 << 10), (1024, 48 << 10)])
def test_s17_small_devices_and_bounded_workspace(device, group, local, monkeypatch):
    """A kernel that takes a problem has a way to run it within the device's limits, and its partial sums stay within 256 MiB."""
    for name, value in (("max_group", group), ("local_memory", local), ("is_gpu", True), ("units", 132)):
        monkeypatch.setattr(device, name, value)
    x, w, y = (spec(s, "float32", "channels_last") for s in ((256, 1024, 7, 7), (1024, 1024, 1, 1), (256, 1024, 7, 7)))
    conv = Conv2dAttrs()
    for problem in (
        Problem("conv2d", conv, (x, w, None, None), (y,)),
        Problem("conv2d_input_grad", InputGradAttrs(conv, (7, 7)), (y, w), (x,)),
        Problem("conv2d_weight_grad", WeightGradAttrs(conv, (1, 1), False), (x, y), (w,)),
    ):
        taking = [k for k in device.kernels(problem.op) if not k.reject(problem, device)]
        assert any(k.id.endswith(".gemm") for k in taking)
        for kernel in taking:
            ways = list(kernel.configs(problem, device))
            assert ways, kernel.id
            for way in ways:
                assert kernel.workspace(problem, way) <= 256 << 20, (kernel.id, way)
                tile = dict(way)
                if {"bm", "bn", "bk", "tm", "tn"} <= tile.keys():
                    assert tile["bm"] // tile["tm"] * (tile["bn"] // tile["tn"]) <= group
                    assert (tile["bm"] + tile["bn"]) * tile["bk"] * 4 <= local


@of_opencl
@of_the_cpu
def test_s20_nothing_is_built_again(device):
    net = nn.Linear(4, 3).to(device=device)
    optimizer, ema = optim.AdamW(net.parameters(), lr=0.1), optim.EMA(net, 0.9)
    built = []
    for step in range(5):
        loss = tw.cross_entropy(net(tw.ones(2, 4, device=device)), tw.tensor([0, step % 3], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
        ema.update()
        built.append(len(device.programs))
    assert built[-1] == built[1], built
