"""The Tensor: making, exchanging, indexing, printing."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import ArgumentError, DeviceError, DTypeError, ShapeError


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4)[:, ::-1],
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(24, dtype=">f4").reshape(2, 3, 4),
        np.arange(20)[::3],
        np.float32(3),
        np.zeros((0, 3)),
        np.broadcast_to(np.arange(3), (4, 3)),
        np.arange(48, dtype=np.float32).reshape(2, 4, 2, 3).transpose(0, 3, 1, 2),
        np.array([True, False]),
    ],
    ids=["negative", "fortran", "big endian", "strided", "scalar", "empty", "broadcast", "nhwc", "bool"],
)
def test_any_numpy_array(array):
    t = tw.tensor(array)
    np.testing.assert_array_equal(t.numpy(), array)
    assert t.shape == np.shape(array)


def test_layouts():
    nhwc = np.arange(48, dtype=np.float32).reshape(2, 4, 2, 3)
    t = tw.tensor(nhwc.transpose(0, 3, 1, 2))
    assert t.layout == "channels_last"
    assert t.permute(0, 2, 3, 1).buffer is t.buffer
    np.testing.assert_array_equal(t.permute(0, 2, 3, 1).numpy(), nhwc)
    c = t.contiguous()
    assert c.layout == "contiguous"
    np.testing.assert_array_equal(c.numpy(), t.numpy())
    np.testing.assert_array_equal((t + c).numpy(), 2 * t.numpy())


def test_python_numbers_and_lists():
    assert tw.tensor(1.5).dtype is tw.float32
    assert tw.tensor([1, 2]).dtype is tw.int64
    assert tw.tensor([True]).dtype is tw.bool_
    assert tw.tensor([[1.0], [2.0]]).shape == (2, 1)
    with pytest.raises(ArgumentError, match="unequal lengths"):
        tw.tensor([[1, 2], [3]])
    with pytest.raises(DTypeError, match="is not one of"):
        tw.tensor(np.array(["a"]))


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ("float32", "float64", "float64"),
        ("int32", "float32", "float64"),
        ("int8", "uint8", "int16"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "int8", "bfloat16"),
        ("bool", "uint8", "uint8"),
        ("float16", "float32", "float32"),
    ],
)
def test_promotion(a, b, out):
    assert (tw.ones(2, dtype=a) + tw.ones(2, dtype=b)).dtype.name == out
    assert (tw.ones(2, dtype=b) + tw.ones(2, dtype=a)).dtype.name == out


def test_scalars_are_weak():
    assert (tw.ones(2, dtype="float16") * 2.5).dtype is tw.float16
    assert (tw.arange(3) + 1).dtype is tw.int64
    assert (tw.arange(3) + 1.5).dtype is tw.float32
    assert (tw.arange(3) / 2).dtype is tw.float32
    assert (2 - tw.ones(2)).tolist() == [1, 1]
    assert (2 / tw.full(2, 4.0)).tolist() == [0.5, 0.5]


def test_numpy_operators_give_tensors():
    out = np.ones(3, np.float32) * tw.ones(3)
    assert isinstance(out, tw.Tensor)
    np.testing.assert_array_equal(np.asarray(out), [1, 1, 1])


def test_zero_copy_exchange():
    t = tw.ones(4)
    view = t.numpy()
    assert not view.flags.writeable
    t.copy_([5, 6, 7, 8])
    np.testing.assert_array_equal(view, [5, 6, 7, 8])
    d = np.from_dlpack(t)
    t.copy_([1, 1, 1, 1])
    np.testing.assert_array_equal(d, [1, 1, 1, 1])
    back = tw.from_dlpack(np.arange(6.0).reshape(2, 3))
    assert back.shape == (2, 3)
    with pytest.raises(ArgumentError, match="use tensor"):
        tw.from_numpy(np.arange(10.0)[::2])


def test_views_outlive_their_tensor():
    views = [tw.full((1000,), float(i)).numpy() for i in range(20)]
    for _ in range(50):
        tw.full((1000,), -1.0)
    assert [v[0] for v in views] == list(range(20))


def test_indexing_like_numpy():
    a = np.arange(60).reshape(3, 4, 5)
    t = tw.tensor(a)
    keys = [0, -1, slice(1, None), (slice(None), 2), (slice(None, None, -2), ..., slice(4, 0, -3)), (None, 1), (..., None, 0)]
    keys += [[0, 2], (slice(None), [1, 1, 3]), slice(5, 9), (0, 0, 0)]
    for k in keys:
        np.testing.assert_array_equal(t[k].numpy(), a[k], err_msg=str(k))
    np.testing.assert_array_equal(t[t > 30].numpy(), a[a > 30])
    np.testing.assert_array_equal(t[tw.tensor([True, False, True])].numpy(), a[[True, False, True]])
    for bad, match in ((3, "outside axis 0"), ((0, 0, 0, 0), "4 axes are indexed"), ("x", "not an integer")):
        with pytest.raises((ArgumentError, ShapeError), match=match):
            t[bad]
    with pytest.raises(ArgumentError, match="outside the axis"):
        t[[0, 7]]
    t[0, 1] = 9
    assert (t.numpy()[0, 1] == 9).all()


def test_repr():
    assert repr(tw.tensor([1.0, 2.0])) == "tensor([1., 2.], dtype=float32)"
    assert "channels_last" in repr(tw.zeros(1, 1, 2, 2, layout="channels_last"))
    assert "shape=(100, 100)" in repr(tw.zeros(100, 100))
    assert repr(tw.zeros(0, 2)) == "tensor([], shape=(0, 2), dtype=float32)"
    x = tw.ones(1, requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "grad_op=mul" in repr(x * 2.0)
    assert "bfloat16" in repr(tw.ones(2, dtype="bfloat16"))
    assert "null" in repr(tw.empty(2, device="null"))


def test_conversions():
    assert float(tw.tensor(2.5)) == 2.5
    assert int(tw.tensor([3])) == 3
    assert [10, 20, 30][tw.tensor(1)] == 20
    assert bool(tw.tensor([1]))
    with pytest.raises(ShapeError, match="ambiguous"):
        bool(tw.ones(2))
    with pytest.raises(ShapeError, match="one element"):
        tw.ones(2).item()
    with pytest.raises(ShapeError, match="0-d"):
        len(tw.tensor(1.0))
    assert f"{tw.tensor(1.25):.1f}" == "1.2"


def test_pickle_and_copy():
    t = tw.normal(2, 3, 4, 4).channels_last()
    for made in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        assert made.layout == t.layout
        assert made.buffer is not t.buffer
        np.testing.assert_array_equal(made.numpy(), t.numpy())


def test_devices():
    n = tw.zeros(2, device="null")
    with pytest.raises(DeviceError, match="operands lie on"):
        n + tw.zeros(2)
    with pytest.raises(DeviceError, match="computes nothing"):
        n.numpy()
    with pytest.raises(DeviceError, match="is not known"):
        tw.zeros(2, device="cuda")
    assert tw.zeros(2).to("null").device.name == "null"


def test_methods_are_the_ops():
    x = tw.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert x.sum().item() == 10
    assert x.mean(0).tolist() == [2, 3]
    assert x.max(1).tolist() == [2, 4]
    assert x.T.tolist() == [[1, 3], [2, 4]]
    assert (x @ x).tolist() == [[7, 10], [15, 22]]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        x.nonsense


def test_python_protocols():
    x = tw.tensor([1.0, 2.0])
    assert (x == None) is False  # noqa: E711
    assert 2.0 in x
    assert 5.0 not in x
    assert (np.ones((1, 2), np.float32) @ x).tolist() == [3]
    assert (np.array([True, False]) & tw.tensor([True, True])).tolist() == [True, False]
    before = x
    x += 1.0
    assert before.tolist() == [1, 2]
    assert "relu" in dir(x)
    assert x.view(2, 1).shape == (2, 1)
    assert x.fill_(4).tolist() == [4, 4]
    with pytest.raises(ShapeError, match="cannot be iterated"):
        iter(tw.tensor(1.0))
    with pytest.raises(ArgumentError, match="do not fit int8"):
        tw.tensor([300], dtype="int8")
    assert tw.tensor([1e300]).tolist() == [float("inf")]


def test_read_only_memory_is_not_written():
    a = np.zeros(3, np.float32)
    a.flags.writeable = False
    t = tw.from_numpy(a)
    for write in (lambda: t.copy_([1, 2, 3]), lambda: t.numpy(writable=True), lambda: t.fill_(1)):
        with pytest.raises(ArgumentError, match="read-only"):
            write()
    assert not a.any()


def test_deep_copies_keep_gradients_and_work_on_every_device():
    x = tw.ones(2, requires_grad=True)
    (x * 3.0).sum().backward()
    made = copy.deepcopy(x)
    assert made.grad.tolist() == [3, 3]
    assert made.grad.buffer is not x.grad.buffer
    assert copy.deepcopy(tw.zeros(2, device="null")).device.name == "null"
