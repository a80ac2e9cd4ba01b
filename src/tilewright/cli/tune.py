"""`tilewright tune`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import typer


def run(
    target: str = typer.Argument(help="A model's name, a weights file, a CSV file of convolutions; or status, list, export, import, prune."),
    file: str = typer.Argument(None, help="The file of export and import (JSON lines)."),
    input: str = typer.Option("1x3x224x224", help="NxCxHxW, for a model."),
    direction: str = typer.Option("all", help="forward, train or all."),
    device: str = typer.Option(None, help="cpu, opencl:0 (`tilewright devices` lists them) or auto, the fastest; default TILEWRIGHT_DEVICE or cpu."),
    budget: float = typer.Option(600.0, min=0.0, help="Seconds in all; run it again to go on."),
    seconds: float = typer.Option(2.0, min=0.0, help="Seconds a problem."),
    again: bool = typer.Option(False, help="Measure also what is measured."),
    cold: bool = typer.Option(False, help="With operands outside the caches."),
    lock: str = typer.Option(None, help="Write the choices to this file, to be used with TILEWRIGHT_LOCK."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure the kernels for a model's or a list's problems ahead of time, each in a process that may hang or crash."""
    from tilewright.cli._app import emit
    from tilewright.cli._problems import of_target, sizes
    from tilewright.devices import get

    place = get(device)
    if target in ("status", "list", "export", "import", "prune"):
        report = _manage(target, file, place)
        if as_json:
            emit(report)
        elif isinstance(report, list):
            for row in report:
                took = "" if row["median_s"] is None else f"{row['median_s'] * 1e6:12.1f} us"
                print(f"{row['status']:10} {took:15} {row['kernel']} {dict(row['config']) or ''} {row['problem']} {row['reason']}")
        else:
            for name, value in report.items():
                print(f"{name}: {value}")
        return
    problems = of_target(target, sizes(input), direction, place)
    report = _tune(problems, place, budget, seconds, again, cold, quiet=as_json)
    if lock:
        report["locked"] = _write_lock(lock, problems, place)
        report["lock"] = lock
    if as_json:
        emit(report)
    else:
        print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in report.items()))


def _tune(problems: list[Any], device: Any, budget: float, seconds: float, again: bool, cold: bool, quiet: bool) -> dict[str, Any]:
    from tilewright.errors import KernelError
    from tilewright.ops._op import find
    from tilewright.tune import select
    from tilewright.tune.load import Load
    from tilewright.tune.worker import Worker

    began = time.monotonic()
    counts = {"problems": len(problems), "one candidate": 0, "known": 0, "measured": 0, "not reached": 0, "without operands": 0, "disturbed": 0}
    with Worker(device, find) as by:
        for number, problem in enumerate(problems, 1):
            rivals = select.candidates(problem, device)
            if len(rivals) < 2:
                counts["one candidate"] += 1
            elif not again and select.is_known(problem, device, rivals):
                counts["known"] += 1
            elif time.monotonic() - began >= budget:
                counts["not reached"] += 1
            else:
                load = None if by.pid is None else Load(by.pid)
                try:
                    trials = select.measure_apart(problem, device, by, budget_s=seconds, cold=cold)
                except KernelError:
                    counts["without operands"] += 1
                    continue
                select.store().record(select.key_of(problem, device), trials)
                counts["measured"] += 1
                counts["disturbed"] += load is not None and load.disturbed(device.identity()[3])
                best = next(iter(select.ranked(trials, problem, device)), None)
                if not quiet and best is not None:
                    print(f"{number}/{len(problems)} {problem}: {best[0].id} {dict(best[1]) or ''}", file=sys.stderr)
    if counts["disturbed"] and not quiet:
        print(f"other programs kept the processor busy during {counts['disturbed']} problems; --again measures them anew", file=sys.stderr)
    return {**counts, "seconds": time.monotonic() - began}


def _write_lock(path: str, problems: list[Any], device: Any) -> int:
    from tilewright.tune import select
    from tilewright.tune.lock import Choice, Lock
    from tilewright.tune.store import problem_text

    lock = Lock.read(path) if os.path.exists(path) else Lock(path)
    count = 0
    with select.policy("cached"):
        for problem in problems:
            if len(select.candidates(problem, device)) > 1:
                choice = select.choose(problem, device)
                lock.set(problem_text(problem), Choice(choice.kernel.id, choice.config, choice.kernel.version), device.kind)
                count += 1
    lock.write()
    return count


def _manage(what: str, file: str | None, device: Any) -> Any:
    from dataclasses import asdict

    from tilewright.devices.api import registered
    from tilewright.errors import ArgumentError
    from tilewright.tune import select

    store = select.store()
    name, driver, library, _ = device.identity()
    here, kernels = {name: (driver, library)}, select.current(registered(device.kind))
    if what == "status":
        return store.status(here, kernels)
    if what == "list":
        return [{**asdict(k), **asdict(t)} for k, t in store.items()]
    if what == "prune":
        return {"removed": store.prune(here, kernels), "path": store.path}
    if file is None:
        raise ArgumentError(f"tune {what}: name the file, as in `tilewright tune {what} trials.jsonl`")
    return {"trials": store.export(file) if what == "export" else store.import_(file), "file": file}
