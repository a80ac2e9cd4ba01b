"""The rivals of oneDNN's own choice for convolutions: every kernel and config, on shapes at the edges of what they take."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.contract import _contract
from tilewright import devices
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Problem, registered
from tilewright.devices.cpu.numpy import _blocks
from tilewright.devices.cpu.numpy import conv2d as in_numpy
from tilewright.devices.cpu.onednn import capi, conv2d_im2col, runtime
from tilewright.ops._op import Arg, Sample
from tilewright.ops.conv2d import CONV2D, INPUT_GRAD, WEIGHT_GRAD, Conv2dAttrs, InputGradAttrs, WeightGradAttrs, out_size

CPU = devices.get("cpu")
KERNELS = sorted((k for op in (CONV2D, INPUT_GRAD, WEIGHT_GRAD) for k in registered("cpu", op.name)), key=lambda k: k.id)
OPS = {op.name: op for op in (CONV2D, INPUT_GRAD, WEIGHT_GRAD)}
onednn = pytest.mark.skipif(capi.available() is not None, reason=str(capi.available()))

# input, weight, attributes
SHAPES = {
    "1x1, odd channels": ((3, 17, 5, 7), (19, 17, 1, 1), Conv2dAttrs()),
    "1x1, one channel out": ((2, 33, 4, 3), (1, 33, 1, 1), Conv2dAttrs()),
    "1x1, one place": ((5, 24, 1, 1), (10, 24, 1, 1), Conv2dAttrs()),
    "1x1, dilation without meaning": ((2, 8, 4, 4), (8, 8, 1, 1), Conv2dAttrs(dilation=(3, 2))),
    "1x1, stride over a multiple": ((2, 16, 8, 8), (24, 16, 1, 1), Conv2dAttrs((2, 2))),
    "1x1, stride over odd sizes": ((2, 5, 9, 7), (6, 5, 1, 1), Conv2dAttrs((2, 3))),
    "1x1, stride and crop": ((2, 16, 8, 8), (8, 16, 1, 1), Conv2dAttrs((2, 2), (0, 0, -1, -1))),
    "1x1, crop all around": ((1, 6, 9, 8), (4, 6, 1, 1), Conv2dAttrs((1, 2), (-1, -2, -3, -1))),
    "1x1, padded": ((1, 6, 4, 4), (4, 6, 1, 1), Conv2dAttrs((1, 1), (1, 0, 2, 1))),
    "whole input": ((4, 7, 3, 5), (9, 7, 3, 5), Conv2dAttrs()),
    "3x3 with stride 2": ((3, 32, 11, 9), (40, 32, 3, 3), Conv2dAttrs((2, 2), (1, 1, 1, 1))),
    "3x3, crop and pad": ((2, 5, 9, 9), (4, 5, 3, 3), Conv2dAttrs((1, 2), (-1, 2, 3, -2))),
    "5x4 dilated, asymmetric": ((2, 6, 13, 12), (7, 6, 5, 4), Conv2dAttrs((3, 1), (4, 0, 1, 5), (2, 3))),
    "padding beyond the window": ((2, 3, 4, 4), (5, 3, 2, 2), Conv2dAttrs((2, 2), (3, 4, 5, 2))),
    "8x8 with stride 4": ((2, 4, 28, 28), (32, 4, 8, 8), Conv2dAttrs((4, 4))),
    "groups": ((2, 12, 7, 6), (8, 6, 3, 3), Conv2dAttrs(padding=(1, 1, 1, 1), groups=2)),
    "depthwise, 24 channels": ((2, 24, 9, 8), (24, 1, 3, 3), Conv2dAttrs((2, 2), (1, 1, 1, 1), groups=24)),
}


def samples(op, name, layout=CHANNELS_LAST):
    x, w, a = SHAPES[name]
    t, le, b, r = a.padding
    y = (x[0], w[0], out_size(x[2], w[2], a.stride[0], t, b, a.dilation[0]), out_size(x[3], w[3], a.stride[1], le, r, a.dilation[1]))

    def arg(shape, lies=layout):
        return Arg(shape, "float32", lies)

    if op is CONV2D:
        fused = a._replace(activation="relu")
        return [
            Sample((arg(x), arg(w, CHANNELS_LAST), None, None), a, note=name),
            Sample((arg(x), arg(w, CHANNELS_LAST), Arg((w[0],)), arg(y)), fused, note=name),
        ]
    if op is INPUT_GRAD:
        return [Sample((arg(y), arg(w, CHANNELS_LAST)), InputGradAttrs(a, x[2:]), note=name)]
    return [Sample((arg(x), arg(y)), WeightGradAttrs(a, w[2:], bias), note=name) for bias in (False, True)]


@pytest.fixture
def two_threads():
    if capi.available() is not None:
        yield
        return
    before = runtime.get_num_threads()
    runtime.set_num_threads(2)
    yield
    runtime.set_num_threads(before)


@pytest.mark.parametrize("layout", [CHANNELS_LAST, CONTIGUOUS])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_config_agrees_with_the_reference(op, name, layout, two_threads):
    for sample in samples(op, name, layout):
        taken = [k.id for k in registered("cpu", op.name) if _contract.check_kernel(k, op, sample, CPU)]
        assert taken


@pytest.mark.parametrize("bound", [1, 3000, 20000])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if "im2col" in k.id or "col2im" in k.id], ids=lambda k: k.id)
def test_pieces_of_any_size_make_the_same_result(kernel, bound, monkeypatch):
    monkeypatch.setattr(conv2d_im2col, "PIECE", bound)
    monkeypatch.setattr(in_numpy, "PIECE", bound)
    monkeypatch.setattr(in_numpy, "TAPS", bound)
    for name in SHAPES:
        for sample in samples(OPS[kernel.op], name):
            _contract.check_kernel(kernel, OPS[kernel.op], sample, CPU)
    conv2d_im2col._product.cache_clear()


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "onednn_im2col" in k.id or "col2im" in k.id], ids=lambda k: k.id)
def test_cores_that_copy_together_make_the_same_result(kernel, monkeypatch):
    monkeypatch.setattr(conv2d_im2col, "SHARED", 0)
    monkeypatch.setattr(_blocks, "cores", lambda: 3)
    for name in SHAPES:
        for sample in samples(OPS[kernel.op], name):
            _contract.check_kernel(kernel, OPS[kernel.op], sample, CPU)


@pytest.mark.parametrize("name", ["1x1, odd channels", "1x1, stride and crop", "3x3 with stride 2", "8x8 with stride 4", "depthwise, 24 channels"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_nan_and_infinity_go_where_they_belong(kernel, name):
    op = OPS[kernel.op]
    for sample in samples(op, name):
        values, lies = _contract.arrays(sample), _contract.specs(sample)
        problem = Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))
        if kernel.reject(problem, CPU):
            continue
        values[0][0, 0, 1, 1] = np.nan
        if getattr(sample.attrs, "activation", None) is None:  # what an epilogue makes of infinity is its own affair
            values[0][-1, -1, -1, -1] = np.inf
        want = _contract.reference(op, sample, values)
        ins = [None if s is None else CPU.upload(v, s) for v, s in zip(values, lies, strict=True)]
        for config in kernel.configs(problem, CPU):
            outs = [CPU.allocate(s.nbytes) for s in problem.outputs]
            kernel.prepare(problem, config, CPU)(ins, outs)
            for out, s, ref in zip(outs, problem.outputs, want, strict=True):
                got = out.array(s)
                np.testing.assert_array_equal(np.isnan(got), np.isnan(ref), err_msg=f"{kernel.id} {config}")
                np.testing.assert_array_equal(np.isinf(got), np.isinf(ref), err_msg=f"{kernel.id} {config}")


def _problem(op, sample) -> Any:
    lies = _contract.specs(sample)
    return Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))


@onednn
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_the_implementation_asked_for_is_the_one_described(op, two_threads):
    kernel: Any = next(k for k in KERNELS if k.op == op.name and k.id.endswith(".onednn"))
    problem = _problem(op, samples(op, "3x3 with stride 2")[0])
    configs = list(kernel.configs(problem, CPU))
    assert configs[0] == ()
    assert len(set(configs)) == len(configs)
    named = [c for c in configs if "implementation" in dict(c)]
    assert named
    for config in named:
        pd = kernel._pd(problem, config)
        assert pd.impl == dict(config)["implementation"]
        assert pd.threads == dict(config).get("threads", 2)
    assert kernel._pd(problem).impl not in [dict(c)["implementation"] for c in named]


@onednn
def test_a_launch_on_one_thread_gives_the_threads_back(two_threads):
    kernel = next(k for k in KERNELS if k.id == "cpu.conv2d.onednn_matmul")
    sample = samples(CONV2D, "1x1, odd channels")[0]
    problem = _problem(CONV2D, sample)
    config = next(c for c in kernel.configs(problem, CPU) if ("threads", 1) in c)
    launch = kernel.prepare(problem, config, CPU)
    ins = [None if s is None else CPU.upload(v, s) for v, s in zip(_contract.arrays(sample), problem.inputs, strict=True)]
    launch(ins, [CPU.allocate(s.nbytes) for s in problem.outputs])
    threads = runtime._openmp(capi.load(), "omp_get_max_threads", restype=ctypes.c_int)
    assert threads is None or threads() == 2


@onednn
def test_large_problems_are_not_tried_on_one_thread(two_threads):
    x, w = (8, 64, 56, 56), (64, 64, 3, 3)
    sample = Sample((Arg(x, "float32", CHANNELS_LAST), Arg(w, "float32", CHANNELS_LAST), None, None), Conv2dAttrs(padding=(1, 1, 1, 1)))
    for kernel in registered("cpu", "conv2d"):
        problem = _problem(CONV2D, sample)
        if not kernel.reject(problem, CPU):
            assert not [c for c in kernel.configs(problem, CPU) if ("threads", 1) in c]


@onednn
def test_pieces_keep_to_their_bound():
    for kernel in KERNELS:
        if isinstance(kernel, conv2d_im2col._Im2col):
            op = OPS[kernel.op]
            wide = Conv2dAttrs(padding=(1, 1, 1, 1))
            x, w, y = (Arg(s, "float32", CHANNELS_LAST) for s in ((4, 64, 112, 112), (64, 64, 3, 3), (4, 64, 112, 112)))
            sample = {
                "conv2d": Sample((x, w, None, None), wide),
                "conv2d_input_grad": Sample((y, w), InputGradAttrs(wide, (112, 112))),
                "conv2d_weight_grad": Sample((x, y), WeightGradAttrs(wide, (3, 3), True)),
            }[kernel.op]
            problem = _problem(op, sample)
            assert kernel.reject(problem, CPU) == []
            whole = 4 * 112 * 112 * 64 * 9 * 4
            assert conv2d_im2col.PIECE // 2 < kernel.workspace(problem, ()) < whole // 4
