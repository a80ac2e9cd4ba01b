"""The device `auto`: the fastest one, measured once for each; the CPU unless another is clearly faster."""

from __future__ import annotations

import itertools
import json

import pytest

import tilewright as tw
from tilewright import devices
from tilewright.config import config
from tilewright.devices.null import NullDevice
from tilewright.errors import DeviceError, KernelError
from tilewright.ops._default import problems
from tilewright.tune import pick

SMALL = problems(1, 4, 6)


class Fake(NullDevice):
    def __init__(self, name, driver="1"):
        super().__init__(name)
        self.driver = driver

    def identity(self):
        return self.name, self.driver, "", 1


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(cpu=0.2, gpu=0.1, broken=error): devices that take so long, and the names of those measured."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    measured = []

    def make(**takes):
        measured.clear()
        monkeypatch.setattr(devices, "_devices", {name: Fake(name) for name in takes})
        monkeypatch.setattr(devices, "names", lambda: list(takes))

        def measure(device, of):
            measured.append(device.name)
            if isinstance(takes[device.name], Exception):
                raise takes[device.name]
            return takes[device.name]

        monkeypatch.setattr(pick, "measure", measure)
        return measured

    return make


@pytest.mark.parametrize(
    "takes, best",
    [
        ({"cpu": 0.2}, "cpu"),
        ({"cpu": 0.2, "gpu": 0.1}, "gpu"),
        ({"cpu": 0.2, "integrated": 0.3}, "cpu"),
        ({"cpu": 0.2, "cores": 0.19}, "cpu"),  # within the noise
        ({"cpu": 0.2, "small": 0.1, "large": 0.01}, "large"),
        ({"cpu": 0.2, "broken": KernelError("it does not build"), "gpu": 0.1}, "gpu"),
        ({"cpu": 0.2, "lost": RuntimeError("CL_OUT_OF_RESOURCES")}, "cpu"),
        ({"cpu": DeviceError("no")}, "cpu"),
    ],
)
def test_the_fastest_that_works(machine, takes, best):
    machine(**takes)
    assert pick.fastest(SMALL) == best


def test_measured_once_for_a_device_and_its_driver(machine, tmp_path):
    measured = machine(cpu=0.2, gpu=0.1)
    assert [pick.fastest(SMALL) for _ in range(3)] == ["gpu"] * 3
    assert measured == ["cpu", "gpu"]
    devices._devices["gpu"] = Fake("gpu", driver="2")
    assert pick.fastest(SMALL) == "gpu"
    assert measured == ["cpu", "gpu", "gpu"]
    files = list(tmp_path.glob("pick-*.json"))
    assert len(files) == 3
    for file, damage in itertools.product(files, ("", "{", "[1]", '{"identity": [], "seconds": 1}')):
        file.write_text(damage)
        assert pick.fastest(SMALL) == "gpu"
    for file in files:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": -1.0}))
    del measured[:]
    assert pick.fastest(SMALL) == "gpu"
    assert sorted(measured) == ["cpu", "gpu"]


def test_a_failure_is_not_kept(machine):
    measured = machine(cpu=0.2, gpu=KernelError("busy"))
    assert [pick.fastest(SMALL) for _ in range(2)] == ["cpu", "cpu"]
    assert measured == ["cpu", "gpu", "gpu"]


def test_auto_is_that_device(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "_devices", dict(devices._devices))
    monkeypatch.setattr(devices, "pick", lambda: asked.append(1) or "null")
    monkeypatch.setattr(config, "device", "auto")
    assert tw.empty(2).device is devices.get("null")
    assert tw.device("auto").name == "null"
    assert asked == [1]


@pytest.mark.parametrize("name", [n for n in devices.names() if n in ("cpu", "opencl:0")])
def test_real_devices_are_timed(name):
    ticks = itertools.count()
    assert pick.measure(devices.get(name), SMALL) > 0
    assert pick.measure(devices.get(name), SMALL, clock=lambda: float(next(ticks))) == 1.0
    assert "null" not in devices.names()
    assert devices.names()[0] == "cpu"
