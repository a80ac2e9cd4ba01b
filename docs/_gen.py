"""Pages made from the code: tables of ops and kernels out of the registries, and the reference's names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

from tilewright import devices
from tilewright.devices import api
from tilewright.ops._op import OPS

REFERENCE = {
    "tilewright": "Tensors and ops",
    "tilewright.nn": "Layers",
    "tilewright.optim": "Optimizers and schedules",
    "tilewright.data": "Data",
    "tilewright.train": "Training",
    "tilewright.models": "Models",
    "tilewright.io": "Files",
    "tilewright.devices.api": "Devices and kernels",
    "tilewright.errors": "Errors",
}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for found in pkgutil.walk_packages(devices.__path__, "tilewright.devices."):
        if ".opencl" not in found.name:
            importlib.import_module(found.name)
    _write(folder / "ops.md", _ops())
    _write(folder / "kernels.md", _kernels())
    listed: set[int] = set()
    # From the most special module to the package itself, so that a name exported twice is described once.
    for name, title in reversed(REFERENCE.items()):
        if importlib.util.find_spec(name) is not None:
            _write(folder / f"{name}.md", _reference(importlib.import_module(name), title, listed))


def _write(path: Path, text: str) -> None:
    # Leave an unchanged page alone, so that Sphinx need not read it again.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _ops() -> str:
    rows = []
    for name, op in sorted(OPS.items()):
        kernels = ", ".join(f"`{kernel.id}`" for kernel in api.registered(op=name))
        rows.append([f"`{name}`", "yes" if op.vjp else "–", str(len(op.samples())), kernels or "–"])
    return _table(["Op", "Gradient", "Samples", "Kernels, in the untuned order of trial"], rows)


def _kernels() -> str:
    rows = []
    for kernel in sorted(api.registered(), key=lambda k: k.id):
        about = (inspect.getdoc(type(kernel)) or "").split("\n\n")[0].replace("\n", " ")
        about = "" if about == (inspect.getdoc(api.Kernel) or "").split("\n\n")[0] else about
        repeats = "yes" if kernel.deterministic else "no"
        rows.append([f"`{kernel.id}`", f"`{kernel.op}`", str(kernel.version), repeats, about])
    return _table(["Kernel", "Op", "Version", "Deterministic", "About"], rows)


def _reference(module: ModuleType, title: str, listed: set[int]) -> str:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    lines = [f"# {title}", "", f"`{module.__name__}`", "", "```{eval-rst}"]
    for name in names:
        item = getattr(module, name)
        ours = (getattr(item, "__module__", None) or "").startswith(module.__name__)
        if not ours or id(item) in listed:
            continue
        listed.add(id(item))
        if inspect.isclass(item):
            members = "" if issubclass(item, BaseException) else "\n   :members:"
            lines += [f".. autoclass:: {module.__name__}.{name}{members}", ""]
        elif inspect.isroutine(item):
            lines += [f".. autofunction:: {module.__name__}.{name}", ""]
    return "\n".join([*lines, "```", ""])
