"""oneDNN's bindings against NumPy in float64: values, layouts, threads, fork, denormals, messages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn.capi import MemoryDesc

needs_onednn = pytest.mark.skipif(capi.available() is not None, reason=str(capi.available()))
pytestmark = [pytest.mark.onednn, needs_onednn]

RTOL = 2e-5  # of the largest magnitude: float32 sums of some hundred terms


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def close(got: np.ndarray, want: np.ndarray, rtol: float = RTOL) -> None:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= rtol * max(np.abs(want).max(), 1e-30)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def nhwc(array: np.ndarray) -> np.ndarray:
    """The same logical NCHW array, lying channels-last in memory."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def desc(array: np.ndarray) -> MemoryDesc:
    return MemoryDesc(array.shape, "f32", tuple(step // array.itemsize for step in array.strides))


def anything(*shape: int) -> MemoryDesc:
    return MemoryDesc(shape, "f32", "any")


def poisoned(md: MemoryDesc) -> np.ndarray:
    """A buffer for ``md`` in which every float is NaN until it is written."""
    return np.full(md.nbytes // 4, np.nan, np.float32)


def execute(pd: capi.PrimitiveDesc, *arguments: tuple[int, MemoryDesc, np.ndarray]) -> None:
    bound = runtime.bind(pd, [(arg, md) for arg, md, _ in arguments])
    bound.run(*(array.ctypes.data for _, _, array in arguments))


def reorder(source: np.ndarray, source_md: MemoryDesc, target_md: MemoryDesc) -> np.ndarray:
    out = poisoned(target_md)
    pd = capi.reorder(source_md, target_md)
    execute(pd, (capi.ARG_SRC, source_md, source), (capi.ARG_DST, target_md, out))
    return out


def unpack(packed: np.ndarray, md: MemoryDesc) -> np.ndarray:
    plain = MemoryDesc(md.dims, "f32")
    return reorder(packed, md, plain).reshape(md.dims)


def conv_reference(x, w, stride=1, padding=0, dilation=1, groups=1):
    """Convolution in float64, one kernel tap at a time."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    n, _, h, wd = x.shape
    o, ig, kh, kw = w.shape
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    oh = (h + 2 * padding - dilation * (kh - 1) - 1) // stride + 1
    ow = (wd + 2 * padding - dilation * (kw - 1) - 1) // stride + 1
    y = np.zeros((n, groups, o // groups, oh, ow))
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dilation, i * dilation + stride * (oh - 1) + 1, stride)
            cols = slice(j * dilation, j * dilation + stride * (ow - 1) + 1, stride)
            tap = x[:, :, rows, cols].reshape(n, groups, ig, oh, ow)
            y += np.einsum("ngihw,goi->ngohw", tap, w[:, :, i, j].reshape(groups, o // groups, ig))
    return y.reshape(n, o, oh, ow)


def conv_gradients(x, w, dy, stride=1, padding=0, dilation=1, groups=1):
    """Input and weight gradients in float64, by scattering and gathering each tap."""
    x, w, dy = x.astype(np.float64), w.astype(np.float64), dy.astype(np.float64)
    n, c, h, wd = x.shape
    o, ig, kh, kw = w.shape
    oh, ow = dy.shape[2:]
    xp = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    dxp, dw = np.zeros_like(xp), np.zeros_like(w)
    dyg = dy.reshape(n, groups, o // groups, oh, ow)
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dilation, i * dilation + stride * (oh - 1) + 1, stride)
            cols = slice(j * dilation, j * dilation + stride * (ow - 1) + 1, stride)
            tap = xp[:, :, rows, cols].reshape(n, groups, ig, oh, ow)
            dw[:, :, i, j] = np.einsum("ngohw,ngihw->goi", dyg, tap).reshape(o, ig)
            wg = w[:, :, i, j].reshape(groups, o // groups, ig)
            dxp[:, :, rows, cols] += np.einsum("ngohw,goi->ngihw", dyg, wg).reshape(n, c, oh, ow)
    return dxp[:, :, padding : padding + h, padding : padding + wd], dw


def conv_call(x_shape, w_shape, y_shape, stride, padding, dilation, groups):
    """What the three convolution descriptors share: oneDNN's weight shape, and the window."""
    o, ig, kh, kw = w_shape
    weights = (groups, o // groups, ig, kh, kw) if groups > 1 else w_shape
    effective = [dilation * (k - 1) + 1 for k in (kh, kw)]
    right = [(out - 1) * stride + k - size - padding for out, k, size in zip(y_shape[2:], effective, x_shape[2:], strict=True)]
    return weights, ((stride, stride), (dilation, dilation), (padding, padding), tuple(right))


def conv_forward(x, w, stride=1, padding=0, dilation=1, groups=1):
    """Forward descriptor, weights as it wants them, and the output array (NHWC)."""
    shape = conv_reference(x, w, stride, padding, dilation, groups).shape
    y = nhwc(np.full(shape, np.nan, np.float32))
    weights, window = conv_call(x.shape, w.shape, shape, stride, padding, dilation, groups)
    pd = capi.convolution_forward(capi.FORWARD_TRAINING, capi.CONVOLUTION["direct"], desc(x), anything(*weights), None, desc(y), *window)
    return pd, y, weights, window


# ------------------------------------------------------------------------------------ layouts and descriptors


def test_descriptor_tells_its_layout():
    md = MemoryDesc((2, 3, 4, 5), "f32", "acdb")
    assert md.dims == (2, 3, 4, 5)
    assert md.strides == (60, 1, 15, 3)
    assert md.tag == "acdb"
    assert md.nbytes == 480
    assert md.dtype == capi.F32
    assert md.format_kind == capi.FORMAT_BLOCKED
    assert md.inner_blocks == ()
    assert md == MemoryDesc((2, 3, 4, 5), "f32", (60, 1, 15, 3))
    assert hash(md) == hash(md.clone())
    assert md != MemoryDesc((2, 3, 4, 5), "f32")
    assert md != MemoryDesc((2, 3, 4, 5), "s32", "acdb")


def test_blocked_descriptor_counts_its_padding():
    md = MemoryDesc((2, 20, 4, 5), "f32", "aBcd16b")
    assert md.inner_blocks == ((1, 16),)
    assert md.padded_dims == (2, 32, 4, 5)
    assert md.nbytes == 2 * 32 * 4 * 5 * 4
    assert md.tag == "aBcd16b"
    assert anything(2, 3).tag == "any"


@pytest.mark.parametrize("tag", [tag for tag in capi.TAGS if tag != "any"])
def test_every_tag_is_what_its_letters_say(tag):
    axes = [letter for letter in tag if letter.isalpha()]
    ndims = len({letter.lower() for letter in axes})
    md = MemoryDesc([3 + 2 * axis for axis in range(ndims)], "f32", tag)
    assert md.tag == tag


def test_bad_descriptors_say_what_was_given():
    with pytest.raises(capi.OneDNNError, match=r"unknown tag 'acxb'"):
        MemoryDesc((1, 2, 3, 4), "f32", "acxb")
    with pytest.raises(capi.OneDNNError, match=r"data type 'f31' is none of"):
        MemoryDesc((1, 2), "f31")
    with pytest.raises(capi.OneDNNError, match=r"2 strides for 3 axes"):
        MemoryDesc((1, 2, 3), "f32", (2, 1))
    with pytest.raises(capi.OneDNNError, match=r"dims=\(-1, 2\).*invalid arguments"):
        MemoryDesc((-1, 2), "f32")
    with pytest.raises(capi.OneDNNError, match=r"does not fit in 64 bits"):
        MemoryDesc((2**64, 2), "f32")
    with pytest.raises(capi.OneDNNError, match=r"at most 12 axes"):
        MemoryDesc((1,) * 13, "f32")


def test_bad_primitives_name_call_and_arguments():
    with pytest.raises(capi.OneDNNError, match=r"oneDNN matmul\(src=f32:2x3:ab, weights=f32:4x5:ab.*invalid"):
        capi.matmul(MemoryDesc((2, 3)), MemoryDesc((4, 5)), None, MemoryDesc((2, 5)))
    with pytest.raises(capi.OneDNNError, match=r"weights is a str"):
        capi.matmul(MemoryDesc((2, 3)), "w", None, MemoryDesc((2, 5)))  # type: ignore[arg-type]
    x, w, y = MemoryDesc((1, 1, 9, 9)), MemoryDesc((1, 1, 3, 3)), MemoryDesc((1, 1, 9, 9))
    with pytest.raises(capi.Unimplemented, match=r"dilation=\(2147483648, 0\) passes 32 bits"):
        capi.convolution_forward(capi.FORWARD_INFERENCE, 1, x, w, None, y, (1, 1), (2**31 + 1, 1), (2**31, 1), (2**31, 1))
    one = MemoryDesc((4,))
    run = runtime.bind(
        capi.eltwise_forward(capi.FORWARD_INFERENCE, capi.ELTWISE["relu"], one, one),
        [(capi.ARG_SRC, one), (capi.ARG_DST, one)],
    ).run
    with pytest.raises(capi.OneDNNError, match=r"1 addresses for 2 arguments"):
        run(64)


def test_absent_functions_are_unimplemented():
    if capi.load().has("group_normalization_forward_primitive_desc_create"):
        pytest.skip("this build has group normalization, 3.2 does not")
    x = MemoryDesc((1, 4, 3, 3))
    with pytest.raises(capi.Unimplemented, match=r"group_normalization_forward: version 3\.\d+\.\d+ at"):
        capi.group_normalization_forward(capi.FORWARD_INFERENCE, x, x, 2, 1e-5, 0)


def test_implementations_can_be_stepped_through(rng):
    pd, *_ = conv_forward(nhwc(floats(rng, 1, 16, 8, 8)), floats(rng, 16, 16, 3, 3), padding=1)
    names = [pd.impl]
    while pd.next_impl():
        names.append(pd.impl)
    assert len(set(names)) > 1
    assert any("ref" in name for name in names)


# -------------------------------------------------------------------------------------------------- values

WINDOWS = [
    # n, c, h, w, o, k, stride, padding, dilation, groups
    (2, 16, 9, 11, 24, 3, 1, 1, 1, 1),
    (2, 3, 15, 15, 8, 5, 2, 2, 1, 1),
    (1, 32, 7, 7, 32, 3, 1, 1, 1, 32),
    (2, 24, 8, 8, 24, 3, 2, 1, 1, 24),
    (1, 12, 10, 10, 8, 3, 1, 2, 2, 4),
    (3, 17, 5, 5, 19, 1, 1, 0, 1, 1),
]


@pytest.mark.parametrize("case", WINDOWS)
def test_convolution_and_both_gradients(rng, case):
    n, c, h, w_, o, k, stride, padding, dilation, groups = case
    x, w = nhwc(floats(rng, n, c, h, w_)), floats(rng, o, c // groups, k, k)
    attributes = (stride, padding, dilation, groups)
    pd, y, weights, window = conv_forward(x, w, *attributes)
    wmd = pd.weights_md()
    packed = reorder(w, MemoryDesc(weights), wmd)
    execute(pd, (capi.ARG_SRC, desc(x), x), (capi.ARG_WEIGHTS, wmd, packed), (capi.ARG_DST, desc(y), y))
    close(y, conv_reference(x, w, *attributes))

    dy = nhwc(floats(rng, *y.shape))
    want_dx, want_dw = conv_gradients(x, w, dy, *attributes)
    dx = nhwc(np.full_like(x, np.nan))
    back = capi.convolution_backward_data(1, desc(dx), anything(*weights), desc(dy), *window, pd)
    packed = reorder(w, MemoryDesc(weights), back.weights_md())
    execute(
        back,
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_WEIGHTS, back.weights_md(), packed),
        (capi.ARG_DIFF_SRC, desc(dx), dx),
    )
    close(dx, want_dx)

    bias = MemoryDesc((o,))
    back = capi.convolution_backward_weights(1, desc(x), anything(*weights), bias, desc(dy), *window, pd)
    dwmd = back.diff_weights_md()
    dw, db = poisoned(dwmd), poisoned(bias)
    execute(
        back,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_DIFF_WEIGHTS, dwmd, dw),
        (capi.ARG_DIFF_BIAS, bias, db),
    )
    close(unpack(dw, dwmd).reshape(w.shape), want_dw)
    close(db, dy.astype(np.float64).sum((0, 2, 3)))


def test_convolution_fuses_residual_and_relu(rng):
    x, w = nhwc(floats(rng, 2, 32, 8, 8)), floats(rng, 48, 32, 3, 3)
    residual, bias = nhwc(floats(rng, 2, 48, 8, 8)), floats(rng, 48)
    y = nhwc(np.full(residual.shape, np.nan, np.float32))
    attr = capi.Attr().append_binary(capi.BINARY["add"], desc(residual)).append_eltwise(capi.ELTWISE["relu"])
    pd = capi.convolution_forward(
        capi.FORWARD_INFERENCE,
        1,
        desc(x),
        anything(*w.shape),
        desc(bias),
        desc(y),
        (1, 1),
        (1, 1),
        (1, 1),
        (1, 1),
        attr,
    )
    assert "ref" not in pd.impl
    execute(
        pd,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_WEIGHTS, pd.weights_md(), reorder(w, desc(w), pd.weights_md())),
        (capi.ARG_BIAS, desc(bias), bias),
        (capi.arg_post_op(0), desc(residual), residual),
        (capi.ARG_DST, desc(y), y),
    )
    want = conv_reference(x, w, padding=1) + bias[:, None, None].astype(np.float64) + residual
    close(y, np.maximum(want, 0))


def test_sum_post_op_accumulates(rng):
    a, b, c = floats(rng, 5, 7), floats(rng, 7, 4), floats(rng, 5, 4)
    want = a.astype(np.float64) @ b + 0.5 * c
    pd = capi.matmul(desc(a), desc(b), None, desc(c), capi.Attr().append_sum(0.5))
    execute(pd, (capi.ARG_SRC, desc(a), a), (capi.ARG_WEIGHTS, desc(b), b), (capi.ARG_DST, desc(c), c))
    close(c, want)


def test_deconvolution_is_the_input_gradient_of_convolution(rng):
    x, w = nhwc(floats(rng, 2, 6, 5, 5)), floats(rng, 6, 8, 3, 3)  # w: (in, out, kh, kw)
    y = nhwc(np.full((2, 8, 9, 9), np.nan, np.float32))
    wt = np.ascontiguousarray(w.transpose(1, 0, 2, 3))
    pd = capi.deconvolution_forward(
        capi.FORWARD_TRAINING,
        capi.DECONVOLUTION["direct"],
        desc(x),
        anything(*wt.shape),
        None,
        desc(y),
        (2, 2),
        (1, 1),
        (1, 1),
        (1, 1),
    )
    execute(
        pd,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_WEIGHTS, pd.weights_md(), reorder(wt, desc(wt), pd.weights_md())),
        (capi.ARG_DST, desc(y), y),
    )
    want, _ = conv_gradients(np.zeros(y.shape, np.float32), w, x, stride=2, padding=1)
    close(y, want)


def test_matmul_and_inner_product(rng):
    a, b, bias = floats(rng, 33, 20), floats(rng, 20, 17), floats(rng, 1, 17)
    y = np.full((33, 17), np.nan, np.float32)
    want = a.astype(np.float64) @ b + bias
    pd = capi.matmul(desc(a), desc(b), desc(bias), desc(y))
    execute(
        pd,
        (capi.ARG_SRC, desc(a), a),
        (capi.ARG_WEIGHTS, desc(b), b),
        (capi.ARG_BIAS, desc(bias), bias),
        (capi.ARG_DST, desc(y), y),
    )
    close(y, want)
    # the same as a layer, whose weights are (out, in), and its gradients
    w, y2 = np.ascontiguousarray(b.T), np.full_like(y, np.nan)
    pd = capi.inner_product_forward(capi.FORWARD_TRAINING, desc(a), desc(w), MemoryDesc((17,)), desc(y2))
    execute(
        pd,
        (capi.ARG_SRC, desc(a), a),
        (capi.ARG_WEIGHTS, desc(w), w),
        (capi.ARG_BIAS, MemoryDesc((17,)), bias),
        (capi.ARG_DST, desc(y2), y2),
    )
    close(y2, want)
    dy, da, dw = floats(rng, 33, 17), np.full_like(a, np.nan), np.full_like(w, np.nan)
    back = capi.inner_product_backward_data(desc(da), desc(w), desc(dy), pd)
    execute(
        back,
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_WEIGHTS, desc(w), w),
        (capi.ARG_DIFF_SRC, desc(da), da),
    )
    close(da, dy.astype(np.float64) @ w)
    back = capi.inner_product_backward_weights(desc(a), desc(dw), None, desc(dy), pd)
    execute(
        back,
        (capi.ARG_SRC, desc(a), a),
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_DIFF_WEIGHTS, desc(dw), dw),
    )
    close(dw, dy.astype(np.float64).T @ a)


def test_batch_normalization_trains_with_fused_relu(rng):
    x = nhwc(floats(rng, 4, 20, 6, 6) * 3 + 100)
    scale, shift, dy = floats(rng, 20), floats(rng, 20), nhwc(floats(rng, 4, 20, 6, 6))
    y, dx = nhwc(np.full_like(x, np.nan)), nhwc(np.full_like(x, np.nan))
    mean, variance, dscale, dshift = (np.full(20, np.nan, np.float32) for _ in range(4))
    flags = capi.USE_SCALE | capi.USE_SHIFT | capi.FUSE_NORM_RELU
    pd = capi.batch_normalization_forward(capi.FORWARD_TRAINING, desc(x), desc(y), 1e-5, flags)
    workspace_md = pd.workspace_md
    assert workspace_md is not None
    workspace = np.full(workspace_md.nbytes, 255, np.uint8)
    vector = MemoryDesc((20,))
    execute(
        pd,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_DST, desc(y), y),
        (capi.ARG_MEAN, vector, mean),
        (capi.ARG_VARIANCE, vector, variance),
        (capi.ARG_SCALE, vector, scale),
        (capi.ARG_SHIFT, vector, shift),
        (capi.ARG_WORKSPACE, workspace_md, workspace),
    )
    x64, axes = x.astype(np.float64), (0, 2, 3)
    mu, var = x64.mean(axes), x64.var(axes)
    std = np.sqrt(var + 1e-5)[:, None, None]
    hat = (x64 - mu[:, None, None]) / std
    pre = hat * scale[:, None, None] + shift[:, None, None]
    close(mean, mu)
    close(variance, var, 1e-4)
    close(y, np.maximum(pre, 0), 1e-4)

    back = capi.batch_normalization_backward(capi.BACKWARD, desc(dx), desc(dy), desc(x), 1e-5, flags, pd)
    execute(
        back,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_MEAN, vector, mean),
        (capi.ARG_VARIANCE, vector, variance),
        (capi.ARG_SCALE, vector, scale),
        (capi.ARG_WORKSPACE, workspace_md, workspace),
        (capi.ARG_DIFF_SRC, desc(dx), dx),
        (capi.ARG_DIFF_SCALE, vector, dscale),
        (capi.ARG_DIFF_SHIFT, vector, dshift),
    )
    g = np.where(y > 0, dy.astype(np.float64), 0)
    close(dshift, g.sum(axes))
    close(dscale, (g * hat).sum(axes), 1e-4)
    centred = g - g.mean(axes)[:, None, None] - hat * (g * hat).mean(axes)[:, None, None]
    close(dx, scale[:, None, None] / std * centred, 1e-4)


def test_layer_normalization(rng):
    x, scale, shift = floats(rng, 6, 40), floats(rng, 40), floats(rng, 40)
    y = np.full_like(x, np.nan)
    mean, variance = np.full(6, np.nan, np.float32), np.full(6, np.nan, np.float32)
    pd = capi.layer_normalization_forward(capi.FORWARD_TRAINING, desc(x), desc(y), None, 1e-5, capi.USE_SCALE | capi.USE_SHIFT)
    execute(
        pd,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_DST, desc(y), y),
        (capi.ARG_MEAN, MemoryDesc((6,)), mean),
        (capi.ARG_VARIANCE, MemoryDesc((6,)), variance),
        (capi.ARG_SCALE, MemoryDesc((40,)), scale),
        (capi.ARG_SHIFT, MemoryDesc((40,)), shift),
    )
    x64 = x.astype(np.float64)
    hat = (x64 - x64.mean(1, keepdims=True)) / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    close(y, hat * scale + shift)


def test_max_pooling_with_workspace(rng):
    x = nhwc(floats(rng, 2, 10, 9, 9))
    y, dy = nhwc(np.full((2, 10, 5, 5), np.nan, np.float32)), nhwc(floats(rng, 2, 10, 5, 5))
    dx = nhwc(np.full_like(x, np.nan))
    window = ((2, 2), (3, 3), (1, 1), (1, 1), (1, 1))
    pd = capi.pooling_forward(capi.FORWARD_TRAINING, capi.POOLING["max"], desc(x), desc(y), *window)
    workspace_md = pd.workspace_md
    assert workspace_md is not None
    workspace = np.full(workspace_md.nbytes, 255, np.uint8)
    execute(
        pd,
        (capi.ARG_SRC, desc(x), x),
        (capi.ARG_DST, desc(y), y),
        (capi.ARG_WORKSPACE, workspace_md, workspace),
    )
    want, want_dx = np.zeros(y.shape), np.zeros((2, 10, 11, 11))
    xp = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    for n, c, i, j in np.ndindex(*y.shape):
        patch = xp[n, c, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
        di, dj = np.unravel_index(patch.argmax(), patch.shape)
        want[n, c, i, j] = patch[di, dj]
        want_dx[n, c, 2 * i + di, 2 * j + dj] += dy[n, c, i, j]
    assert np.array_equal(y, want)
    back = capi.pooling_backward(capi.POOLING["max"], desc(dx), desc(dy), *window, pd)
    execute(
        back,
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_WORKSPACE, workspace_md, workspace),
        (capi.ARG_DIFF_SRC, desc(dx), dx),
    )
    close(dx, want_dx[:, :, 1:-1, 1:-1])


@pytest.mark.parametrize("padding", ["include", "exclude"])
def test_average_pooling(padding):
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    y = np.full((1, 1, 2, 2), np.nan, np.float32)
    alg = capi.POOLING[f"avg_{padding}_padding"]
    window = ((2, 2), (3, 3), (1, 1), (1, 1), (0, 0))
    pd = capi.pooling_forward(capi.FORWARD_INFERENCE, alg, desc(x), desc(y), *window)
    execute(pd, (capi.ARG_SRC, desc(x), x), (capi.ARG_DST, desc(y), y))
    corner = np.array([[1 + 2 + 5 + 6, 2 + 3 + 4 + 6 + 7 + 8], [5 + 6 + 9 + 10 + 13 + 14, 99]])
    close(y[0, 0], corner / (9 if padding == "include" else np.array([[4, 6], [6, 9]])))


def test_softmax_and_log_softmax(rng):
    x = floats(rng, 5, 11) * 10
    y = np.full_like(x, np.nan)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    for name, expected in (("accurate", want), ("log", np.log(want))):
        alg = capi.SOFTMAX[name]
        pd = capi.softmax_forward(capi.FORWARD_TRAINING, alg, desc(x), desc(y), 1)
        execute(pd, (capi.ARG_SRC, desc(x), x), (capi.ARG_DST, desc(y), y))
        close(y, expected)
        dy, dx = floats(rng, 5, 11), np.full_like(x, np.nan)
        back = capi.softmax_backward(alg, desc(dx), desc(dy), desc(y), 1, pd)
        execute(
            back,
            (capi.ARG_DST, desc(y), y),
            (capi.ARG_DIFF_DST, desc(dy), dy),
            (capi.ARG_DIFF_SRC, desc(dx), dx),
        )
        g = dy.astype(np.float64)
        if name == "log":
            close(dx, g - want * g.sum(1, keepdims=True), 1e-4)
        else:
            close(dx, want * (g - (g * want).sum(1, keepdims=True)), 1e-4)


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "function"),
    [
        ("relu", 0, 0, lambda x: np.maximum(x, 0)),
        ("relu", 0.1, 0, lambda x: np.where(x > 0, x, 0.1 * x)),
        ("tanh", 0, 0, np.tanh),
        ("elu", 1, 0, lambda x: np.where(x > 0, x, np.expm1(x))),
        ("square", 0, 0, np.square),
        ("abs", 0, 0, np.abs),
        ("linear", 2, 3, lambda x: 2 * x + 3),
        ("soft_relu", 1, 0, lambda x: np.log1p(np.exp(x))),
        ("hardsigmoid", 1 / 6, 0.5, lambda x: np.clip(x / 6 + 0.5, 0, 1)),
        ("logistic", 0, 0, lambda x: 1 / (1 + np.exp(-x))),
        ("exp", 0, 0, np.exp),
        ("swish", 1, 0, lambda x: x / (1 + np.exp(-x))),
        ("clip", 0, 6, lambda x: np.clip(x, 0, 6)),
        ("clip_v2", 0, 6, lambda x: np.clip(x, 0, 6)),
        ("round", 0, 0, np.round),
        ("mish", 0, 0, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
        ("hardswish", 1 / 6, 0.5, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
        ("pow", 2, 2, lambda x: 2 * x**2),
        ("gelu_tanh", 0, 0, lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_eltwise_forward(rng, name, alpha, beta, function):
    x = floats(rng, 3, 50) * 4
    y = np.full_like(x, np.nan)
    pd = capi.eltwise_forward(capi.FORWARD_TRAINING, capi.ELTWISE[name], desc(x), desc(y), alpha, beta)
    execute(pd, (capi.ARG_SRC, desc(x), x), (capi.ARG_DST, desc(y), y))
    close(y, function(x.astype(np.float64)), 1e-4)


@pytest.mark.parametrize("name", ["tanh", "tanh_use_dst"])
def test_eltwise_backward(rng, name):
    x, dy = floats(rng, 3, 50), floats(rng, 3, 50)
    dx, data = np.full_like(x, np.nan), np.tanh(x) if name.endswith("dst") else x
    alg = capi.ELTWISE[name]
    pd = capi.eltwise_forward(capi.FORWARD_TRAINING, alg, desc(x), desc(x))
    back = capi.eltwise_backward(alg, desc(dx), desc(dy), desc(x), pd)
    execute(
        back,
        (capi.ARG_DST if name.endswith("dst") else capi.ARG_SRC, desc(x), data),
        (capi.ARG_DIFF_DST, desc(dy), dy),
        (capi.ARG_DIFF_SRC, desc(dx), dx),
    )
    close(dx, dy * (1 - np.tanh(x.astype(np.float64)) ** 2), 1e-4)


def test_binary_reduction_resampling_prelu_sum_concat(rng):
    a, b = floats(rng, 2, 3, 4, 4), floats(rng, 1, 3, 1, 1)
    functions = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    functions |= {"sub": np.subtract, "div": np.divide, "ge": np.greater_equal, "lt": np.less}
    for name, function in functions.items():
        y = np.full_like(a, np.nan)
        pd = capi.binary(capi.BINARY[name], desc(a), desc(b), desc(y))
        execute(pd, (capi.ARG_SRC_0, desc(a), a), (capi.ARG_SRC_1, desc(b), b), (capi.ARG_DST, desc(y), y))
        close(y, function(a.astype(np.float64), b))
    reductions = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "mul": np.prod}
    for name, function in reductions.items():
        y = np.full((2, 3, 1, 1), np.nan, np.float32)
        pd = capi.reduction(capi.REDUCTION[name], desc(a), desc(y))
        execute(pd, (capi.ARG_SRC, desc(a), a), (capi.ARG_DST, desc(y), y))
        close(y, function(a.astype(np.float64), axis=(2, 3), keepdims=True))
    y = np.full((2, 3, 8, 8), np.nan, np.float32)
    pd = capi.resampling_forward(capi.FORWARD_INFERENCE, capi.RESAMPLING["nearest"], desc(a), desc(y))
    execute(pd, (capi.ARG_SRC, desc(a), a), (capi.ARG_DST, desc(y), y))
    close(y, a.repeat(2, 2).repeat(2, 3).astype(np.float64))
    y = np.full_like(a, np.nan)
    pd = capi.prelu_forward(capi.FORWARD_INFERENCE, desc(a), desc(b), desc(y))
    execute(pd, (capi.ARG_SRC, desc(a), a), (capi.ARG_WEIGHTS, desc(b), b), (capi.ARG_DST, desc(y), y))
    close(y, np.where(a > 0, a, a.astype(np.float64) * b))
    many = capi.ARG_MULTIPLE_SRC
    pd = capi.sum_(desc(y), [2.0, -1.0], [desc(a), desc(a)])
    execute(pd, (many, desc(a), a), (many + 1, desc(a), a), (capi.ARG_DST, desc(y), y))
    close(y, a.astype(np.float64))
    y = np.full((2, 6, 4, 4), np.nan, np.float32)
    pd = capi.concat(desc(y), 1, [desc(a), desc(a)])
    execute(pd, (many, desc(a), a), (many + 1, desc(a), a), (capi.ARG_DST, desc(y), y))
    close(y, np.concatenate([a, a], 1).astype(np.float64))


def test_reorder_there_and_back(rng):
    w = floats(rng, 20, 18, 3, 3)
    blocked = MemoryDesc(w.shape, "f32", "ABcd16b16a")
    assert np.array_equal(unpack(reorder(w, desc(w), blocked), blocked), w)


# ---------------------------------------------------------------------------------------------------- runtime


def _relu_exec(size: int) -> runtime.Exec:
    md = MemoryDesc((size,))
    pd = capi.eltwise_forward(capi.FORWARD_INFERENCE, capi.ELTWISE["relu"], md, md)
    return runtime.bind(pd, [(capi.ARG_SRC, md), (capi.ARG_DST, md)])


def test_eight_threads_share_one_execution(rng):
    x_shape, w = (2, 16, 12, 12), floats(rng, 16, 16, 3, 3)
    x = nhwc(floats(rng, *x_shape))
    pd, y, *_ = conv_forward(x, w, padding=1)
    packed = reorder(w, desc(w), pd.weights_md())
    bound = runtime.bind(pd, [(capi.ARG_SRC, desc(x)), (capi.ARG_WEIGHTS, pd.weights_md()), (capi.ARG_DST, desc(y))])
    failures: list[str] = []

    def work(seed: int) -> None:
        local = np.random.default_rng(seed)
        for _ in range(25):
            mine, out = nhwc(floats(local, *x_shape)), nhwc(np.full_like(y, np.nan))
            want = conv_reference(mine, w, padding=1)
            bound.run(mine.ctypes.data, packed.ctypes.data, out.ctypes.data)
            if not np.abs(out - want).max() <= RTOL * np.abs(want).max():
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 1 <= len(bound._free) <= 8  # argument sets are reused, not made per call


def test_fixed_addresses_follow_the_buffers(rng):
    x, y = floats(rng, 100), np.zeros(100, np.float32)
    again = _relu_exec(100).fixed(x.ctypes.data, y.ctypes.data)
    for _ in range(3):
        x[:] = floats(rng, 100)
        again()
        assert np.array_equal(y, np.maximum(x, 0))


def test_thread_count_reaches_new_primitives_in_every_thread():
    before = runtime.get_num_threads()
    try:
        runtime.set_num_threads(3)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(_relu_exec(8).threads))
        thread.start()
        thread.join()
        assert seen == [3]
        old = _relu_exec(8)
        runtime.set_num_threads(1)
        assert (old.threads, _relu_exec(8).threads) == (3, 1)
        x = np.array([-1, 2] * 4, np.float32)
        for bound in (old, _relu_exec(8), old):  # each runs with the count that it was planned for
            y = np.zeros_like(x)
            bound.run(x.ctypes.data, y.ctypes.data)
            assert np.array_equal(y, np.maximum(x, 0))
            assert runtime.enter().threads == bound.threads
    finally:
        runtime.set_num_threads(before)
    with pytest.raises(ValueError, match="at least 1"):
        runtime.set_num_threads(0)


def test_cache_is_bounded_and_least_recently_used_leaves():
    cache, made = runtime.PrimitiveCache(2), []

    def get(key):
        return cache.get(key, lambda: made.append(key) or key)

    for key in ("a", "b", "a", "c", "a", "b"):
        assert get(key) == key
    assert made == ["a", "b", "c", "b"]
    assert len(cache) == 2


def run_python(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter, which must end well within a minute."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MATMUL = """
import os, signal, threading
import numpy as np
from tilewright.devices.cpu.onednn import capi, runtime
md = capi.MemoryDesc((256, 256))
def matmul():
    bound = runtime.bind(capi.matmul(md, md, None, md), [(1, md), (33, md), (17, md)])
    a, y = np.ones((256, 256), np.float32), np.zeros((256, 256), np.float32)
    bound.run(a.ctypes.data, a.ctypes.data, y.ctypes.data)
    return bound, bool((y == 256).all())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_with_all_threads():
    out = run_python(
        MATMUL
        + """
runtime.set_num_threads(2)
old, right = matmul()
other = threading.Thread(target=matmul)
other.start(); other.join()
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    _, fresh = matmul()
    a, y = np.ones((256, 256), np.float32), np.zeros((256, 256), np.float32)
    old.run(a.ctypes.data, a.ctypes.data, y.ctypes.data)
    os.write(write, f"{fresh} {bool((y == 256).all())} {runtime.get_num_threads()}".encode())
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(right, status, os.read(read, 99).decode(), matmul()[1])
"""
    )
    assert out == "True 0 True True 2 True"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_an_old_openmp_computes_with_one_thread():
    out = run_python(
        MATMUL
        + """
runtime.set_num_threads(2)
old, _ = matmul()
cache = runtime.PrimitiveCache()
cache.get("matmul", lambda: old)
find = runtime._openmp
runtime._openmp = lambda lib, name, *types, **more: (
    None if name == "omp_pause_resource_all" else find(lib, name, *types, **more))
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    bound, right = matmul()
    try:
        old.run(0, 0, 0)
    except capi.OneDNNError as error:
        said = "planned for 2 threads before a fork" in str(error)
    fresh = cache.get("matmul", lambda: bound) is bound
    os.write(write, f"{right} {bound.threads} {said} {fresh}".encode())
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(status, os.read(read, 99).decode(), matmul()[1], runtime.get_num_threads())
"""
    )
    assert out == "0 True 1 True True True 2"


def test_denormals_are_flushed_here_and_in_the_workers_and_can_be_kept():
    if runtime.flush_reason() is not None:
        pytest.skip(str(runtime.flush_reason()))
    out = run_python(
        """
        import numpy as np
        from tilewright.devices.cpu.onednn import capi, runtime
        runtime.set_num_threads(4)
        n = 1 << 16
        md = capi.MemoryDesc((4, n))
        tiny = np.full((4, n), 1e-30, np.float32)
        run = runtime.bind(capi.binary(capi.BINARY["mul"], md, md, md), [(1, md), (2, md), (17, md)]).run
        def rows():
            y = np.full((4, n), np.nan, np.float32)
            factor = np.full((4, n), 1e-10, np.float32)  # products of 1e-40 are denormal
            run(tiny.ctypes.data, factor.ctypes.data, y.ctypes.data)
            return int((y != 0).any(1).sum())
        def here():
            return float(np.float32(1e-30) * np.full(1, 1e-10, np.float32)[0]) != 0
        print(rows(), here(), runtime.denormals_flushed())
        runtime.flush_denormals(False)
        print(rows(), here(), runtime.denormals_flushed())
        runtime.flush_denormals(True)
        print(rows(), here(), runtime.denormals_flushed())
        for dtype in (np.float16, np.float32, np.float64, np.longdouble):
            smallest = np.finfo(dtype).smallest_subnormal  # compares as zero now, but must not be it
            assert any(smallest.tobytes()), dtype
        """
    )
    assert out.splitlines() == ["0 False True", "4 True False", "0 False True"]


# -------------------------------------------------------------------------------------------------- loading


def reason(**environment: str) -> str:
    return run_python("from tilewright.devices.cpu.onednn import capi; print(capi.available())", **environment)


def test_the_reason_for_absence_is_a_sentence(tmp_path):
    assert reason(TILEWRIGHT_ONEDNN="off") == "oneDNN is switched off by TILEWRIGHT_ONEDNN=off."
    missing = str(tmp_path / "libdnnl.so")
    said = reason(TILEWRIGHT_ONEDNN=missing)
    assert f"{missing}, which does not exist" in said
    assert "pip install onednn-cpu-gomp" in said
    (tmp_path / "libdnnl.so").write_bytes(b"not a library")
    assert "cannot be opened" in reason(TILEWRIGHT_ONEDNN=missing)
    other = __import__("_ctypes").__file__
    assert "is no oneDNN library" in reason(TILEWRIGHT_ONEDNN=other)
    assert reason(TILEWRIGHT_ONEDNN=capi.load().path) == "None"


def test_importing_the_bindings_opens_nothing():
    out = run_python(
        "from tilewright.devices.cpu.onednn import runtime, capi; print(capi._lib, any('dnnl' in line for line in open('/proc/self/maps')))"
    )
    assert out == "None False"
