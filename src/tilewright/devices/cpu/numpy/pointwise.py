"""Pointwise ops as NumPy ufuncs writing straight into the output."""

from __future__ import annotations

import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


@numpy_kernel("add")
def _add(attrs, out, a, b):
    np.add(a, b, out=out)


@numpy_kernel("mul")
def _mul(attrs, out, a, b):
    np.multiply(a, b, out=out)


@numpy_kernel("relu")
def _relu(attrs, out, x):
    np.maximum(x, 0, out=out)


@numpy_kernel("relu_grad")
def _relu_grad(attrs, out, g, y):
    np.multiply(g, y > 0, out=out)


@numpy_kernel("relu6_grad")
def _relu6_grad(attrs, out, g, y):
    np.multiply(g, (y > 0) & (y < 6), out=out)


@numpy_kernel("tanh_grad")
def _tanh_grad(attrs, out, g, y):
    np.multiply(y, y, out=out)
    np.subtract(1, out, out=out)
    np.multiply(out, g, out=out)


@numpy_kernel("sigmoid_grad")
def _sigmoid_grad(attrs, out, g, y):
    np.subtract(1, y, out=out)
    np.multiply(out, y, out=out)
    np.multiply(out, g, out=out)
