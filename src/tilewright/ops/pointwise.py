"""Element-by-element arithmetic, comparison and activations, with NumPy's broadcasting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Spec, spec
from tilewright.errors import ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import call, operands
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor


def broadcast(name: str, *specs: Spec) -> tuple[tuple[int, ...], str]:
    """The common shape and layout: channels-last where an operand of full rank is. Raises ShapeError."""
    first = specs[0]
    if all(s.shape == first.shape for s in specs):
        shape = first.shape
    else:
        try:
            shape = np.broadcast_shapes(*[s.shape for s in specs])
        except ValueError:
            raise ShapeError(
                f"{name}: shapes {' and '.join(str(s.shape) for s in specs)} do not broadcast; along each axis, counted from the "
                "last, sizes must be equal or 1"
            ) from None
    last = any(s.layout == CHANNELS_LAST and s.ndim == len(shape) for s in specs)
    return shape, CHANNELS_LAST if last else CONTIGUOUS


def _binary_infer(name: str) -> Any:
    def infer(attrs: Any, a: Spec, b: Spec) -> Spec:
        if a is b:
            return a
        shape, layout = broadcast(name, a, b)
        return spec(shape, a.dtype, layout)

    return infer


def _binary_samples() -> list[Sample]:
    out = [
        Sample((Arg(x), Arg(y, fill="positive")))
        for x, y in (
            ((2, 3), (2, 3)),
            ((), ()),
            ((4,), ()),
            ((2, 1, 4), (3, 1)),
            ((0, 3), (1, 3)),
            ((1, 1), (3, 5)),
        )
    ]
    out.append(Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST), Arg((2, 3, 4, 5), fill="positive"))))
    out.append(
        Sample(
            (
                Arg((2, 3, 4, 5), layout=CHANNELS_LAST),
                Arg((1, 3, 1, 1), layout=CHANNELS_LAST, fill="positive"),
            )
        )
    )
    return out


def _binary_errors(name: str) -> Any:
    def errors() -> list[ErrorSample]:
        from tilewright.tensor import zeros

        return [
            ErrorSample(
                lambda: globals()[name](zeros(2, 3), zeros(4)),
                ShapeError,
                f"{name}: shapes (2, 3) and (4,) do not broadcast; along each axis, counted from the last, sizes must be equal or 1",
            )
        ]

    return errors


def _add_vjp(node: Any, g: Tensor) -> Any:
    a, b = node.specs
    return (unbroadcast(g, a) if node.needs[0] else None, unbroadcast(g, b) if node.needs[1] else None)


def _mul_vjp(node: Any, g: Tensor) -> Any:
    a, b = node.inputs
    return (
        unbroadcast(mul(g, b), node.specs[0]) if node.needs[0] else None,
        unbroadcast(mul(g, a), node.specs[1]) if node.needs[1] else None,
    )


ADD = Op(
    "add",
    _binary_infer("add"),
    lambda attrs, a, b: a + b,
    _add_vjp,
    _binary_samples,
    _binary_errors("add"),
    saves=(),
)
MUL = Op("mul", _binary_infer("mul"), lambda attrs, a, b: a * b, _mul_vjp, _binary_samples, _binary_errors("mul"))


def add(a: Any, b: Any) -> Tensor:
    """a + b, broadcast and promoted."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands("add", a, b)
    return call(ADD, (a, b))


def mul(a: Any, b: Any) -> Tensor:
    """a * b, broadcast and promoted."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands("mul", a, b)
    return call(MUL, (a, b))


# -- activations -------------------------------------------------------------------------------------------------------


def _same(attrs: Any, x: Spec, *others: Spec) -> Spec:
    return x


def _relu_vjp(node: Any, g: Tensor) -> Tensor:
    return activation_grad("relu", g, node.outputs[0])


RELU = Op(
    "relu",
    _same,
    lambda attrs, x: _activation.reference("relu", 0, 0, x),
    _relu_vjp,
    lambda: (
        [Sample((Arg(s, fill="kinked"),)) for s in ((2, 3), (), (0,), (5, 1, 3))]
        + [Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill="kinked"),))]
    ),
    saves=(),
    saves_outputs=True,
)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN. The derivative at 0 is 0."""
    return call(RELU, (x,))


_FROM_OUTPUT = {
    "relu": lambda g, y: g * (y > 0),
    "relu6": lambda g, y: g * ((y > 0) & (y < 6)),
    "tanh": lambda g, y: g * (1 - y * y),
    "sigmoid": lambda g, y: g * y * (1 - y),
}


def _grad_samples(name: str) -> list[Sample]:
    fills = {
        "relu": ("kinked", 0.0, 1.0),
        "relu6": ("uniform", 0.1, 5.9),
        "tanh": ("uniform", -0.9, 0.9),
        "sigmoid": ("uniform", 0.1, 0.9),
    }
    fill, low, high = fills[name]
    out = [Sample((Arg(s), Arg(s, fill=fill, low=low, high=high))) for s in ((2, 3), (), (0,))]
    return [
        *out,
        Sample(
            (
                Arg((2, 3, 4, 5), layout=CHANNELS_LAST),
                Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill=fill, low=low, high=high),
            )
        ),
    ]


def _grad_vjp(name: str) -> Any:
    def vjp(node: Any, v: Tensor) -> Any:
        g, y = node.inputs
        dg = activation_grad(name, v, y) if node.needs[0] else None
        dy = None
        if node.needs[1] and name == "tanh":
            dy = mul(mul(mul(v, g), y), -2.0)
        elif node.needs[1] and name == "sigmoid":
            dy = mul(mul(v, g), add(mul(y, -2.0), 1.0))
        return dg, dy

    return vjp


GRADS = {
    name: Op(
        f"{name}_grad",
        _same,
        (lambda f: lambda attrs, g, y: f(g, y))(f),
        _grad_vjp(name),
        (lambda n: lambda: _grad_samples(n))(name),
    )
    for name, f in _FROM_OUTPUT.items()
}


def activation_grad(name: str, g: Tensor, y: Tensor) -> Tensor:
    """g times the derivative of relu, relu6, tanh or sigmoid, from the activation's output y."""
    if g.spec.layout != y.spec.layout:
        g = g.to(layout=y.spec.layout)
    return call(GRADS[name], (g, y))


def activate(x: Tensor, name: str, alpha: float, beta: float) -> Tensor:
    """The activation of that name as an op of its own."""
    if name == "relu":
        return relu(x)
    raise NotImplementedError(name)


_ = math
