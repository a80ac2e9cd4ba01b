"""Philox4x32-10 in NumPy: 32x32-bit products in uint64, all blocks of a piece at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel

PIECE = 1 << 14  # blocks of four words computed at once: they stay in cache


def words(state: np.ndarray, n: int) -> np.ndarray:
    """n words of the stream from (seed, first counter)."""
    seed, start = int(state[0]), int(state[1])
    blocks = -(-n // 4)
    out = np.empty((blocks, 4), np.uint32)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    for first in range(0, blocks, PIECE):
        last = min(first + PIECE, blocks)
        at = np.arange(start + first, start + last, dtype=np.uint64)
        c0, c1, c2, c3 = at & low, at >> shift, np.zeros_like(at), np.zeros_like(at)
        k0, k1 = seed & 0xFFFFFFFF, seed >> 32
        for _ in range(10):
            p0, p1 = c0 * m0, c2 * m1
            c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        for i, c in enumerate((c0, c1, c2, c3)):
            out[first:last, i] = c
    return out.reshape(-1)[:n]


def _unit(state: np.ndarray, n: int, dtype: Any = np.float64) -> np.ndarray:
    return (words(state, n) >> np.uint32(8)).astype(dtype) * dtype(2.0**-24)


@numpy_kernel("uniform01")
def _uniform(attrs: Any, out: Any, state: Any) -> None:
    np.copyto(out, _unit(state, out.size).reshape(out.shape), casting="unsafe")


@numpy_kernel("standard_normal")
def _normal(attrs: Any, out: Any, state: Any) -> None:
    n = out.size
    u = _unit(state, n + n % 2).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), u[:, 1] * (2 * math.pi)
    both = np.empty_like(u)
    both[:, 0], both[:, 1] = radius * np.cos(angle), radius * np.sin(angle)
    np.copyto(out, both.reshape(-1)[:n].reshape(out.shape), casting="unsafe")


@numpy_kernel("random_keep")
def _keep(attrs: Any, out: Any, state: Any) -> None:
    # Compare words, not floats: u >= p exactly when the 24 bits are at least ceil(p * 2^24).
    bound = np.uint32(math.ceil(attrs[1] * 2**24))
    np.copyto(out, ((words(state, out.size) >> np.uint32(8)) >= bound).reshape(out.shape))


@numpy_kernel("dropout_apply")
def _dropout(scale: Any, out: Any, x: Any, keep: Any) -> None:
    np.multiply(x, x.dtype.type(scale), out=out)
    np.copyto(out, 0, where=~np.broadcast_to(keep, out.shape))
