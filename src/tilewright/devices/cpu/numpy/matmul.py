"""Matrix products through NumPy's BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel
from tilewright.devices.cpu.numpy._blas import alone
from tilewright.devices.cpu.numpy._epilogue import activate


def _work(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x


@numpy_kernel("matmul")
@alone
def _matmul(a: Any, out: Any, x: Any, y: Any) -> None:
    x = np.swapaxes(x, -1, -2) if a.ta else x
    y = np.swapaxes(y, -1, -2) if a.tb else y
    if _work(x) is x:
        np.matmul(x, y, out=out)
    else:
        np.copyto(out, _work(x) @ _work(y), casting="unsafe")


@numpy_kernel("linear")
@alone
def _linear(a: Any, out: Any, x: Any, w: Any, b: Any) -> None:
    y = out if _work(x) is x else np.empty(out.shape, np.float32)
    np.matmul(_work(x), _work(w).T, out=y)
    if b is not None:
        y += b
    if a.activation is not None:
        activate(y, y, a.activation, a.alpha, a.beta)
    if y is not out:
        np.copyto(out, y, casting="unsafe")
