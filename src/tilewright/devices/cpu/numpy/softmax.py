"""Softmax in NumPy, in float32 at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _shifted(axis: int, x: np.ndarray) -> np.ndarray:
    return np.subtract(x, np.maximum.reduce(x, axis, keepdims=True)) if x.shape[axis] else x.copy()


@numpy_kernel("softmax")
def _softmax(axis: Any, out: Any, x: Any) -> None:
    e = _shifted(axis, _wide(x))
    np.exp(e, out=e)
    np.divide(e, np.add.reduce(e, axis, keepdims=True), out=out, casting="unsafe")


@numpy_kernel("log_softmax")
def _log_softmax(axis: Any, out: Any, x: Any) -> None:
    s = _shifted(axis, _wide(x))
    np.subtract(s, np.log(np.add.reduce(np.exp(s), axis, keepdims=True)), out=out, casting="unsafe")


@numpy_kernel("softmax_grad")
def _softmax_grad(axis: Any, out: Any, g: Any, y: Any) -> None:
    g, y = _wide(g), _wide(y)
    product = g * y
    product -= y * np.add.reduce(product, axis, keepdims=True)
    np.copyto(out, product, casting="unsafe")


@numpy_kernel("log_softmax_grad")
def _log_softmax_grad(axis: Any, out: Any, g: Any, y: Any) -> None:
    g = _wide(g)
    e = np.exp(_wide(y))
    e *= np.add.reduce(g, axis, keepdims=True)
    np.subtract(g, e, out=out, casting="unsafe")
