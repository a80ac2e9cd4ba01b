"""`tilewright devices`."""

from __future__ import annotations

from typing import Any

import typer


def found() -> list[dict[str, Any]]:
    """Each device of this machine with its facts, and what is missing and how to get it."""
    from tilewright.devices import get

    out = [get("cpu").describe()]
    out.append({"name": "opencl", "kind": "opencl", "missing": ["OpenCL devices are not supported by this version of Tilewright yet"]})
    return out


def run(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the devices, and what is missing for those that are not there."""
    from tilewright.cli._app import emit

    devices = found()
    if as_json:
        emit(devices)
        return
    for d in devices:
        facts = [f"{k} {v}" for k, v in d.items() if k not in ("name", "kind", "missing") and v is not None]
        print(f"{d['name']}: {', '.join(facts) if facts else 'not available'}")
        for line in d["missing"]:
            print(f"  missing: {line}")
