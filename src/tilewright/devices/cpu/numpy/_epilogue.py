"""Activations and their gradients in NumPy, and what a kernel does to its output last: bias, residual, activation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.cpu.numpy._blocks import elementwise


def epilogue(y: np.ndarray, bias: Any, residual: Any, activation: str | None, alpha: float, beta: float) -> None:
    """y (N, C, spatial...) := activation(y + bias + residual)."""
    if bias is not None:
        y += bias.reshape(1, -1, *[1] * (y.ndim - 2))
    if residual is not None:
        y += residual
    if activation is not None:
        elementwise(lambda o, v: activate(o, v, activation, alpha, beta), y, y)


def choose(out: np.ndarray, mask: np.ndarray, a: Any, b: Any) -> None:
    """out := a where the mask (bool) holds, else b, all of out's type. By bits: np.where branches at every element, which on
    random masks is three times slower. `out` may be b."""
    kind = f"u{out.itemsize}"
    result = out.view(kind)
    a, b = np.asarray(a, out.dtype).view(kind), np.asarray(b, out.dtype).view(kind)
    bits = mask.astype(kind)
    np.negative(bits, out=bits)
    np.bitwise_xor(b, bits & (a ^ b), out=result)


# Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969).
_SMALL_P = (3.20937758913846947e3, 3.77485237685302021e2, 1.13864154151050156e2, 3.16112374387056560, 1.85777706184603153e-1)
_SMALL_Q = (2.84423683343917062e3, 1.28261652607737228e3, 2.44024637934444173e2, 2.36012909523441209e1, 1.0)
_MIDDLE_P = (
    1.23033935479799725e3, 2.05107837782607147e3, 1.71204761263407058e3, 8.81952221241769090e2, 2.98635138197400131e2,
    6.61191906371416295e1, 8.88314979438837594, 5.64188496988670089e-1, 2.15311535474403846e-8,
)  # fmt: skip
_MIDDLE_Q = (
    1.23033935480374942e3, 3.43936767414372164e3, 4.36261909014324716e3, 3.29079923573345963e3, 1.62138957456669019e3,
    5.37181101862009858e2, 1.17693950891312499e2, 1.57449261107098347e1, 1.0,
)  # fmt: skip
_LARGE_P = (
    -6.58749161529837803e-4, -1.60837851487422766e-2, -1.25781726111229246e-1, -3.60344899949804439e-1, -3.05326634961232344e-1,
    -1.63153871373020978e-2,
)  # fmt: skip
_LARGE_Q = (2.33520497626869185e-3, 6.05183413124413191e-2, 5.27905102951428412e-1, 1.87295284992346047, 2.56852019228982242, 1.0)


def _ratio(x: np.ndarray, p: tuple[float, ...], q: tuple[float, ...]) -> np.ndarray:
    top, bottom = np.full_like(x, p[-1]), np.full_like(x, q[-1])
    for c in p[-2::-1]:
        top *= x
        top += c
    for c in q[-2::-1]:
        bottom *= x
        bottom += c
    top /= bottom
    return top


def _middle(y: np.ndarray) -> np.ndarray:
    """erfc(y) for y from 0.46875 to 4; beyond, still right to 1e-8."""
    out = y * y
    np.negative(out, out=out)
    np.exp(out, out=out)
    out *= _ratio(y, _MIDDLE_P, _MIDDLE_Q)
    return out


def erf(x: np.ndarray, complement: bool = False) -> np.ndarray:
    """The error function, or 1 minus it, in x's type (float32 or float64) to about one unit in the last place."""
    y = np.abs(x)
    near = np.minimum(y, 0.46875)
    out = x * _ratio(near * near, _SMALL_P, _SMALL_Q)  # NaN stays
    if complement:
        np.subtract(1, out, out=out)
    tail = _middle(np.clip(y, 0.46875, 30))  # erfc(30) is 0 in float64
    if x.dtype == np.float64 and (y > 4).any():
        v = np.clip(y, 4, 30)
        inverse = 1 / (v * v)
        large = np.exp(-v * v) / v * (1 / math.sqrt(math.pi) + inverse * _ratio(inverse, _LARGE_P, _LARGE_Q))
        choose(tail, y > 4, large, tail)
    far = np.subtract(1, tail)
    if complement:
        np.add(1, np.copysign(far, -x), out=far)
        choose(far, x > 0, tail, far)
    else:
        np.copysign(far, x, out=far)
    choose(out, y > 0.46875, far, out)
    return out


def _sigmoid(out: np.ndarray, x: np.ndarray) -> np.ndarray:
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


def _softplus(x: np.ndarray) -> np.ndarray:
    out = np.abs(x)
    np.negative(out, out=out)
    np.exp(out, out=out)
    np.log1p(out, out=out)
    out += np.maximum(x, 0)
    return out


def _line(x: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    out = x * alpha
    out += beta
    return out


def _elu(x: np.ndarray, alpha: float) -> np.ndarray:
    low = np.expm1(np.minimum(x, 0))
    low *= alpha
    low += np.maximum(x, 0)
    return low


_GELU = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _gelu_inner(x: np.ndarray) -> np.ndarray:
    inner = x * x
    inner *= _CUBE
    inner += 1
    inner *= x
    inner *= _GELU
    return np.tanh(inner, out=inner)


def activate(out: np.ndarray, x: np.ndarray, name: str, alpha: float, beta: float) -> None:
    """out := activation(x); `out` may be `x`. Half types are computed in float32."""
    if out.dtype.itemsize < 4:
        wide = x.astype(np.float32)
        activate(wide, wide, name, alpha, beta)
        np.copyto(out, wide, casting="unsafe")
    elif name == "relu":
        np.maximum(x, 0, out=out)
    elif name == "relu6":
        np.clip(x, 0, 6, out=out)
    elif name == "hard_tanh":
        np.clip(x, alpha, beta, out=out)
    elif name == "leaky_relu":
        low = np.minimum(x, 0)
        low *= alpha
        np.add(low, np.maximum(x, 0), out=out)
    elif name == "tanh":
        np.tanh(x, out=out)
    elif name == "sigmoid":
        _sigmoid(out, x)
    elif name == "elu":
        np.copyto(out, _elu(x, alpha))
    elif name == "selu":
        np.multiply(_elu(x, alpha), beta, out=out)
    elif name == "silu":
        np.multiply(x, _sigmoid(np.empty_like(x), x), out=out)
    elif name == "gelu":
        half = erf(x * -math.sqrt(0.5), complement=True)
        half *= 0.5
        np.multiply(x, half, out=out)
    elif name == "gelu_tanh":
        inner = _gelu_inner(x)
        inner += 1
        inner *= 0.5
        np.multiply(x, inner, out=out)
    elif name == "hard_sigmoid":
        np.clip(_line(x, alpha, beta), 0, 1, out=out)
    elif name == "hard_swish":
        line = _line(x, alpha, beta)
        np.multiply(x, np.clip(line, 0, 1, out=line), out=out)
    elif name == "softplus":
        np.copyto(out, _softplus(x))
    elif name == "logsigmoid":
        np.negative(_softplus(-x), out=out)
    elif name == "softsign":
        np.divide(x, np.abs(x) + 1, out=out)
    elif name == "mish":
        np.multiply(x, np.tanh(_softplus(x)), out=out)
    else:
        raise NotImplementedError(name)


def activation_grad(out: np.ndarray, g: np.ndarray, s: np.ndarray, name: str, alpha: float, beta: float) -> None:
    """out := g times the activation's derivative, from its output or input `s` (see `tilewright.ops._activation`)."""
    if name in ("relu", "relu6", "hard_tanh"):
        if name == "relu":
            pass_ = s <= 0
            np.logical_not(pass_, out=pass_)  # NaN lets the gradient through
        else:
            low, high = (0.0, 6.0) if name == "relu6" else (alpha, beta)
            pass_ = s > low
            np.logical_and(pass_, s < high, out=pass_)
        np.multiply(g, pass_, out=out)
    elif name == "tanh":
        slope = s * s
        np.subtract(1, slope, out=slope)
        np.multiply(g, slope, out=out)
    elif name == "sigmoid":
        slope = 1 - s
        slope *= s
        np.multiply(g, slope, out=out)
    elif name == "leaky_relu":
        choose(out, s <= 0, g * alpha, g)
    elif name in ("elu", "selu"):
        slope = np.exp(np.minimum(s, 0))
        slope *= alpha
        choose(slope, s <= 0, slope, 1)
        if name == "selu":
            slope *= beta
        np.multiply(g, slope, out=out)
    elif name == "silu":
        slope = _sigmoid(np.empty_like(s), s)
        rest = 1 - slope
        rest *= s
        rest += 1
        slope *= rest
        np.multiply(g, slope, out=out)
    elif name == "gelu":
        slope = np.exp(s * s * -0.5)
        slope *= s
        slope *= 1 / math.sqrt(2 * math.pi)
        cdf = erf(s * -math.sqrt(0.5), complement=True)
        cdf *= 0.5
        slope += cdf
        np.multiply(g, slope, out=out)
    elif name == "gelu_tanh":
        t = _gelu_inner(s)
        inner = s * s
        inner *= 3 * _CUBE
        inner += 1
        inner *= s
        inner *= _GELU
        inner *= 1 - t
        inner += 1
        t += 1
        t *= 0.5
        t *= inner
        np.multiply(g, t, out=out)
    elif name == "hard_sigmoid":
        line = _line(s, alpha, beta)
        pass_ = line > 0
        np.logical_and(pass_, line < 1, out=pass_)
        np.multiply(g, pass_ * s.dtype.type(alpha), out=out)
    elif name == "hard_swish":
        line = _line(s, alpha, beta)
        slope = _line(s, 2 * alpha, beta)
        choose(slope, line < 1, slope, 1)
        choose(slope, line <= 0, 0, slope)
        np.multiply(g, slope, out=out)
    elif name == "softplus":
        np.multiply(g, _sigmoid(np.empty_like(s), s), out=out)
    elif name == "logsigmoid":
        np.multiply(g, _sigmoid(np.empty_like(s), -s), out=out)
    elif name == "softsign":
        slope = np.abs(s)
        slope += 1
        slope *= slope
        np.divide(g, slope, out=out)
    elif name == "mish":
        t = np.tanh(_softplus(s))
        slope = t * t
        np.subtract(1, slope, out=slope)
        slope *= s
        slope *= _sigmoid(np.empty_like(s), s)
        slope += t
        np.multiply(g, slope, out=out)
    else:
        raise NotImplementedError(name)
