"""Every convolution in conv_shapes.csv, forward and both gradients, against the definition in float64 at sampled places.

Batches are cut so that a row costs about a GFLOP a direction; TILEWRIGHT_FULL_CASES=1 keeps them. Rows whose operands
do not fit the machine are run on the null device (shapes in 64-bit arithmetic) and must be refused on the CPU.
"""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import tilewright as tw
from tilewright.errors import OutOfMemory, ShapeError
from tilewright.ops.conv2d import INPUT_GRAD, WEIGHT_GRAD, Conv2dAttrs, InputGradAttrs, WeightGradAttrs, conv2d

FULL = os.environ.get("TILEWRIGHT_FULL_CASES") == "1"
LARGEST = 1 << 27  # elements of one operand that are computed


class Row(NamedTuple):
    name: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    attrs: Conv2dAttrs
    out: tuple[int, int]


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
    per_image = 2.0 * math.prod(row.out) * math.prod(row.w)
    size = math.prod(row.x[1:])
    n = row.x[0]
    if not FULL:
        n = max(1, min(n, int(1e9 / max(per_image, 1)), (1 << 23) // max(size, 1)))
        n = min(n, row.x[0])
    return row._replace(x=(n, *row.x[1:]))


def fits(row: Row) -> bool:
    return max(math.prod(row.x), row.x[0] * row.w[0] * math.prod(row.out), math.prod(row.w)) <= LARGEST


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Float32 noise; a large operand repeats a stretch of prime length."""
    rng = np.random.default_rng(seed)
    n = math.prod(shape)
    base = rng.standard_normal(min(n, 999983)).astype(np.float32)
    return np.resize(base, n).reshape(shape) if n else np.empty(shape, np.float32)


class Definition:
    """Single elements of the three results, from the definition, in float64."""

    def __init__(self, row: Row, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> None:
        self.row, self.x, self.w, self.g = row, x, w, g
        self.per_in, self.per_out = row.w[1], row.w[0] // row.attrs.groups

    def taps(self, k: int, size: int, axis: int) -> tuple[slice, slice] | None:
        """Outputs that meet the input through tap k, and the inputs they meet."""
        a = self.row.attrs
        stride, out = a.stride[axis], self.row.out[axis]
        first = k * a.dilation[axis] - a.padding[axis]
        low = max(0, -(first // stride))
        high = min(out, (size - 1 - first) // stride + 1)
        if low >= high:
            return None
        start = first + low * stride
        return slice(low, high), slice(start, start + (high - low - 1) * stride + 1, stride)

    def forward(self, n: int, f: int, i: int, j: int) -> tuple[float, float]:
        a, (_, _, h, w) = self.row.attrs, self.row.x
        rows = i * a.stride[0] - a.padding[0] + np.arange(self.row.w[2]) * a.dilation[0]
        cols = j * a.stride[1] - a.padding[1] + np.arange(self.row.w[3]) * a.dilation[1]
        kr, kc = (rows >= 0) & (rows < h), (cols >= 0) & (cols < w)
        c = f // self.per_out * self.per_in
        part = self.x[n, c : c + self.per_in][:, rows[kr]][:, :, cols[kc]].astype(np.float64)
        product = part * self.w[f][:, kr][:, :, kc]
        return float(product.sum()), float(np.abs(product).sum())

    def input_grad(self, n: int, c: int, y: int, z: int) -> tuple[float, float]:
        a, group = self.row.attrs, c // self.per_in
        total = size = 0.0
        channels = slice(group * self.per_out, (group + 1) * self.per_out)
        for k in range(self.row.w[2]):
            i, rest = divmod(y + a.padding[0] - k * a.dilation[0], a.stride[0])
            if rest or not 0 <= i < self.row.out[0]:
                continue
            for m in range(self.row.w[3]):
                j, rest = divmod(z + a.padding[1] - m * a.dilation[1], a.stride[1])
                if rest or not 0 <= j < self.row.out[1]:
                    continue
                product = self.g[n, channels, i, j].astype(np.float64) * self.w[channels, c - group * self.per_in, k, m]
                total, size = total + float(product.sum()), size + float(np.abs(product).sum())
        return total, size

    def weight_grad(self, f: int, c: int, k: int, m: int) -> tuple[float, float]:
        rows, cols = self.taps(k, self.row.x[2], 0), self.taps(m, self.row.x[3], 1)
        if rows is None or cols is None:
            return 0.0, 0.0
        channel = f // self.per_out * self.per_in + c
        product = self.x[:, channel, rows[1], cols[1]].astype(np.float64) * self.g[:, f, rows[0], cols[0]]
        return float(product.sum()), float(np.abs(product).sum())


def check(got: np.ndarray, exact, what: str, row: Row, terms: int) -> None:
    if got.size == 0:
        return
    rng = np.random.default_rng(7)
    corners = [tuple(0 for _ in got.shape), tuple(s - 1 for s in got.shape)]
    for at in corners + [tuple(int(rng.integers(s)) for s in got.shape) for _ in range(14)]:
        want, size = exact(*at)
        allowed = 1.2e-7 * (16 + 4 * math.sqrt(terms)) * max(size / math.sqrt(max(terms, 1)), abs(want), 1e-3)
        assert abs(float(got[at]) - want) <= allowed, f"{row.name}: {what} at {at} is {got[at]!r}, and by definition {want!r}"


@pytest.mark.parametrize("start", range(0, len(ROWS), 25))
def test_rows(start):
    for whole in ROWS[start : start + 25]:
        row = cut(whole)
        if min(row.out) < 1:  # no window fits: the op says so
            with pytest.raises(ShapeError, match="pad more or use a smaller window"):
                a = row.attrs
                conv2d(tw.empty(row.x, device="null"), tw.empty(row.w, device="null"), None, a.stride, a.padding, a.dilation, a.groups)
            continue
        if not fits(row):
            refused(whole)
            continue
        x, w, g = values(row.x, 1), values(row.w, 2), values((row.x[0], row.w[0], *row.out), 3)
        exact = Definition(row, x, w, g)
        tx, twt, tg = (tw.tensor(v, layout="channels_last") for v in (x, w, g))
        a = row.attrs
        y = conv2d(tx, twt, None, a.stride, a.padding, a.dilation, a.groups)
        assert y.shape == g.shape
        check(y.numpy(), exact.forward, "output", row, math.prod(row.w[1:]))
        dx = tw.ops._call.call(INPUT_GRAD, (tg, twt), InputGradAttrs(a, row.x[2:]))
        check(dx.numpy(), exact.input_grad, "input gradient", row, exact.per_out * row.w[2] * row.w[3])
        dw = tw.ops._call.call(WEIGHT_GRAD, (tx, tg), WeightGradAttrs(a, row.w[2:], False))
        check(dw.numpy(), exact.weight_grad, "weight gradient", row, row.x[0] * math.prod(row.out))
        tw.device("cpu").plans.clear()


def refused(row: Row) -> None:
    """Right shapes in 64-bit arithmetic, and no silent garbage: either memory is refused, or the row is not this large."""
    x, w = (tw.empty(s, device="null", layout="channels_last") for s in (row.x, row.w))
    a = row.attrs
    assert conv2d(x, w, None, a.stride, a.padding, a.dilation, a.groups).shape == (row.x[0], row.w[0], *row.out)
    if math.prod(row.x) * 4 > 64 << 30:
        with pytest.raises(OutOfMemory, match="could not be allocated"):
            tw.empty(row.x)


def test_most_rows_are_computed():
    too_large = [row.name for row in ROWS if not fits(cut(row))]
    assert len(ROWS) == 750
    assert len(too_large) <= 12, too_large
