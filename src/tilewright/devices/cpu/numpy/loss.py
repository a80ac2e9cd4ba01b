"""Cross entropy in NumPy, in float32 at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.errors import ArgumentError


def _parts(a: Any, logits: Any, target: Any, weight: Any) -> tuple[Any, Any, Any, Any]:
    """Log-probabilities, safe targets, the weight of each row's class (0 where ignored), and which rows count."""
    n, c = logits.shape
    if n:
        low, high = target.min(), target.max()
        if low < 0 or high >= c:
            bad = target[(target != a.ignore_index) & ((target < 0) | (target >= c))]
            if bad.size:
                raise ArgumentError(f"cross_entropy: target {bad[0]} is outside the classes 0 to {c - 1} and is not ignore_index {a.ignore_index}")
    z = logits.astype(np.float32) if logits.dtype.itemsize == 2 else logits
    z = z - np.maximum.reduce(z, 1, keepdims=True) if c else z
    logp = z - np.log(np.add.reduce(np.exp(z), 1, keepdims=True))
    kept = target != a.ignore_index
    safe = np.where(kept, target, 0)
    own = kept.astype(z.dtype) if weight is None else weight[safe] * kept
    return logp, safe, own, kept


@numpy_kernel("cross_entropy")
def _cross_entropy(a: Any, outs: Any, logits: Any, target: Any, weight: Any) -> None:
    logp, safe, own, kept = _parts(a, logits, target, weight)
    losses = -logp[np.arange(len(safe)), safe] * own if len(safe) else np.zeros(0, logp.dtype)
    losses[~kept] = 0
    if a.smoothing:
        spread = logp.sum(1) if weight is None else logp @ weight
        losses = (1 - a.smoothing) * losses - np.where(kept, spread, 0) * (a.smoothing / logits.shape[1])
    np.copyto(outs[0], losses, casting="unsafe")
    np.copyto(outs[1], own, casting="unsafe")


@numpy_kernel("counted_mean")
def _counted_mean(attrs: Any, out: Any, losses: Any, counts: Any) -> None:
    wide = np.float64
    total = np.add.reduce(counts, dtype=wide)
    out[...] = np.add.reduce(losses, dtype=wide) / (total if total else 1.0)


@numpy_kernel("cross_entropy_grad")
def _cross_entropy_grad(a: Any, out: Any, g: Any, logits: Any, target: Any, weight: Any) -> None:
    logp, safe, own, kept = _parts(a, logits, target, weight)
    p = np.exp(logp)
    share = (1 - a.smoothing) * own
    total = share
    if a.smoothing:
        each = a.smoothing / logits.shape[1]
        total = share + kept * (each * (logits.shape[1] if weight is None else weight.sum()))
        p = p * total[:, None] - kept[:, None] * (each if weight is None else each * weight)
    else:
        p *= total[:, None]
    p[np.arange(len(safe)), safe] -= share
    p *= g[:, None]
    p[~kept] = 0
    np.copyto(out, p, casting="unsafe")
