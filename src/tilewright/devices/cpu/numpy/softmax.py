"""Softmax in NumPy, in float32 at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _shifted(axis: int, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    return x - np.maximum.reduce(x, axis, keepdims=True) if x.shape[axis] else x


@numpy_kernel("softmax")
def _softmax(axis: Any, out: Any, x: Any) -> None:
    e = np.exp(_shifted(axis, x))
    np.divide(e, e.sum(axis, keepdims=True), out=out, casting="unsafe")


@numpy_kernel("log_softmax")
def _log_softmax(axis: Any, out: Any, x: Any) -> None:
    s = _shifted(axis, x)
    np.subtract(s, np.log(np.exp(s).sum(axis, keepdims=True)), out=out, casting="unsafe")
