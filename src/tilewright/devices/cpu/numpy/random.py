"""Philox4x32-10 in NumPy: 32x32-bit products in uint64, all blocks of a piece at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy import _blocks
from tilewright.devices.cpu.numpy._base import numpy_kernel

PIECE = 1 << 12  # blocks of four words computed at once: their ten arrays stay in a core's L2
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)


def _rounds(first: int, last: int, key: int, out: np.ndarray) -> None:
    """Blocks first..last-1 of the stream into out (last - first, 4)."""
    at = np.arange(first, last, dtype=np.uint64)
    c0, c1, c2, c3 = at & _LOW, at >> _SHIFT, np.zeros_like(at), np.zeros_like(at)
    p0, p1 = np.empty_like(at), np.empty_like(at)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        np.multiply(c0, _M0, out=p0)
        np.multiply(c2, _M1, out=p1)
        np.right_shift(p1, _SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.bitwise_and(p1, _LOW, out=c1)
        np.right_shift(p0, _SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(p0, _LOW, out=c3)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    for i, c in enumerate((c0, c1, c2, c3)):
        out[:, i] = c


def words(state: np.ndarray, n: int) -> np.ndarray:
    """n words of the stream from (seed, first counter)."""
    key, start = int(state[0]), int(state[1])
    blocks = -(-n // 4)
    out = np.empty((blocks, 4), np.uint32)

    def piece(i: int, j: int) -> None:
        for first in range(i, j, PIECE):
            last = min(first + PIECE, j)
            _rounds(start + first, start + last, key, out[first:last])

    _blocks.split(blocks, piece)
    return out.reshape(-1)[:n]


def _pairs(state: np.ndarray, n: int) -> np.ndarray:
    """n 64-bit numbers, the leading word first."""
    both = words(state, 2 * n).reshape(n, 2).astype(np.uint64)
    return both[:, 0] << _SHIFT | both[:, 1]


def _unit(state: np.ndarray, n: int, bits: int) -> np.ndarray:
    """n numbers in [0, 1) that `bits` bits hold: float32 where it can hold them."""
    if bits == 53:
        both = words(state, 2 * n).reshape(n, 2)
        return ((both[:, 0] >> 5) * 2.0**26 + (both[:, 1] >> 6)) * 2.0**-53
    return (words(state, n) >> np.uint32(32 - bits)).astype(np.float32) * np.float32(2.0**-bits)


_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


@numpy_kernel("uniform01")
def _uniform(attrs: Any, out: Any, state: Any) -> None:
    np.copyto(out, _unit(state, out.size, _BITS[out.dtype.name]).reshape(out.shape), casting="unsafe")


@numpy_kernel("standard_normal")
def _normal(attrs: Any, out: Any, state: Any) -> None:
    n = out.size
    u = _unit(state, n + n % 2, max(24, _BITS[out.dtype.name])).reshape(-1, 2).astype(np.float64)
    radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), u[:, 1] * (2 * math.pi)
    both = np.empty_like(u)
    both[:, 0], both[:, 1] = radius * np.cos(angle), radius * np.sin(angle)
    np.copyto(out, both.reshape(-1)[:n].reshape(out.shape), casting="unsafe")


@numpy_kernel("random_integers")
def _integers(attrs: Any, out: Any, state: Any) -> None:
    low, count = attrs[3], attrs[4]
    w = _pairs(state, out.size)
    if count < 1 << 64:  # the upper half of the 128-bit product, from four of 32-bit halves
        high, below = w >> _SHIFT, w & _LOW
        c1, c0 = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
        middle = high * c0 + (below * c0 >> _SHIFT)
        w = high * c1 + (middle >> _SHIFT) + ((below * c1 + (middle & _LOW)) >> _SHIFT)
    w += np.uint64(low % (1 << 64))
    np.copyto(out, w.view(np.int64).reshape(out.shape))


@numpy_kernel("random_keep")
def _keep(attrs: Any, out: Any, state: Any) -> None:
    bound = math.ceil(attrs[3] * 2**32)  # u >= p exactly when the word is at least this
    if bound >> 32:
        out[...] = False
    else:
        np.copyto(out, (words(state, out.size) >= np.uint32(bound)).reshape(out.shape))


@numpy_kernel("dropout_apply")
def _dropout(scale: Any, out: Any, x: Any, keep: Any) -> None:
    np.multiply(x, x.dtype.type(scale), out=out)
    np.copyto(out, 0, where=~np.broadcast_to(keep, out.shape))
