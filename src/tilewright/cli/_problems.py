"""The problems that a model or a list of shapes poses, for the commands that measure and explain kernels."""

from __future__ import annotations

import csv
import os

import numpy as np

from tilewright.devices.api import Device, Problem
from tilewright.errors import ArgumentError, DataError

DIRECTIONS = ("forward", "train", "all")
COLUMNS = ("N", "C", "H", "W", "F", "kh", "kw", "stride_h", "stride_w", "pad_top", "pad_left", "pad_bottom", "pad_right",
           "dil_h", "dil_w", "groups")  # fmt: skip


def sizes(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(s) for s in text.lower().split("x"))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1:
        raise ArgumentError(f"--input {text!r} must be sizes joined by x, NxCxHxW, for example 1x3x224x224")
    return shape


def check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ArgumentError(f"--direction {direction!r} must be one of {', '.join(DIRECTIONS)}")


def of_target(target: str, shape: tuple[int, ...], direction: str, device: Device) -> list[Problem]:
    """Every distinct problem of a model (a name, or a weights file) on inputs of `shape`, or of a CSV file of convolutions.

    direction: "forward" (inference), "train" (a step: forward in training mode and backward) or "all".
    """
    check_direction(direction)
    if target.endswith(".csv"):
        return _of_shapes(target, direction)
    return _of_model(target, shape, direction, device)


def _of_model(target: str, shape: tuple[int, ...], direction: str, device: Device) -> list[Problem]:
    from tilewright import no_grad, tensor
    from tilewright.cli._data import load_model, make_model
    from tilewright.tune.select import policy

    device.plans.clear()
    with policy("off"):  # runs once, to see what it asks for
        if os.path.exists(target):
            net = load_model(target)[0]
        else:
            net, _ = make_model(target, {"classes": range(1000), "input": list(shape[1:])})
        made = [p.problem for p in device.plans.values()] if direction == "all" else []  # initialising asks for something too
        device.plans.clear()
        net.to(device)
        x = tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32), device=device)
        if direction != "train":
            with no_grad():
                net.eval()(x)
        if direction != "forward":
            out = net.train()(x)
            (out * out).mean().backward()
        device.synchronize()
    problems = [*made, *[p.problem for p in device.plans.values()]]
    device.plans.clear()
    return list(dict.fromkeys(problems))


def _of_shapes(path: str, direction: str) -> list[Problem]:
    """Run the convolutions on the device that computes nothing, and see what they ask for."""
    from tilewright import conv2d, devices, no_grad, ones, ones_like

    try:
        with open(path, newline="") as f:
            rows = list(csv.DictReader(f))
    except OSError as error:
        raise DataError(f"{path}: could not be read ({error.strerror or error})") from error
    null = devices.get("null")
    null.plans.clear()
    found: dict[Problem, None] = {}
    for number, row in enumerate(rows, 2):
        try:
            n, c, h, w, f, kh, kw, sh, sw, top, left, bottom, right, dh, dw, groups = (int(row[k]) for k in COLUMNS)
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path}, line {number}: needs whole numbers in the columns {', '.join(COLUMNS)}") from None
        train = direction != "forward"
        x = ones(n, c, h, w, device=null, layout="channels_last", requires_grad=train)
        weight = ones(f, c // groups, kh, kw, device=null, layout="channels_last", requires_grad=train)
        for _ in range(2 if direction == "all" else 1):
            if train:
                y = conv2d(x, weight, stride=(sh, sw), padding=(top, left, bottom, right), dilation=(dh, dw), groups=groups)
                y.backward(ones_like(y))
                train = False
            else:
                with no_grad():
                    conv2d(x, weight, stride=(sh, sw), padding=(top, left, bottom, right), dilation=(dh, dw), groups=groups)
        for plan in null.plans.values():
            if plan.problem.op.startswith("conv2d"):
                found[plan.problem] = None
        null.plans.clear()
    return list(found)
