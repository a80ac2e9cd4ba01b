"""OpenCL devices: what there is, programs kept on disk, and training as on the CPU. Skipped where no device works."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tilewright as tw
from tilewright import devices, models, nn, optim
from tilewright.devices import opencl
from tilewright.devices.opencl import program, runtime
from tilewright.errors import DeviceError, KernelError, OutOfMemory
from tilewright.ops._call import call_inplace
from tilewright.ops.optimizer import ADAM, RMSPROP, AdamAttrs, RmspropAttrs

pytestmark = pytest.mark.skipif(not opencl.names(), reason="no OpenCL device works here (PyOpenCL and a driver, for example PoCL)")


@pytest.fixture
def device():
    return devices.get("opencl:0")


def test_names(device):
    assert devices.get("opencl") is device
    assert device.name == "opencl:0"
    with pytest.raises(DeviceError, match="'opencl:99' does not exist: OpenCL devices here are opencl:0"):
        devices.get("opencl:99")
    with pytest.raises(DeviceError, match="device 'cuda' is not known"):
        tw.ones(2).to("cuda")


def test_values_go_there_and_back(device):
    for layout in ("contiguous", "channels_last"):
        x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
        t = tw.tensor(x, layout=layout).to(device)
        assert np.array_equal(t.numpy(), x)
        assert np.array_equal(t.to("cpu").numpy(), x)
        t.copy_(2 * x)
        assert np.array_equal(t.numpy(), 2 * x)
    assert tw.zeros(0, 3, device=device).numpy().shape == (0, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8 * 169, 10)

    def forward(self, x):
        return self.fc(tw.flatten(self.bn(self.conv(x), activation="relu"), 1))


def losses(device, steps, make, optimizer):
    """Of ten classes, each one pattern of squares under noise."""
    tw.manual_seed(0)
    net = make().to(device=device)
    optimizer, loss_fn = optimizer(net.parameters()), nn.CrossEntropyLoss()
    rng, out = np.random.default_rng(0), []
    patterns = np.kron(rng.standard_normal((10, 1, 7, 7)), np.ones((4, 4)))
    for _ in range(steps):
        y = rng.integers(0, 10, 8)
        x = tw.tensor((patterns[y] + rng.standard_normal((8, 1, 28, 28))).astype(np.float32), device=device, layout="channels_last")
        loss = loss_fn(net(x), tw.tensor(y, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return np.array(out)


RULES = {
    "sgd": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=2e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [Net, models.lenet], ids=["batch_norm", "lenet"])
def test_fifty_losses_are_the_cpus(device, make, rule):
    ours, cpu = losses(device, 50, make, RULES[rule]), losses("cpu", 50, make, RULES[rule])
    # A loss is the difference of two numbers around 10, whatever is left of it: a few of their last bits (1e-6 each).
    np.testing.assert_allclose(ours, cpu, rtol=1e-5, atol=4e-6)
    assert np.array_equal(ours, losses(device, 50, make, RULES[rule]))  # every kernel is deterministic
    assert cpu[-5:].max() < 0.8 < 2 < cpu[0]  # the weights have moved a long way


@pytest.mark.parametrize("where", ["cpu", "opencl:0"])
@pytest.mark.parametrize("op, options, hyper", [
    (ADAM, {"decoupled": False}, (2e-3, 0.9, 0.999, 1e-8, 0.01, 1 - 0.9**3, 1 - 0.999**3)),
    (ADAM, {"decoupled": True}, (2e-3, 0.9, 0.9999, 1e-8, 0.01, 1 - 0.9, 1 - 0.9999)),
    (RMSPROP, {"momentum": True}, (1e-3, 0.99, 1e-8, 0.0, 0.9)),
], ids=["adam", "adamw", "rmsprop"])  # fmt: skip
def test_moments_are_right_to_the_last_bits(device, where, op, options, hyper):
    """Gradients of all sizes, each element by itself, from a parameter of 0: 1 - beta made of a float32 beta would be 400 roundings off."""
    rng, n = np.random.default_rng(0), 4096
    g = rng.standard_normal(n) * 10 ** rng.uniform(-12, 2, n)
    mean, square = g * rng.uniform(0.5, 1, n), g * g * 10 ** rng.uniform(-6, 0, n)
    values = [v.astype(np.float32) for v in (np.zeros(n), g, *((mean, square) if op is ADAM else (square, mean)))]
    attrs = (AdamAttrs if op is ADAM else RmspropAttrs)(**options)
    want = op.reference(attrs, *[v.astype(np.float64) for v in values], np.array(hyper))
    tensors = [tw.tensor(v, device=where) for v in values]
    call_inplace(op, (*tensors, tw.tensor(np.array(hyper), device=where)), attrs)
    for k, exact in zip((0, 2, 3), want, strict=True):
        np.testing.assert_allclose(tensors[k].numpy(), exact, rtol=1e-6, atol=1e-30)


def test_a_batch_norm_net_learns(device):
    tw.manual_seed(0)
    net = models.mobilenet_small(num_classes=4).to(device=device)
    optimizer, loss_fn = optim.AdamW(net.parameters(), lr=3e-3), nn.CrossEntropyLoss()
    rng = np.random.default_rng(0)
    x = tw.tensor(rng.standard_normal((16, 1, 28, 28)).astype(np.float32), device=device, layout="channels_last")
    y = tw.tensor(np.arange(16) % 4, device=device)
    first = last = 0.0
    for _ in range(6):
        loss = loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        first = first or last
    assert last < first
    net.eval()
    with tw.no_grad():
        folded = net(x).numpy()
        np.testing.assert_allclose(folded, net.to(device="cpu")(x.to("cpu")).numpy(), rtol=1e-3, atol=1e-3)


SOURCE = "__kernel void twice(__global float *x, const int n) { const int i = get_global_id(0); if (i < n) x[i] *= FACTOR; }"


def run_twice(device, factor=2):
    x = tw.ones(5, device=device)
    run = program.launcher(device, SOURCE, "twice", size=(5,), group=(4,), define={"FACTOR": factor}, scalars=[np.int32(5)], buffers=1)
    run(x.buffer)
    return x.numpy().tolist()


def test_programs_are_kept_and_a_damaged_one_is_built_anew(device, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "programs", {})
    assert run_twice(device) == [2.0] * 5
    (file,) = (tmp_path / "opencl").glob("*.bin")
    whole = file.read_bytes()
    for damage in (b"", b"nonsense", whole[:-7], whole[:40] + b"\0" * 20 + whole[60:]):
        file.write_bytes(damage)
        device.programs.clear()
        assert run_twice(device) == [2.0] * 5
        assert file.read_bytes() == whole or len(file.read_bytes()) > 100
    device.programs.clear()

    assert run_twice(device, 3) == [3.0] * 5
    assert len(list((tmp_path / "opencl").glob("*.bin"))) == 2


def test_a_place_that_cannot_be_written_costs_nothing_else(device, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(device, "programs", {})
    assert run_twice(device) == [2.0] * 5


def test_a_kernel_that_does_not_build_says_why(device):
    with pytest.raises(KernelError, match="opencl:0: a kernel does not build"):
        program.launcher(device, "__kernel void k(__global float *x) { x[0] = nothing; }", "k", size=(1,), buffers=1)


def test_more_than_the_device_gives(device):
    with pytest.raises(OutOfMemory, match=r"opencl:0: one buffer of \d+ bytes .* was asked for and the device allows"):
        device.allocate(device.max_alloc + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told(device):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tw.ones(3, device="opencl:0").numpy()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read().startswith("DeviceError: an OpenCL device cannot be used in a forked child")
    os.waitpid(child, 0)


def test_a_device_that_cannot_build_is_passed_over(monkeypatch, device):
    good = runtime.found()
    bad = runtime.Found("Old platform", "old device", object(), "it cannot build a simple kernel: unknown target CPU")
    monkeypatch.setattr(runtime, "_found", [bad, *good])
    assert [f.name for f in runtime.usable()] == [f.name for f in good if not f.fault]
    with pytest.raises(DeviceError, match=r"old device \(Old platform\): it cannot build a simple kernel"):
        opencl.open_device("opencl:99", 99)
    from tilewright.cli.devices import found

    assert any("passed over: it cannot build" in line for d in found() for line in d["missing"])


def test_time_by_the_devices_own_clock(device):
    x = tw.ones(1 << 16, device=device)
    assert 0 < device.seconds(lambda: x * 2.0) < 1.0
