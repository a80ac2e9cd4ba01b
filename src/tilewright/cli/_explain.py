"""What `explain` and `report` tell: each op that a model calls, by layer, with its time, its limit and its candidates."""

from __future__ import annotations

import os
from typing import Any

from tilewright.cli._problems import of_target
from tilewright.devices.api import Device, Problem
from tilewright.ops._op import find
from tilewright.tune import roofline, select


def gather(target: str, shape: tuple[int, ...], direction: str, device: Device, budget_s: float = 3.0) -> dict[str, Any]:
    """`device`, `ceilings`, `calls` (in the order of the run), and for a model `whole_s`, `kernels_s`.

    A call: `layer`, `direction`, `op`, `problem`, `kernel`, `config`, `seconds` (in its place in the run, or for a list of shapes as
    measured by itself; None if it never was), `flops`, `bytes`, `limit` with `limit_s`, `share` (limit_s / seconds), `runner_up` and
    `candidates` (see `select.explain`).
    """
    limits = roofline.ceilings(device, find)
    out: dict[str, Any] = {
        "target": target,
        "device": device.describe() | {"identity": list(device.identity())},
        "ceilings": {"flops": limits.flops, "bandwidths": limits.bandwidths, "launch_s": limits.launch_s},
        "calls": [],
    }
    known: dict[Problem, list[dict[str, Any]]] = {}

    def add(layer: str, way: str, problem: Problem, kernel: str | None, config: Any, seconds: float | None) -> None:
        rows = known.get(problem)
        if rows is None:
            rows = known[problem] = select.explain(problem, device)
        usable = [r for r in rows if r["status"] in ("ok", "unmeasured")]
        if kernel is None and usable:
            kernel, config, seconds = usable[0]["kernel"], usable[0]["config"], usable[0]["median_s"]
        cost = find(problem.op).cost(problem.attrs, *problem.inputs)
        limit, limit_s = limits.limit(cost.flops, cost.bytes)
        others = [r for r in usable if (r["kernel"], r["config"]) != (kernel, config) and r["median_s"] is not None]
        chosen = next((r for r in rows if (r["kernel"], r["config"]) == (kernel, config)), None)
        out["calls"].append(
            {
                "layer": layer, "direction": way, "op": problem.op, "problem": str(problem), "kernel": kernel, "config": dict(config or ()),
                "seconds": seconds, "flops": cost.flops, "bytes": cost.bytes, "limit": limit, "limit_s": limit_s,
                "share": None if not seconds else limit_s / seconds, "chosen": chosen,
                "runner_up": min(others, key=lambda r: r["median_s"], default=None), "candidates": rows,
            }
        )  # fmt: skip

    if target.endswith(".csv"):
        for problem in of_target(target, shape, direction, device):
            select.choose(problem, device, find(problem.op))  # measures it where the policy says so
            add("", "", problem, None, None, None)
        return out
    from tilewright.nn import profile

    net = _model(target, shape).to(device)
    ways = {"forward": (False,), "train": (True,), "all": (False, True)}[direction]
    for train in ways:
        found = profile(net, shape, train=train, budget_s=budget_s)
        for call in found.calls:
            way = call.direction if not train else f"train {call.direction}"
            add(call.layer, way, call.problem, call.kernel, call.config, call.seconds)
        name = "train_" if train else ""
        out[f"{name}whole_s"], out[f"{name}kernels_s"] = found.whole_s, found.kernels_s
    return out


def _model(target: str, shape: tuple[int, ...]) -> Any:
    from tilewright.cli._data import load_model, make_model

    if os.path.exists(target):
        return load_model(target)[0]
    return make_model(target, {"classes": range(1000), "input": list(shape[1:])})[0]
