"""Where kernels run: one folder per kind of device. A kind is loaded when it is first named."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

from tilewright.config import config
from tilewright.devices.api import Device
from tilewright.errors import DeviceError

KINDS = tuple(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)

AUTO = "auto"
pick: Callable[[], str] = lambda: "cpu"  # which device `auto` is; set by a layer above, which can measure

_devices: dict[str, Device] = {}
_lock = threading.RLock()


def get(name: str | Device | None = None) -> Device:
    """The device of that name (`cpu`, `opencl:0`, `null`; `auto`: the fastest), or the configured default. Raises DeviceError."""
    if isinstance(name, Device):
        return name
    if name is None:
        name = config.device
    found = _devices.get(name)
    return found if found is not None else _load(name)


def names() -> list[str]:
    """Every device here that computes, the CPU first."""
    modules = [importlib.import_module(f"tilewright.devices.{kind}") for kind in KINDS]
    return [name for module in modules for name in getattr(module, "names", list)()]


def _load(name: Any) -> Device:
    if name == AUTO:
        with _lock:
            if name not in _devices:
                _devices[name] = get(pick())
            return _devices[name]
    kind, _, index = str(name).partition(":")
    if not isinstance(name, str) or kind not in KINDS or (index and not index.isdigit()):
        raise DeviceError(f"device {name!r} is not known; use one of {', '.join(KINDS)}, {AUTO} (TILEWRIGHT_DEVICE sets the default)")
    number = int(index or 0)
    with _lock:
        module = importlib.import_module(f"tilewright.devices.{kind}")
        several = getattr(module, "SEVERAL", False)
        proper = f"{kind}:{number}" if number or several else kind  # "cpu:0" is "cpu", and "opencl" is "opencl:0"
        if proper not in _devices:
            import_kernels(module)
            _devices[proper] = module.open_device(proper, number)
        _devices[name] = _devices[proper]
        return _devices[name]


def import_kernels(package: Any) -> None:
    """Import every module below a device's package, so that each kernel file registers what it holds."""
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
