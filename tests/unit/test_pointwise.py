"""Pointwise ops: values at the edges of their types, derivatives at kinks, promotion, and the known faults of their kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tilewright as tw
from tests.contract import _contract
from tilewright import devices
from tilewright.devices.api import Problem, registered, spec
from tilewright.devices.cpu.numpy import _blocks, _epilogue
from tilewright.ops import _activation, pointwise
from tilewright.ops._call import scalar
from tilewright.ops._op import OPS

CPU = devices.get("cpu")
NAN, INF = math.nan, math.inf
EDGES = np.array([NAN, INF, -INF, 0, -0.0, 6, 3, -3, 1, -1, 0.5, -0.5, 100, -100, 1e4, -1e4], np.float32)
LARGE = np.tile(EDGES, 200)  # long enough for library kernels, and not only their vector loop's first step


def launched(kernel, attrs, *arrays):
    """What a kernel makes of float32 arrays, or None where it rejects them."""
    specs = tuple(spec(a.shape, "float32") for a in arrays)
    outs = OPS[kernel.op].outputs(attrs, *specs)
    problem = Problem(kernel.op, attrs, specs, outs)
    if kernel.reject(problem, CPU):
        return None
    result = CPU.allocate(outs[0].nbytes)
    kernel.prepare(problem, (), CPU)([CPU.upload(a, s) for a, s in zip(arrays, specs, strict=True)], [result])
    return result.array(outs[0]).copy()


def agrees(got, right, atol=4e-6):
    with np.errstate(all="ignore"):
        right = np.asarray(right, np.float64)
        right = np.where(np.abs(right) > np.finfo(np.float32).max, np.copysign(INF, right), right)
        same = (got == right) | (np.isnan(got) & np.isnan(right)) | (np.abs(got - right) <= atol * np.maximum(1, np.abs(right)))
    return bool(same.all())


ONE = [*pointwise.UNARY, *_activation.ALL, "clamp"]


@pytest.mark.parametrize("kernel", [k for k in registered("cpu") if k.op in ONE], ids=lambda k: k.id)
def test_nan_and_infinity_go_through_every_kernel(kernel):
    attrs = _activation.ALL.get(kernel.op, (0.0, 6.0) if kernel.op == "clamp" else None)
    got = launched(kernel, attrs, LARGE)
    if got is None:
        return  # the contract tests see to it that a kernel takes something
    with np.errstate(all="ignore"):
        right = OPS[kernel.op].reference(attrs, LARGE.astype(np.float64))
    assert agrees(got, right), {float(x): (float(y), float(r)) for x, y, r in zip(EDGES, got, right, strict=False)}


GRADS = [f"{name}_grad" for name in _activation.ALL] + ["clamp_grad"]


@pytest.mark.parametrize("kernel", [k for k in registered("cpu") if k.op in GRADS], ids=lambda k: k.id)
def test_nan_and_kinks_in_every_gradient_kernel(kernel):
    name = kernel.op.removesuffix("_grad")
    attrs = _activation.ALL.get(name, (0.0, 6.0))
    s = np.tile(np.array([NAN, 0, -0.0, 6, 3, -3, 1, -1, 0.5, 100, -100], np.float32), 200)
    g = np.linspace(-2, 2, s.size, dtype=np.float32)
    got = launched(kernel, attrs, g, s)
    assert got is not None or "onednn" in kernel.id
    if got is not None:
        with np.errstate(all="ignore"):
            right = OPS[kernel.op].reference(attrs, g.astype(np.float64), s.astype(np.float64))
        assert agrees(got, right)
        g[::3] = NAN
        assert np.isnan(launched(kernel, attrs, g, s)[::3]).all()  # type: ignore[index]


@pytest.mark.parametrize("kernel", [k for k in registered("cpu") if k.op in ("add", "sub", "mul", "div", "maximum", "minimum")], ids=lambda k: k.id)
def test_nan_from_either_side(kernel):
    a, b = (v.reshape(-1).copy() for v in np.meshgrid(LARGE[:48], EDGES))
    a, b = np.tile(a, 4), np.tile(b, 4)
    got = launched(kernel, None, a, b)
    if got is not None:
        with np.errstate(all="ignore"):
            assert agrees(got, OPS[kernel.op].reference(None, a.astype(np.float64), b.astype(np.float64)))


def test_fault_15_relu_keeps_nan():
    for n in (3, 3000, 300_000):
        x = np.resize(np.array([NAN, 1, -2], np.float32), n)
        np.testing.assert_array_equal(tw.relu(tw.tensor(x)).numpy()[:3], [NAN, 1, 0])
        np.testing.assert_array_equal(tw.relu6(tw.tensor(x)).numpy()[:3], [NAN, 1, 0])


# -- derivatives at kinks: PyTorch's -----------------------------------------------------------------------------------

KINKS = [
    ("relu", {}, [-1, 0, 1], [0, 0, 1]),
    ("relu6", {}, [0, 3, 6, 7], [0, 1, 0, 0]),
    ("hard_tanh", {}, [-1, 0, 1], [0, 1, 0]),
    ("clamp", {"min": 0, "max": 6}, [-1, 0, 6, 7], [0, 1, 1, 0]),
    ("clamp", {"min": 3, "max": 1}, [0, 2, 4], [0, 0, 0]),
    ("hard_sigmoid", {}, [-3, 0, 3], [0, 1 / 6, 0]),
    ("hard_swish", {}, [-3, -1.5, 0, 3, 4], [0, 0, 0.5, 1, 1]),
    ("leaky_relu", {}, [-1, 0, 1], [0.01, 0.01, 1]),
    ("leaky_relu", {"negative_slope": 0}, [-1, 0, 1], [0, 0, 1]),
    ("elu", {"alpha": 0.5}, [0, 1], [0.5, 1]),
    ("selu", {}, [0, 1], [1.7580993408473766, 1.0507009873554805]),
    ("abs", {}, [-2, 0, 2], [-1, 0, 1]),
    ("sign", {}, [-2, 0, 2], [0, 0, 0]),
    ("round", {}, [-0.5, 0.3], [0, 0]),
    ("softplus", {}, [0, 100, -800], [0.5, 1, 0]),
    ("logsigmoid", {}, [0, 100, -800], [0.5, 0, 1]),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "given", "at", "right"), KINKS)
@pytest.mark.parametrize("n", [1, 500], ids=["small", "large"])
def test_derivative_at_kinks(name, given, at, right, dtype, n):
    x = tw.tensor(np.tile(np.array(at, dtype), n), requires_grad=True)
    getattr(tw, name)(x, **given).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.tile(right, n), rtol=1e-5, atol=1e-12)


def gradients(f, *values):
    xs = [tw.tensor(np.array(v, np.float64), requires_grad=True) for v in values]
    y = f(*xs)
    return y.detach().numpy(), *[g.numpy() for g in tw.grad(y, xs, tw.ones(*y.shape, dtype="float64"))]


def test_prelu_at_zero():
    y, gx, gw = gradients(tw.prelu, [[0.0, -2.0], [2.0, 0.0]], [0.25, 0.5])
    np.testing.assert_array_equal(y, [[0, -1], [2, 0]])
    np.testing.assert_array_equal(gx, [[0.25, 0.5], [1, 0.5]])
    np.testing.assert_array_equal(gw, [0, -2])


@pytest.mark.parametrize(("f", "a", "b"), [(tw.maximum, [0.5, 1, 0, 1, 1], [0.5, 0, 1, 1, 1]), (tw.minimum, [0.5, 0, 1, 1, 1], [0.5, 1, 0, 1, 1])])
def test_extremes_share_ties_and_pass_nan(f, a, b):
    y, ga, gb = gradients(f, [1, 2, 1, NAN, 1], [1, 1, 2, 1, NAN])
    assert np.isnan(y[3:]).all()
    np.testing.assert_array_equal(ga, a)
    np.testing.assert_array_equal(gb, b)


def test_pow_at_zero():
    y, ga, gb = gradients(tw.pow, [0, 0, 0, 2, -2, 0, 0], [0, 2, -1, 0, 2, 1, 0.5])
    np.testing.assert_array_equal(y, [1, 0, INF, 1, 4, 0, 0])
    np.testing.assert_array_equal(ga, [0, 0, -INF, 0, -4, 1, INF])
    np.testing.assert_allclose(gb, [0, 0, -INF, math.log(2), NAN, 0, 0])
    for p, right in ((0, [0, 0]), (1, [1, 1]), (2, [0, 4]), (3, [0, 12]), (-1, [-INF, -0.25]), (0.5, [INF, 0.5 / math.sqrt(2)])):
        _, g = gradients(lambda x, p=p: x**p, [0, 2])
        np.testing.assert_allclose(g, right)


def test_remainder_has_the_divisors_sign():
    y, ga, gb = gradients(tw.remainder, [5, -5, 5, -5], [3, 3, -3, -3])
    np.testing.assert_array_equal(y, [2, 1, -1, -2])
    np.testing.assert_array_equal(ga, [1, 1, 1, 1])
    np.testing.assert_array_equal(gb, [-1, 2, 2, -1])


SMOOTH = ["tanh", "sigmoid", "elu", "selu", "silu", "gelu", "gelu_tanh", "hard_swish", "softplus", "logsigmoid", "softsign", "mish", "leaky_relu"]


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative(name):
    x = tw.tensor(np.array([-2.3, -0.7, 0.4, 1.9]), requires_grad=True)
    assert tw.gradcheck(lambda v: tw.grad((pointwise.activate(v, name) ** 2).sum(), [v], create_graph=True), [x], atol=1e-6, rtol=1e-5)


# -- values ------------------------------------------------------------------------------------------------------------


def test_erf_to_the_last_place():
    x = np.concatenate([np.linspace(-6, 6, 20001), [0.46875, 4.0, 1e-30, 1e30, -1e30]])
    right = np.array([math.erf(v) for v in x])
    assert np.max(np.abs(_epilogue.erf(x) - right) - 5e-16 * np.abs(right)) <= 0
    right = np.array([math.erfc(v) for v in x])
    assert np.max(np.abs(_epilogue.erf(x, complement=True) - right) / (right + 1e-300)) < 1e-14
    single = x.astype(np.float32)
    right = np.array([math.erf(v) for v in single])
    assert np.max(np.abs(_epilogue.erf(single) - right)) < 2e-7


def test_fault_s9_softplus_does_not_overflow():
    x = tw.tensor([100.0, -100.0, 1000.0, 0.0, -20.0])
    np.testing.assert_allclose(tw.softplus(x).numpy(), [100, 3.720076e-44, 1000, math.log(2), 2.0611537e-09], rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(tw.softplus(x, 2.0).numpy(), [100, 0, 1000, math.log(2) / 2, 2.124177e-18], rtol=1e-6, atol=1e-38)
    assert tw.softplus(tw.tensor([21.0], dtype="float64"), threshold=20).item() == 21.0
    assert tw.softplus(tw.tensor([21.0], dtype="float64")).item() > 21.0
    np.testing.assert_allclose(tw.logsigmoid(x).numpy(), [0, -100, 0, -math.log(2), -20], rtol=1e-6, atol=1e-38)


def test_fault_s10_integers_as_parameters():
    x = tw.tensor([-2.0, 0.5, 9.0])
    for got, right in (
        (tw.clamp(x, 0, 6), [0, 0.5, 6]),
        (tw.leaky_relu(x, 0), [0, 0.5, 9]),
        (tw.elu(x, 1), [math.expm1(-2), 0.5, 9]),
        (tw.div(-2, x), [1, -4, -2 / 9]),
        (tw.hard_tanh(x, -1, 1), [-1, 0.5, 1]),
        (-2 - x, [0, -2.5, -11]),
        (2**x, [0.25, math.sqrt(2), 512]),
        (x**2, [4, 0.25, 81]),
    ):
        np.testing.assert_allclose(got.numpy(), right, rtol=1e-6)
        assert got.dtype is tw.float32


def test_fault_s23_gelu_is_one_function_fused_or_not_trained_or_not():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 9, 9)).astype(np.float32), rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    for name in ("gelu", "gelu_tanh", "tanh", "silu", "hard_swish"):
        plain = pointwise.activate(tw.conv2d(tw.tensor(x), tw.tensor(w)), name).numpy()
        fused = tw.conv2d(tw.tensor(x), tw.tensor(w), activation=name).numpy()
        trained = tw.conv2d(tw.tensor(x), tw.tensor(w, requires_grad=True), activation=name).detach().numpy()
        np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(trained, plain, rtol=1e-5, atol=2e-6)


def test_fault_s7_recycled_memory_never_shows():
    shape = (2, 32, 24, 25)
    for _ in range(3):
        dirty = [tw.full(shape, NAN) for _ in range(6)]
        del dirty  # their blocks go back to the pool
        a = tw.tensor(np.ones(shape, np.float32), requires_grad=True)
        b = tw.tensor(np.ones((1, 32, 1, 1), np.float32), requires_grad=True)
        y = tw.maximum(a, b) + tw.minimum(a, b) * tw.where(a > b, a, b)
        y.sum().backward()
        assert (y.numpy() == 2).all()
        assert np.isfinite(a.grad.numpy()).all()
        assert np.isfinite(b.grad.numpy()).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "sigmoid", "exp", "div"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_rounded_once(name, dtype):
    x = tw.tensor(np.linspace(0.1, 4, 50, dtype=np.float32)).to(dtype=dtype)
    args = (x, 3.0) if name == "div" else (x,)
    wide = (x.float(), 3.0) if name == "div" else (x.float(),)
    f = getattr(tw, name)
    np.testing.assert_array_equal(f(*args).float().numpy(), f(*wide).to(dtype=dtype).float().numpy())


@pytest.mark.parametrize("name", ["relu6", "hard_swish", "gelu", "silu_grad", "clamp", "relu6_grad"])
def test_blocks_on_threads_join_up(name, monkeypatch):
    monkeypatch.setattr(_blocks, "cores", lambda: 3)
    monkeypatch.setattr(_blocks, "BLOCK", 4096)
    monkeypatch.setattr(_blocks, "PARALLEL", 1 << 15)
    op = OPS[name]
    attrs = _activation.ALL.get(name.removesuffix("_grad"), (-1.0, 1.0))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(50_001).astype(np.float32) * 4 for _ in range(2 if name.endswith("_grad") else 1)]
    kernel = next(k for k in registered("cpu", name) if k.id.endswith(".numpy"))
    got = launched(kernel, attrs, *arrays)
    step = 7  # the reference is slow
    assert agrees(got[::step], op.reference(attrs, *[a[::step].astype(np.float64) for a in arrays]))  # type: ignore[index]


# -- types, shapes, numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda i: i + 1, "int32"),
        (lambda i: i + True, "int32"),
        (lambda i: i + 1.5, "float32"),
        (lambda i: 1.5 * i, "float32"),
        (lambda i: i / 2, "float32"),
        (lambda i: 2 / i, "float32"),
        (lambda i: i // 2, "int32"),
        (lambda i: i % 2, "int32"),
        (lambda i: i**2, "int32"),
        (lambda i: i**0.5, "float32"),
        (lambda i: i + np.float64(1.5), "float32"),
        (lambda i: i + np.int64(1), "int32"),
        (lambda i: i > 1.5, "bool"),
        (lambda i: tw.where(i > 1, i, 0.5), "float32"),
        (lambda i: tw.where(i > 1, 1, 0), "int64"),
        (lambda i: (i > 1) + 1, "int64"),
        (lambda i: i + tw.ones(3, dtype="float16"), "float64"),
        (lambda i: tw.exp(i), "float32"),
        (lambda i: tw.sigmoid(i), "float32"),
        (lambda i: tw.floor(i), "int32"),
        (lambda i: tw.relu(i), "int32"),
        (lambda i: tw.relu6(i), "int32"),
        (lambda i: tw.clamp(i, 0, 2), "int32"),
        (lambda i: tw.clamp(i, 0.5), "float32"),
        (lambda i: tw.isnan(i), "bool"),
        (lambda i: i.to(dtype="bfloat16") * 2.0, "bfloat16"),
    ],
)
def test_promotion(f, dtype):
    assert f(tw.tensor(np.array([1, 2, 3], np.int32))).dtype.name == dtype


def test_numbers_that_an_integer_type_does_not_hold():
    u = tw.tensor([1, 200], dtype="uint8")
    assert (u < 300).tolist() == [True, True]
    assert (u > -1).tolist() == [True, True]
    assert (u == 257).tolist() == [False, False]
    assert (u < 200.5).tolist() == [True, True]
    assert (u < 2**80).tolist() == [True, True]
    big = tw.tensor([2**53, 2**53 + 1])
    assert (big == 2**53).tolist() == [True, False]
    assert (big < 2**63).tolist() == [True, True]
    assert tw.clamp(u, -5, 1000).tolist() == [1, 200]
    with pytest.raises(tw.errors.ArgumentError, match=r"the number 300 does not fit uint8 \(0 to 255\); convert the tensor to a wider type"):
        _ = u + 300


def test_integer_division_and_powers():
    i = tw.tensor([7, -7, 0])
    assert (i // 2).tolist() == [3, -4, 0]
    assert (i % 2).tolist() == [1, 1, 0]
    assert (i // 0).tolist() == [0, 0, 0]
    assert (tw.tensor([2, 1, -1, -1, 0]) ** tw.tensor([-1, -2, -3, -2, -1])).tolist() == [0, 1, -1, 1, 0]
    assert (2 ** tw.tensor([0, 5, 62])).tolist() == [1, 32, 2**62]


def test_scalars_are_kept_and_told_apart():
    assert scalar(2.0, tw.float32, CPU) is scalar(2.0, tw.float32, CPU)
    assert math.copysign(1, (tw.tensor(-0.0) + -0.0).item()) == -1
    assert math.copysign(1, (tw.tensor(-0.0) + 0.0).item()) == 1
    assert (tw.tensor([2]) * True).dtype is tw.int64
    assert np.isinf((tw.tensor([2.0], dtype="float16") * 1e6).numpy()).all()


def test_layout_follows_the_operand_of_full_rank():
    x = tw.tensor(np.ones((2, 3, 4, 5), np.float32)).channels_last()
    for y in (x + 1, 1 + x, x * tw.ones(3, 1, 1), tw.ones(1, 3, 1, 1) * x, tw.relu(x), x > 0, tw.where(x > 0, x, 0.0), x + tw.ones(2, 3, 4, 5)):
        assert y.layout == "channels_last"
        assert y.shape == x.shape
    y = x.contiguous() + tw.tensor(np.arange(120.0, dtype=np.float32).reshape(2, 3, 4, 5)).channels_last()
    np.testing.assert_array_equal(y.numpy(), 1 + np.arange(120.0).reshape(2, 3, 4, 5))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_scalar_and_empty_shapes(shape):
    x = tw.tensor(np.full(shape, 0.5, np.float32), requires_grad=True)
    for name in _activation.ALL:
        y = pointwise.activate(x, name)
        assert y.shape == shape
        (g,) = tw.grad(y, [x], tw.ones(*shape))
        assert g.shape == shape
        assert np.isfinite(g.numpy()).all()
    assert (x * 2 + x / 3 - 1).shape == shape


def test_gradient_of_a_broadcast_operand_is_summed():
    a = tw.tensor(np.ones((2, 3, 4), np.float64), requires_grad=True)
    b = tw.tensor(np.arange(1.0, 4).reshape(3, 1), requires_grad=True)
    (a * b / 2).sum().backward()
    np.testing.assert_array_equal(b.grad.numpy(), np.full((3, 1), 4.0))
    np.testing.assert_array_equal(a.grad.numpy(), np.broadcast_to(b.detach().numpy() / 2, (2, 3, 4)))


def test_contract_samples_cover_library_broadcasts():
    """Each way of broadcasting that a library kernel takes is among the samples the contract tests run."""
    taken = [k for k in registered("cpu", "mul") if "onednn" in k.id]
    shapes = set()
    for sample in OPS["mul"].samples():
        if all(a.dtype == "float32" for a in sample.inputs):
            lies = _contract.specs(sample)
            problem = Problem("mul", None, tuple(lies), OPS["mul"].outputs(None, *lies))
            if any(not k.reject(problem, CPU) for k in taken):
                shapes.add(sample.inputs[1].shape)
    assert not taken or devices.get("cpu").describe()["onednn"] is None or {(), (2, 32, 24, 25), (1, 32, 1, 1), (40, 1), (1000,)} <= shapes
