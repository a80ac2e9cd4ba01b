"""Reductions in NumPy. Half types accumulate in float32."""

from __future__ import annotations

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


@numpy_kernel("sum")
def _sum(attrs, out, x):
    if out.dtype.itemsize < 4 and x.dtype.kind not in "iub":
        np.copyto(out, x.astype(np.float32).sum(attrs.axes, keepdims=attrs.keepdims), casting="unsafe")
    else:
        np.sum(x, axis=attrs.axes, keepdims=attrs.keepdims, out=out)
