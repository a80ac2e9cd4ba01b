"""Cross entropy in NumPy, in float32 at least, on logits as rows of classes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.errors import ArgumentError


def _rows(x: np.ndarray) -> np.ndarray:
    """(N, classes, ...) as (rows, classes): a view where classes come last in memory."""
    x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    return x if x.ndim == 2 else np.moveaxis(x, 1, -1).reshape(x.shape[0] * prod(x.shape[2:]), x.shape[1])


def _store(out: np.ndarray, rows: np.ndarray) -> None:
    """The inverse of `_rows`, into `out`."""
    to = np.moveaxis(out, 1, -1)
    np.copyto(to, rows.reshape(to.shape), casting="unsafe")


def _own(name: str, a: Any, target: Any, weight: Any, classes: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Targets with a class in place of the ignored, the weight of each row (None: all 1), and which count (None: all)."""
    t = target.reshape(-1)
    kept = None
    if t.size:
        low, high = np.minimum.reduce(t), np.maximum.reduce(t)
        if low < 0 or high >= classes or low <= a.ignore_index <= high:
            kept = t != a.ignore_index
            wrong = t[kept & ((t < 0) | (t >= classes))]
            if wrong.size:
                raise ArgumentError(f"{name}: target {wrong[0]} is outside the classes 0 to {classes - 1} and is not ignore_index {a.ignore_index}")
            t = np.where(kept, t, 0)
            if not classes:  # every target is ignored: there is nothing to look up
                return t, np.zeros(t.size, dtype), kept
    own = None if weight is None else weight.astype(dtype)[t]
    if kept is not None:
        own = kept.astype(dtype) if own is None else own * kept
    return t, own, kept


def _total(own: Any, rows: int) -> Any:
    return rows if own is None else np.add.reduce(own, dtype=np.float64)


def _scale(a: Any, total: Any) -> Any:
    return 1.0 if a.reduction != "mean" else 1.0 / total if total else 0.0


def _picked(values: np.ndarray, own: Any) -> np.ndarray:
    """own * values, and 0 where own is 0 even if the value is infinite."""
    return values if own is None else np.where(own != 0, own * values, own.dtype.type(0))


def _write_loss(a: Any, out: Any, losses: np.ndarray, total: Any) -> None:
    if a.reduction == "none":
        np.copyto(out, losses.reshape(out.shape), casting="unsafe")
    else:
        out[...] = np.add.reduce(losses, dtype=np.float64) * _scale(a, total)


@numpy_kernel("cross_entropy")
def _cross_entropy(a: Any, outs: Any, logits: Any, target: Any, weight: Any) -> None:
    loss, p = outs
    z = _rows(logits)
    rows, classes = z.shape
    z = z - np.maximum.reduce(z, 1, keepdims=True, initial=-np.inf)
    e = np.exp(z)
    s = np.add.reduce(e, 1, keepdims=True)
    if p.ndim == 2 and p.dtype == e.dtype:
        np.divide(e, s, out=p)
    else:
        _store(p, np.divide(e, s, out=e))
    logs = np.log(s)
    if target.dtype.kind != "i":
        np.subtract(z, logs, out=z)
        wanted = _distribution(a, target, weight)
        _write_loss(a, loss, -np.add.reduce(_picked(z, wanted), 1), rows)
        return
    t, own, kept = _own("cross_entropy", a, target, weight, classes, z.dtype)
    if not classes:
        losses = np.zeros(rows, z.dtype)
    else:
        losses = _picked(logs[:, 0] - z[np.arange(rows), t], own)
        if a.smoothing:
            z -= logs
            spread = np.add.reduce(z if weight is None else _picked(z, np.broadcast_to(weight.astype(z.dtype), z.shape)), 1)
            spread = spread if kept is None else np.where(kept, spread, 0)
            losses = (1 - a.smoothing) * losses - (a.smoothing / classes) * spread
    _write_loss(a, loss, losses, _total(own, rows))


def _distribution(a: Any, target: Any, weight: Any) -> np.ndarray:
    """Probabilities (rows, classes), smoothed and weighted."""
    wanted = _rows(target)
    if a.smoothing:
        wanted = wanted * (1 - a.smoothing) + a.smoothing / max(wanted.shape[1], 1)
    return wanted if weight is None else wanted * weight.astype(wanted.dtype)


@numpy_kernel("cross_entropy_grad")
def _cross_entropy_grad(a: Any, out: Any, g: Any, p: Any, target: Any, weight: Any) -> None:
    p = _rows(p)
    rows, classes = p.shape
    g = g.astype(p.dtype).reshape(-1, 1)
    if target.dtype.kind != "i":
        wanted = _distribution(a, target, weight)
        d = p * np.add.reduce(wanted, 1, keepdims=True)
        d -= wanted
        d *= g * p.dtype.type(_scale(a, rows))
        _store(out, d)
        return
    t, own, kept = _own("cross_entropy", a, target, weight, classes, p.dtype)
    factor = g * p.dtype.type(_scale(a, _total(own, rows)))  # (rows, 1) or (1, 1)
    share = p.dtype.type(1 - a.smoothing) if own is None else (own * p.dtype.type(1 - a.smoothing))[:, None]
    peak = share * factor
    if a.smoothing and classes:
        w = np.ones(classes, p.dtype) if weight is None else weight.astype(p.dtype)
        each = w * p.dtype.type(a.smoothing / classes)
        d = p * (share + np.add.reduce(each))
        d -= each
        d *= factor
    else:
        d = np.multiply(p, peak, out=out if out.ndim == 2 and out.dtype == p.dtype else None)
    if classes:
        d[np.arange(rows), t] -= peak[:, 0]
    if kept is not None:
        d[~kept] = 0
    if d is not out:
        _store(out, d)


@numpy_kernel("nll_loss")
def _nll_loss(a: Any, out: Any, x: Any, target: Any, weight: Any) -> None:
    x = _rows(x)
    t, own, _ = _own("nll_loss", a, target, weight, x.shape[1], x.dtype)
    losses = -_picked(x[np.arange(len(t)), t], own) if x.shape[1] else np.zeros(len(t), x.dtype)
    _write_loss(a, out, losses, _total(own, len(t)))
