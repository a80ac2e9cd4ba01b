"""Every kernel in the registry keeps the contract. Adding a kernel file is all it takes to be tested here."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.contract import _contract
from tilewright import devices
from tilewright.devices.api import Problem, registered
from tilewright.devices.cpu.onednn import capi
from tilewright.dtypes import bfloat16, float16, float64
from tilewright.ops._op import OPS

CPU = devices.get("cpu")
DEVICES = _contract.present()
# Each kernel with its device: all of them, so that a kernel file is tested by being there.
KERNELS = [pytest.param(k, d, id=k.id) for d in DEVICES for k in sorted(registered(d.kind), key=lambda k: k.id)]


def test_every_op_has_a_kernel_that_takes_anything():
    without = [name for name in OPS if not any(k.id.startswith("cpu.") and "onednn" not in k.id for k in registered("cpu", name))]
    assert without == []


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_sample_is_taken(name, device):
    op = OPS[name]
    for sample in op.samples():
        lies = tuple(_contract.specs(sample))
        problem = Problem(name, sample.attrs, lies, op.outputs(sample.attrs, *lies))
        refusals = {k.id: k.reject(problem, device) for k in device.kernels(name)}
        assert any(not r for r in refusals.values()), f"{problem}: {refusals}"


@pytest.mark.parametrize(("kernel", "device"), KERNELS)
def test_agrees_with_the_reference(kernel, device):
    op = OPS[kernel.op]
    taken = sum([_contract.check_kernel(kernel, op, sample, device) for sample in op.samples()])
    if "onednn" in kernel.id and capi.available() is not None:
        assert taken == 0
        pytest.skip(capi.available())
    if taken == 0 and (lacks := _contract.lacks(kernel, op, device)):
        pytest.skip(f"oneDNN has no such code for this processor: {lacks}")
    assert taken > 0, f"{kernel.id} takes no sample: a dead kernel"


@pytest.mark.parametrize(("kernel", "device"), KERNELS)
def test_nan_and_infinity(kernel, device):
    op = OPS[kernel.op]
    own = _contract.OWN_SPECIALS.get(kernel.id, lambda attrs, dtype: False)
    for sample in op.samples():
        if not own(sample.attrs, sample.inputs[0].dtype if sample.inputs and sample.inputs[0] else ""):
            for _, values in _contract.specials(sample, op):
                _contract.check_kernel(kernel, op, sample, device, values=values)


@pytest.mark.parametrize(("kernel", "device"), KERNELS)
@pytest.mark.parametrize("dtype", [float64, float16, bfloat16], ids=lambda d: d.name)
def test_other_float_types(kernel, device, dtype):
    op = OPS[kernel.op]
    if op.inplace and dtype.itemsize < 4:
        pytest.skip("optimizer state is kept in float32 or float64")
    samples = [
        s
        for s in op.samples()
        if all(a is None or (a.dtype in ("float32", "int64", "bool", "int32", "uint8") and a.spec.size < 3000) for a in s.inputs)
    ]
    for sample in samples[:12]:
        try:
            _contract.check_kernel(kernel, op, sample, device, dtype)
        except (TypeError, ValueError) as error:
            if "dtype" in str(error) or "type" in type(error).__name__.lower():
                continue  # the op does not take the type, and says so
            raise


@pytest.mark.parametrize(("kernel", "device"), [p for p in KERNELS if OPS[p.values[0].op].inplace])
def test_in_place(kernel, device):
    op = OPS[kernel.op]
    taken = [_contract.check_inplace(kernel, op, s, device) for s in op.samples()]
    assert any(taken)


@pytest.mark.parametrize("name", ["cpu.conv2d.onednn", "cpu.conv2d.im2col", "cpu.batch_norm_train.onednn", "cpu.matmul.numpy"])
def test_one_launch_from_many_threads(name):
    kernel = next(k for k in registered("cpu") if k.id == name)
    op = OPS[kernel.op]
    for sample in op.samples():
        lies = _contract.specs(sample)
        problem = Problem(op.name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))
        if not kernel.reject(problem, CPU) and not problem.empty:
            break
    else:
        pytest.skip("oneDNN is not there")
    launch = kernel.prepare(problem, next(iter(kernel.configs(problem, CPU))), CPU)
    wrong = []

    def work(seed):
        values = _contract.arrays(sample, seed)
        ref = _contract.reference(op, sample, values)[0]
        ins = [None if v is None else CPU.upload(v, s) for v, s in zip(values, lies, strict=True)]
        for _ in range(20):
            outs = [CPU.allocate(s.nbytes) for s in problem.outputs]
            launch(ins, outs)
            error = np.abs(outs[0].array(problem.outputs[0]) - ref).max()
            if not error <= _contract.bound(op, kernel, problem, problem.outputs[0], ref):
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
