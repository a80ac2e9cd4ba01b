"""`tilewright devices`."""

from __future__ import annotations

from typing import Any

import typer


def found() -> list[dict[str, Any]]:
    """Each device of this machine with its facts, and what is missing and how to get it."""
    from tilewright.devices import get
    from tilewright.errors import DeviceError

    out = [get("cpu").describe()]
    from tilewright.devices.opencl import runtime

    try:
        there = runtime.found()
    except DeviceError as error:
        return [*out, {"name": "opencl", "kind": "opencl", "missing": [str(error)]}]
    number = 0
    for device in there:
        if device.fault:
            out.append(
                {"name": "opencl", "kind": "opencl", "model": device.name, "platform": device.platform, "missing": [f"passed over: {device.fault}"]}
            )
            continue
        out.append(get(f"opencl:{number}").describe())
        number += 1
    if not there:
        out.append(
            {"name": "opencl", "kind": "opencl", "missing": ["no OpenCL driver lists a device; install the GPU vendor's, or PoCL for the CPU"]}
        )
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
