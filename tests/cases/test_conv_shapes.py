"""Every convolution in conv_shapes.csv, forward and both gradients, against the definition in float64 at sampled places.

On the CPU batches are cut so that a row costs about a GFLOP a direction. On OpenCL devices every row is cut to one image of a few windows and runs
contiguous, by the kernels whose programs serve all shapes. Channels last, where each shape builds programs of its own, runs a row of each kind:
of few kinds, or where TILEWRIGHT_TEST_DEVICES names the device, of all (ten minutes on PoCL); with TILEWRIGHT_FULL_CASES=1 every row as it
stands. On a GPU:

    TILEWRIGHT_TEST_DEVICES=opencl:0 TILEWRIGHT_FULL_CASES=1 python -m pytest tests/cases/test_conv_shapes.py

Rows whose operands a device cannot hold must be refused there, and have the right shapes in 64-bit arithmetic on the null device.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tilewright as tw
from tests.contract._contract import present
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, spec
from tilewright.errors import OutOfMemory, ShapeError
from tilewright.ops._call import call
from tilewright.ops.conv2d import CONV2D, INPUT_GRAD, WEIGHT_GRAD, Conv2dAttrs, InputGradAttrs, WeightGradAttrs, conv2d
from tilewright.ops.movement import take

FULL = os.environ.get("TILEWRIGHT_FULL_CASES") == "1"
LARGEST = 1 << 27  # elements of one operand that are computed in host memory, and by several processes at once
PERIOD = 65521  # a prime


class Row(NamedTuple):
    name: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    attrs: Conv2dAttrs
    out: tuple[int, int]

    @property
    def y(self) -> tuple[int, int, int, int]:
        return (self.x[0], self.w[0], *self.out)


def read() -> list[Row]:
    rows = []
    with open(Path(__file__).with_name("conv_shapes.csv")) as f:
        for d in csv.DictReader(line for line in f if not line.startswith("#")):
            v = {k: int(s) for k, s in d.items() if k != "name"}
            attrs = Conv2dAttrs(
                (v["stride_h"], v["stride_w"]),
                (v["pad_top"], v["pad_left"], v["pad_bottom"], v["pad_right"]),
                (v["dil_h"], v["dil_w"]),
                v["groups"],
            )
            w = (v["F"], v["C"] // v["groups"], v["kh"], v["kw"])
            rows.append(Row(d["name"], (v["N"], v["C"], v["H"], v["W"]), w, attrs, (v["OH"], v["OW"])))
    return rows


ROWS = read()


def cut(row: Row) -> Row:
    """As many images as cost a GFLOP."""
    if FULL:
        return row
    per_image = 2.0 * math.prod(row.out) * math.prod(row.w)
    n = max(1, min(row.x[0], int(1e9 / max(per_image, 1)), (1 << 23) // max(math.prod(row.x[1:]), 1)))
    return row._replace(x=(min(n, row.x[0]), *row.x[1:]))


def reduced(row: Row, most: int = 9) -> Row:
    """One image with few windows. What is left over beside the last window stays the same."""
    out = tuple(max(min(o, most), o - (s - 1) // step) if s else o for o, s, step in zip(row.out, row.x[2:], row.attrs.stride, strict=True))
    h, w = (s - (o - few) * step for s, o, few, step in zip(row.x[2:], row.out, out, row.attrs.stride, strict=True))
    return Row(row.name, (min(row.x[0], 1), row.x[1], h, w), row.w, row.attrs, (out[0], out[1]))


def kind(row: Row, fine: bool) -> tuple[Any, ...]:
    """What decides how kernels go about it: rows that share this differ in sizes alone (where not `fine`, in edges too)."""
    a, (f, c, kh, kw) = row.attrs, row.w
    depthwise = a.groups > 1 and a.groups == row.x[1]
    channels = (row.x[1], f) if depthwise else (c, f // a.groups)
    groups = "dense" if a.groups == 1 else "depthwise" if depthwise else ("grouped", min(channels) < 8)
    whole = tuple(n % 4 == 0 for n in channels)
    if not fine:
        return kh == kw == 1, a.stride != (1, 1), kh * kw > 1 and a.dilation != (1, 1), groups, all(whole)
    edges = any(a.padding), len(set(a.padding)) > 1, max(a.padding) >= max(kh, kw), math.prod(row.x) == 0
    size = kh == kw == 1, kh == kw, kh * kw > 25, min(channels) < 8, f == row.x[1]
    return (groups, *whole, *size, *[min(s, 3) for s in a.stride], *[d > 1 for d in a.dilation], *edges)


def fits(row: Row, largest: int = LARGEST) -> bool:
    return max(math.prod(row.x), math.prod(row.y), math.prod(row.w)) <= largest


class Noise:
    """A float32 operand: a stretch of noise again and again, in the order of memory, so that none need be held to know one."""

    def __init__(self, shape: tuple[int, ...], seed: int, layout: str) -> None:
        self.shape, self.layout = shape, layout
        self.stretch = np.random.default_rng(seed).standard_normal(PERIOD).astype(np.float32)
        self.steps = [1, 1, 1, 1] if 0 in shape else [s // 4 for s in spec(shape, "float32", layout).strides]

    def at(self, n: Any, c: Any, h: Any, w: Any) -> np.ndarray:
        offset = sum(i * step for i, step in zip((n, c, h, w), self.steps, strict=True))
        return self.stretch[offset % PERIOD].astype(np.float64)

    def on(self, device: Device) -> tw.Tensor:
        whole = spec(self.shape, "float32", self.layout)
        if whole.size <= PERIOD:
            filled = tw.tensor(self.stretch, device=device)
        else:
            filled = tw.tensor(self.stretch, device=device).reshape(1, PERIOD).expand(-(-whole.size // PERIOD), PERIOD)
        return tw.Tensor(filled.buffer.view(0, whole.nbytes), whole, device)


class Definition:
    """Single elements of the three results, from the definition, in float64, each with the sum of its products' sizes."""

    def __init__(self, row: Row, x: Noise, w: Noise, g: Noise) -> None:
        self.row, self.x, self.w, self.g = row, x, w, g
        self.per_in, self.per_out = row.w[1], row.w[0] // row.attrs.groups

    def taps(self, k: int, size: int, axis: int) -> tuple[int, int, int]:
        """How many outputs meet the input through tap k, the first of them, and the input that it meets."""
        a = self.row.attrs
        stride, out = a.stride[axis], self.row.out[axis]
        first = k * a.dilation[axis] - a.padding[axis]
        low = max(0, -(first // stride))
        return min(out, (size - 1 - first) // stride + 1) - low, low, first + low * stride

    def forward(self, n: int, f: int, i: int, j: int) -> tuple[float, float]:
        a, (_, _, h, w) = self.row.attrs, self.row.x
        rows = i * a.stride[0] - a.padding[0] + np.arange(self.row.w[2]) * a.dilation[0]
        cols = j * a.stride[1] - a.padding[1] + np.arange(self.row.w[3]) * a.dilation[1]
        (r,), (s,) = ((rows >= 0) & (rows < h)).nonzero(), ((cols >= 0) & (cols < w)).nonzero()
        c = np.arange(self.per_in)[:, None, None]
        r = r[:, None]
        product = self.x.at(n, f // self.per_out * self.per_in + c, rows[r], cols[s]) * self.w.at(f, c, r, s)
        return float(product.sum()), float(np.abs(product).sum())

    def input_grad(self, n: int, c: int, y: int, z: int) -> tuple[float, float]:
        a, group = self.row.attrs, c // self.per_in
        total = size = 0.0
        channels = np.arange(group * self.per_out, (group + 1) * self.per_out)
        for k in range(self.row.w[2]):
            i, rest = divmod(y + a.padding[0] - k * a.dilation[0], a.stride[0])
            if rest or not 0 <= i < self.row.out[0]:
                continue
            for m in range(self.row.w[3]):
                j, rest = divmod(z + a.padding[1] - m * a.dilation[1], a.stride[1])
                if rest or not 0 <= j < self.row.out[1]:
                    continue
                product = self.g.at(n, channels, i, j) * self.w.at(channels, c - group * self.per_in, k, m)
                total, size = total + float(product.sum()), size + float(np.abs(product).sum())
        return total, size

    def weight_grad(self, f: int, c: int, k: int, m: int) -> tuple[float, float]:
        (high, i, y), (across, j, z) = self.taps(k, self.row.x[2], 0), self.taps(m, self.row.x[3], 1)
        if high < 1 or across < 1:
            return 0.0, 0.0
        channel, total, size = f // self.per_out * self.per_in + c, 0.0, 0.0
        # Along a row both operands repeat after PERIOD places: so many whole periods, and a rest.
        whole, rest = divmod(across, PERIOD)
        few = max(1, (1 << 21) // min(across, PERIOD))
        step = np.arange(min(across, PERIOD))
        for n in range(self.row.x[0]):
            for start in range(0, high, few):
                r = np.arange(start, min(start + few, high))[:, None]
                product = self.x.at(n, channel, y + r * self.row.attrs.stride[0], z + step * self.row.attrs.stride[1]) * self.g.at(
                    n, f, i + r, j + step
                )
                for times, part in ((whole, product), (1, product[:, :rest])):
                    if times and part.size:
                        total, size = total + times * float(part.sum()), size + times * float(np.abs(part).sum())
        return total, size


def check(got: tw.Tensor, exact: Any, what: str, row: Row, terms: int) -> None:
    if got.size == 0:
        return
    rng = np.random.default_rng(7)
    corners = [tuple(0 for _ in got.shape), tuple(s - 1 for s in got.shape)]
    places = corners + [tuple(int(rng.integers(s)) for s in got.shape) for _ in range(14 if terms < 1 << 24 else 1)]
    offsets = [sum(i * s // 4 for i, s in zip(at, got.spec.strides, strict=True)) for at in places]
    flat = tw.Tensor(got.buffer, spec((got.size,), "float32"), got.device)
    values = take(flat, tw.tensor(np.array(offsets), device=got.device)).numpy()
    for at, value in zip(places, values, strict=True):
        want, size = exact(*at)
        allowed = 1.2e-7 * (16 + 4 * math.sqrt(terms)) * max(size / math.sqrt(max(terms, 1)), abs(want), 1e-3)
        assert abs(float(value) - want) <= allowed, f"{row.name}: {what} at {at} is {value!r}, and by definition {want!r}"


def three_directions(row: Row, device: Device, layout: str = CHANNELS_LAST) -> Counter[str]:
    """Run a row on a device and hold its results to the definition. Which kernels did it."""
    x, w, g = (Noise(shape, i, layout) for i, shape in enumerate((row.x, row.w, row.y)))
    exact = Definition(row, x, w, g)
    tx, tweight, tg = (v.on(device) for v in (x, w, g))
    a = row.attrs
    device.plans.clear()
    y = call(CONV2D, (tx, tweight, None, None), a)
    assert y.shape == g.shape
    check(y, exact.forward, "output", row, math.prod(row.w[1:]))
    del y
    dx = call(INPUT_GRAD, (tg, tweight), InputGradAttrs(a, row.x[2:]))
    check(dx, exact.input_grad, "input gradient", row, exact.per_out * row.w[2] * row.w[3])
    del dx
    dw = call(WEIGHT_GRAD, (tx, tg), WeightGradAttrs(a, row.w[2:], False))
    check(dw, exact.weight_grad, "weight gradient", row, row.x[0] * math.prod(row.out))
    used = Counter(p.kernel.id for p in device.plans.values() if p.problem.op.startswith("conv2d"))
    device.plans.clear()
    return used


def no_window(row: Row) -> None:
    """No window fits: the op says so."""
    a = row.attrs
    with pytest.raises(ShapeError, match="pad more or use a smaller window"):
        conv2d(tw.empty(row.x, device="null"), tw.empty(row.w, device="null"), None, a.stride, a.padding, a.dilation, a.groups)


def shapes_alone(row: Row) -> None:
    x, w = (tw.empty(s, device="null", layout="channels_last") for s in (row.x, row.w))
    a = row.attrs
    assert conv2d(x, w, None, a.stride, a.padding, a.dilation, a.groups).shape == row.y


@pytest.mark.parametrize("start", range(0, len(ROWS), 25))
def test_rows(start):
    cpu = next((d for d in present() if d.kind == "cpu"), None)
    if cpu is None:
        pytest.skip("TILEWRIGHT_TEST_DEVICES leaves the CPU out")
    for whole in ROWS[start : start + 25]:
        row = cut(whole)
        if min(row.out) < 1:
            no_window(row)
        elif fits(row):
            three_directions(row, cpu)
        else:
            shapes_alone(whole)
            if math.prod(whole.x) * 4 > 64 << 30:
                with pytest.raises(OutOfMemory, match="could not be allocated"):
                    tw.empty(whole.x)


def on_opencl(name: str, row: Row) -> tuple[Counter[str], str]:
    """In a process of its own: which kernels did the row, and what was wrong."""
    try:
        device = tw.device(name)
        most = device.max_alloc
        sizes = [4 * math.prod(s) for s in (row.x, row.w, row.y)]
        # In 4e9 terms one work-item would add for minutes, to a sum that float32 cannot hold.
        terms = max(math.prod(row.w[1:]), math.prod(row.w) // row.w[1] // row.attrs.groups) if row.w[1] else 0
        # Held at once: the operands, one result, and what a repeated stretch adds to each.
        if terms < 1 << 29 and max(sizes) <= most and sum(sizes) + max(sizes) < 0.9 * int(device.cl.global_mem_size):
            try:
                return three_directions(row, device), ""
            finally:
                device.synchronize()
                device.pool.free_held()
        shapes_alone(row)
        if max(sizes) > most:
            with pytest.raises(OutOfMemory, match="the device allows"):
                device.allocate(max(sizes))
        return Counter(), ""
    except Exception as error:
        return Counter(), f"{row.name}: {type(error).__name__}: {error}"


COMPUTED = [row for row in ROWS if min(row.out) >= 1]
REDUCED = [row for row in map(reduced, COMPUTED) if fits(row, 1 << 22)]


def chosen() -> list[Row]:
    """The rows that run channels last on an OpenCL device: all in full, or those of each kind that take the least work."""
    if FULL:
        return COMPUTED
    fine = "TILEWRIGHT_TEST_DEVICES" in os.environ
    rows = [r for r in REDUCED if fine or math.prod(r.attrs.stride) <= 4]  # a program for each phase of a stride
    rows.sort(key=lambda r: (math.prod(r.attrs.stride), math.prod(r.w) * math.prod(r.out)), reverse=True)
    return list({kind(row, fine): row for row in rows}.values())


opencl = pytest.mark.parametrize("device", [pytest.param(d, id=d.name) for d in present() if d.kind == "opencl"])


@opencl
def test_every_row_on_opencl(device):
    assert len(COMPUTED) - len(REDUCED) <= 6  # these have too many channels
    used = sum((three_directions(row, device, CONTIGUOUS) for row in REDUCED), Counter())
    assert used == {f"opencl.{op.name}.direct": len(REDUCED) for op in (CONV2D, INPUT_GRAD, WEIGHT_GRAD)}


@opencl
@pytest.mark.timeout(1500)
def test_rows_on_opencl(device, capsys):
    rows, began = chosen(), time.monotonic()
    spawn, many = multiprocessing.get_context("spawn"), min(16, os.cpu_count() or 1)  # programs are built on all cores
    # What may fill the device runs beside the others, one at a time.
    large, usual = [r for r in rows if not fits(r)], [r for r in rows if fits(r)]
    with ProcessPoolExecutor(many, spawn) as pool, ProcessPoolExecutor(1, spawn) as alone:
        jobs = [alone.submit(on_opencl, device.name, r) for r in large] + [pool.submit(on_opencl, device.name, r) for r in usual]
        results = [job.result() for job in jobs]
    used = sum((u for u, _ in results), Counter())
    wrong = [fault for _, fault in results if fault]
    done = sum(bool(u) for u, _ in results)
    with capsys.disabled():
        print(
            f"\n{device.name} {device.cl.name.strip()}: {done} of {len(rows)} rows {'in full' if FULL else 'of each kind, reduced'}, "
            f"three directions, {len(wrong)} wrong, {len(rows) - done - len(wrong)} too large, {time.monotonic() - began:.0f} s; "
            + ", ".join(f"{k} {n}" for k, n in sorted(used.items()))
        )
    assert not wrong, "\n".join(wrong)
    assert sum(used.values()) == 3 * done
    assert len(rows) - done <= (3 if FULL and device.max_alloc >= 32 << 30 else 12 if FULL else 0)


def test_most_rows_are_computed():
    too_large = [row.name for row in ROWS if not fits(cut(row))]
    assert len(ROWS) == 750
    assert len(too_large) <= 12, too_large
