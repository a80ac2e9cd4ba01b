"""Movement ops in NumPy."""

from __future__ import annotations

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


@numpy_kernel("to_layout", "copy", "cast")
def _copy(attrs, out, x):
    np.copyto(out, x, casting="unsafe")


@numpy_kernel("reshape")
def _reshape(attrs, out, x):
    np.copyto(out, x.reshape(attrs))


@numpy_kernel("expand")
def _expand(attrs, out, x):
    np.copyto(out, np.broadcast_to(x, attrs))
