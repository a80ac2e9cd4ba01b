"""Element-by-element arithmetic, comparison and activations, with NumPy's broadcasting.

At a kink the derivative is PyTorch's: relu, relu6, hard_sigmoid, hard_swish and clamp take 0 outside and at the bounds
where the function turns flat (clamp itself passes the gradient at its bounds); abs and sign take 0 at 0; maximum and
minimum share it equally between equal operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Spec, spec
from tilewright.dtypes import DType, bool_, float32
from tilewright.errors import ArgumentError, ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import as_tensor, call, need_tensor, operands, scalar
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor

SHARED = ("broadcast", "activation_grad", "activate")

# -- two operands ------------------------------------------------------------------------------------------------------


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


def _binary_infer(name: str, result: DType | None) -> Callable[..., Spec]:
    def infer(attrs: Any, a: Spec, b: Spec) -> Spec:
        if a is b and result is None:
            return a
        shape, layout = broadcast(name, a, b)
        return spec(shape, result or a.dtype, layout)

    return infer


_SHAPES = (((2, 3), (2, 3)), ((), ()), ((4,), ()), ((), (4,)), ((2, 1, 4), (3, 1)), ((0, 3), (1, 3)), ((1, 1), (3, 5)))


def _binary_samples(fill_a: str, fill_b: str, grad: bool) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        out = [Sample((Arg(x, fill=fill_a), Arg(y, fill=fill_b)), grad=grad) for x, y in _SHAPES]
        four = (2, 3, 4, 5)
        for b in (four, (1, 3, 1, 1), (2, 3, 1, 1)):
            out.append(Sample((Arg(four, layout=CHANNELS_LAST, fill=fill_a), Arg(b, layout=CHANNELS_LAST, fill=fill_b)), grad=grad))
        out.append(Sample((Arg(four, layout=CHANNELS_LAST, fill=fill_a), Arg(four, fill=fill_b)), grad=grad, note="two layouts"))
        large = Arg((2, 32, 24, 25), layout=CHANNELS_LAST, fill=fill_a)
        for b in (large.shape, (1, 32, 1, 1)):
            out.append(Sample((large, Arg(b, layout=CHANNELS_LAST, fill=fill_b)), grad=False, note="large"))
        if fill_a != "bool":
            out.append(Sample((Arg((2, 3), "int32", fill="int", low=1, high=9), Arg((3,), "int32", fill="int", low=1, high=9)), grad=False))
        return out

    return samples


def _binary_errors(name: str) -> Callable[[], list[ErrorSample]]:
    def errors() -> list[ErrorSample]:
        from tilewright.tensor import zeros

        text = f"{name}: shapes (2, 3) and (4,) do not broadcast; along each axis, counted from the last, sizes must be equal or 1"
        return [ErrorSample(lambda: globals()[name](zeros(2, 3), zeros(4)), ShapeError, text)]

    return errors


def _define(
    name: str,
    reference: Any,
    vjp: Any = None,
    *,
    fills: tuple[str, str] = ("normal", "positive"),
    result: DType | None = None,
    saves: Any = None,
) -> Op:
    return Op(
        name,
        _binary_infer(name, result),
        lambda attrs, a, b: reference(a, b),
        vjp,
        _binary_samples(*fills, grad=vjp is not None),
        _binary_errors(name),
        saves=saves if vjp is not None else (),
    )


def _pair_vjp(left: Any, right: Any) -> Any:
    """vjp from two functions (g, a, b, node) -> gradient before the broadcast is undone."""

    def vjp(node: Any, g: Tensor) -> Any:
        a, b = node.inputs  # None where the op saves nothing
        return (
            unbroadcast(left(g, a, b), node.specs[0]) if node.needs[0] else None,
            unbroadcast(right(g, a, b), node.specs[1]) if node.needs[1] else None,
        )

    return vjp


def _share(test: Any) -> Any:
    """The gradient of maximum or minimum: to the operand chosen, half to each of two equal ones."""

    def half(chosen: Tensor, equal_: Tensor, g: Tensor) -> Tensor:
        return mul(g, add(chosen.to(dtype=g.dtype), mul(equal_.to(dtype=g.dtype), 0.5)))

    return _pair_vjp(lambda g, a, b: half(test(a, b), equal(a, b), g), lambda g, a, b: half(test(b, a), equal(a, b), g))


def _nan_max(a: Any, b: Any, pick: Any) -> Any:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, pick(a, b)).astype(a.dtype) if a.dtype.kind not in "iub" else pick(a, b)


ADD = _define("add", lambda a, b: a + b, _pair_vjp(lambda g, a, b: g, lambda g, a, b: g), saves=())
SUB = _define("sub", lambda a, b: a - b, _pair_vjp(lambda g, a, b: g, lambda g, a, b: neg(g)), saves=())
MUL = _define("mul", lambda a, b: a * b, _pair_vjp(lambda g, a, b: mul(g, b), lambda g, a, b: mul(g, a)))
DIV = _define(
    "div",
    lambda a, b: a / b if a.dtype.kind not in "iub" else a // b,
    _pair_vjp(lambda g, a, b: div(g, b), lambda g, a, b: neg(div(mul(g, a), mul(b, b)))),
)
FLOOR_DIV = _define("floor_div", lambda a, b: a // b)
REMAINDER = _define("remainder", lambda a, b: a % b)
POW = _define(
    "pow",
    lambda a, b: a**b,
    _pair_vjp(
        lambda g, a, b: mul(g, where(equal(b, 0.0), 0.0, mul(b, pow(a, sub(b, 1.0))))),
        lambda g, a, b: mul(g, where(equal(a, 0.0), 0.0, mul(pow(a, b), log(where(equal(a, 0.0), 1.0, a))))),
    ),
    fills=("positive", "positive"),
)
MAXIMUM = _define("maximum", lambda a, b: _nan_max(a, b, np.maximum), _share(lambda a, b: greater(a, b)), fills=("normal", "normal"))
MINIMUM = _define("minimum", lambda a, b: _nan_max(a, b, np.minimum), _share(lambda a, b: less(a, b)), fills=("normal", "normal"))
COMPARISONS = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
_COMPARE = {name: _define(name, f, result=bool_, fills=("distinct", "distinct")) for name, f in COMPARISONS.items()}
LOGICAL = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}
_LOGIC = {name: _define(name, f, result=bool_, fills=("normal", "normal")) for name, f in LOGICAL.items()}


def _two(op: Op, a: Any, b: Any) -> Tensor:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands(op.name, a, b)
    return call(op, (a, b))


def add(a: Any, b: Any) -> Tensor:
    """a + b, broadcast and promoted."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands("add", a, b)
    return call(ADD, (a, b))


def sub(a: Any, b: Any) -> Tensor:
    """a - b, broadcast and promoted."""
    return _two(SUB, a, b)


def mul(a: Any, b: Any) -> Tensor:
    """a * b, broadcast and promoted."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = operands("mul", a, b)
    return call(MUL, (a, b))


def div(a: Any, b: Any) -> Tensor:
    """a / b, broadcast and promoted; integers are divided as float32."""
    a, b = operands("div", a, b)
    if not a.dtype.is_floating:
        a, b = a.to(dtype=float32), b.to(dtype=float32)
    return call(DIV, (a, b))


def floor_div(a: Any, b: Any) -> Tensor:
    """The largest integer not above a / b, in the operands' dtype. No gradient."""
    return _two(FLOOR_DIV, a, b)


def remainder(a: Any, b: Any) -> Tensor:
    """a - b * floor(a / b): the sign is b's, as in Python. No gradient."""
    return _two(REMAINDER, a, b)


def pow(a: Any, b: Any) -> Tensor:
    """a to the power b. The derivative in a is 0 where b is 0, and the one in b is 0 where a is 0."""
    if isinstance(b, (int, float)) and not isinstance(b, bool) and isinstance(a, Tensor):
        if b == 2:
            return mul(a, a)
        if b == 1:
            return a
        if b == 0.5:
            return sqrt(a)
    return _two(POW, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of a and b; NaN where either is."""
    return _two(MAXIMUM, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of a and b; NaN where either is."""
    return _two(MINIMUM, a, b)


def equal(a: Any, b: Any) -> Tensor:
    """a == b, bool."""
    return _two(_COMPARE["equal"], a, b)


def not_equal(a: Any, b: Any) -> Tensor:
    """a != b, bool."""
    return _two(_COMPARE["not_equal"], a, b)


def less(a: Any, b: Any) -> Tensor:
    """a < b, bool."""
    return _two(_COMPARE["less"], a, b)


def less_equal(a: Any, b: Any) -> Tensor:
    """a <= b, bool."""
    return _two(_COMPARE["less_equal"], a, b)


def greater(a: Any, b: Any) -> Tensor:
    """a > b, bool."""
    return _two(_COMPARE["greater"], a, b)


def greater_equal(a: Any, b: Any) -> Tensor:
    """a >= b, bool."""
    return _two(_COMPARE["greater_equal"], a, b)


def logical_and(a: Any, b: Any) -> Tensor:
    """Both nonzero, bool."""
    return _two(_LOGIC["logical_and"], a, b)


def logical_or(a: Any, b: Any) -> Tensor:
    """Either nonzero, bool."""
    return _two(_LOGIC["logical_or"], a, b)


def logical_xor(a: Any, b: Any) -> Tensor:
    """Exactly one nonzero, bool."""
    return _two(_LOGIC["logical_xor"], a, b)


# -- one operand -------------------------------------------------------------------------------------------------------

_POINTS = ((2, 3), (), (0,), (1,), (5, 1, 3))


def _unary(
    name: str,
    reference: Callable[[np.ndarray], Any],
    vjp: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    output: bool = False,
    fill: str = "kinked",
    low: float = 0.0,
    high: float = 1.0,
    result: DType | None = None,
) -> Op:
    """An op on one operand; `vjp(g, x)` reads the input, or with `output` the result."""

    def back(node: Any, g: Tensor) -> Tensor:
        return vjp(g, node.outputs[0] if output else node.inputs[0])  # type: ignore[misc]

    def samples() -> list[Sample]:
        shapes = [Arg(s, fill=fill, low=low, high=high) for s in _POINTS]
        shapes.append(Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill=fill, low=low, high=high))
        large = Sample((Arg((2, 32, 24, 25), layout=CHANNELS_LAST, fill=fill, low=low, high=high),), grad=False, note="large")
        return [*[Sample((a,), grad=vjp is not None) for a in shapes], large]

    def infer(attrs: Any, x: Spec) -> Spec:
        return x if result is None else x.like(dtype=result)

    return Op(
        name, infer, lambda attrs, x: reference(x), None if vjp is None else back, samples, saves=() if output or vjp is None else (0,),
        saves_outputs=output and vjp is not None,
    )  # fmt: skip


def _erf_reference(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x


_2_SQRT_PI = 2 / math.sqrt(math.pi)
UNARY: dict[str, Op] = {
    "neg": _unary("neg", np.negative, lambda g, x: neg(g)),
    "abs": _unary("abs", np.abs, lambda g, x: mul(g, sign(x))),
    "sign": _unary("sign", np.sign, lambda g, x: mul(g, 0.0)),
    "exp": _unary("exp", np.exp, lambda g, y: mul(g, y), output=True),
    "expm1": _unary("expm1", np.expm1, lambda g, y: mul(g, add(y, 1.0)), output=True),
    "log": _unary("log", np.log, lambda g, x: div(g, x), fill="positive"),
    "log1p": _unary("log1p", np.log1p, lambda g, x: div(g, add(x, 1.0)), fill="positive"),
    "sqrt": _unary("sqrt", np.sqrt, lambda g, y: div(mul(g, 0.5), y), output=True, fill="positive"),
    "rsqrt": _unary("rsqrt", lambda x: 1 / np.sqrt(x), lambda g, y: mul(mul(g, -0.5), mul(y, mul(y, y))), output=True, fill="positive"),
    "reciprocal": _unary("reciprocal", lambda x: 1 / x, lambda g, y: neg(mul(g, mul(y, y))), output=True, fill="positive"),
    "floor": _unary("floor", np.floor, lambda g, x: mul(g, 0.0)),
    "ceil": _unary("ceil", np.ceil, lambda g, x: mul(g, 0.0)),
    "round": _unary("round", np.rint, lambda g, x: mul(g, 0.0)),
    "sin": _unary("sin", np.sin, lambda g, x: mul(g, cos(x))),
    "cos": _unary("cos", np.cos, lambda g, x: neg(mul(g, sin(x)))),
    "erf": _unary("erf", _erf_reference, lambda g, x: mul(g, mul(exp(neg(mul(x, x))), _2_SQRT_PI))),
    "isnan": _unary("isnan", np.isnan, result=bool_),
    "isinf": _unary("isinf", np.isinf, result=bool_),
    "isfinite": _unary("isfinite", np.isfinite, result=bool_),
    "logical_not": _unary("logical_not", np.logical_not, result=bool_),
}


def _one(name: str, x: Any, floating: bool = True) -> Tensor:
    if not isinstance(x, Tensor):
        need_tensor(name, x=x)
    if floating and x.spec.dtype.kind != "f":
        x = x.to(dtype=float32)
    return call(UNARY[name], (x,))


def neg(x: Tensor) -> Tensor:
    """-x."""
    return _one("neg", x, False)


def abs(x: Tensor) -> Tensor:
    """|x|."""
    return _one("abs", x, False)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays. The derivative is 0."""
    return _one("sign", x, False)


def exp(x: Tensor) -> Tensor:
    """e to the power x. Integers become float32, here and in the functions below."""
    return _one("exp", x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, exact near 0."""
    return _one("expm1", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm; -inf at 0 and NaN below."""
    return _one("log", x)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), exact near 0."""
    return _one("log1p", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root; NaN below 0."""
    return _one("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return _one("rsqrt", x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return _one("reciprocal", x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return mul(x, x)


def floor(x: Tensor) -> Tensor:
    """The largest integer not above x. The derivative is 0."""
    return _one("floor", x)


def ceil(x: Tensor) -> Tensor:
    """The smallest integer not below x. The derivative is 0."""
    return _one("ceil", x)


def round(x: Tensor) -> Tensor:
    """The nearest integer, halves to even. The derivative is 0."""
    return _one("round", x)


def sin(x: Tensor) -> Tensor:
    """Sine of x in radians."""
    return _one("sin", x)


def cos(x: Tensor) -> Tensor:
    """Cosine of x in radians."""
    return _one("cos", x)


def erf(x: Tensor) -> Tensor:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    return _one("erf", x)


def isnan(x: Tensor) -> Tensor:
    """Is it NaN, bool."""
    return _one("isnan", x)


def isinf(x: Tensor) -> Tensor:
    """Is it infinite, bool."""
    return _one("isinf", x)


def isfinite(x: Tensor) -> Tensor:
    """Is it neither infinite nor NaN, bool."""
    return _one("isfinite", x)


def logical_not(x: Tensor) -> Tensor:
    """Is it zero, bool."""
    return _one("logical_not", x, False)


# -- where and clamp ---------------------------------------------------------------------------------------------------


def _where_infer(attrs: Any, c: Spec, a: Spec, b: Spec) -> Spec:
    shape, layout = broadcast("where", c, a, b)
    return spec(shape, a.dtype, layout)


def _where_vjp(node: Any, g: Tensor) -> Any:
    c = node.inputs[0]
    zero = scalar(0.0, g.spec.dtype, g.device)
    return (
        None,
        unbroadcast(call(WHERE, (c, g, zero)), node.specs[1]) if node.needs[1] else None,
        unbroadcast(call(WHERE, (c, zero, g)), node.specs[2]) if node.needs[2] else None,
    )


WHERE = Op(
    "where",
    _where_infer,
    lambda attrs, c, a, b: np.where(c, a, b),
    _where_vjp,
    lambda: [
        Sample((Arg(c, "bool", fill="bool"), Arg(a), Arg(b)))
        for c, a, b in (((2, 3), (2, 3), (2, 3)), ((3,), (2, 3), ()), ((2, 1), (), (1, 3)), ((0,), (0,), (1,)))
    ],
    saves=(0,),
)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition is nonzero, else b; all broadcast."""
    condition = as_tensor(condition)
    if condition.spec.dtype is not bool_:
        condition = not_equal(condition, 0)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = as_tensor(a).to(device=condition.device)
    a, b = operands("where", a, b)
    return call(WHERE, (condition, a, b))


def _clamp(attrs: Any, x: np.ndarray) -> np.ndarray:
    low, high = attrs
    y = x if low is None else np.where(x < low, np.asarray(low, x.dtype), x)
    return y if high is None else np.where(y > high, np.asarray(high, x.dtype), y)


def _clamp_vjp(node: Any, g: Tensor) -> Tensor:
    x = node.inputs[0]
    low, high = node.attrs
    inside = None if low is None else greater_equal(x, low)
    if high is not None:
        below = less_equal(x, high)
        inside = below if inside is None else logical_and(inside, below)
    return where(inside, g, 0.0)


CLAMP = Op(
    "clamp",
    lambda attrs, x: x,
    _clamp,
    _clamp_vjp,
    lambda: [Sample((Arg(s, fill="kinked"),), a) for s in ((2, 3), (), (0,)) for a in ((-1.0, 1.0), (0.0, None), (None, 2.0), (0.0, 6.0))],
    lambda: [_clamp_error()],
)


def _clamp_error() -> ErrorSample:
    from tilewright.tensor import zeros

    return ErrorSample(lambda: clamp(zeros(2)), ArgumentError, "clamp: min and max are both None; give at least one bound")


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """x limited to [min, max] (max wins where min > max); NaN stays. The gradient passes at the bounds."""
    if min is None and max is None:
        raise ArgumentError("clamp: min and max are both None; give at least one bound")
    kind = float if x.dtype.is_floating or isinstance(min, float) or isinstance(max, float) else int
    if kind is float and not x.dtype.is_floating:
        x = x.to(dtype=float32)
    return call(CLAMP, (x,), (None if min is None else kind(min), None if max is None else kind(max)))


# -- activations -------------------------------------------------------------------------------------------------------


def _same(attrs: Any, x: Spec, *others: Spec) -> Spec:
    return x


def _activation_samples(attrs: Any) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        args = [Arg(s, fill="kinked") for s in ((2, 3), (), (0,), (40,))] + [Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill="kinked")]
        return [*[Sample((a,), attrs) for a in args], Sample((Arg((40, 1000), fill="kinked"),), attrs, grad=False, note="large")]

    return samples


def _output_vjp(name: str) -> Any:
    return lambda node, g: activation_grad(name, g, node.outputs[0])


# Derivatives of those that need the input: (g, x, alpha, beta) -> g * f'(x), in public ops.
def _d_silu(g: Tensor, x: Tensor, a: float, b: float) -> Tensor:
    s = sigmoid(x)
    return mul(g, mul(s, add(mul(x, sub(1.0, s)), 1.0)))


def _d_gelu(g: Tensor, x: Tensor, a: float, b: float) -> Tensor:
    cdf = mul(add(erf(mul(x, math.sqrt(0.5))), 1.0), 0.5)
    pdf = mul(exp(mul(mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return mul(g, add(cdf, mul(x, pdf)))


def _d_gelu_tanh(g: Tensor, x: Tensor, a: float, b: float) -> Tensor:
    k = math.sqrt(2 / math.pi)
    t = tanh(mul(add(x, mul(mul(x, mul(x, x)), 0.044715)), k))
    inner = mul(add(mul(mul(x, x), 3 * 0.044715), 1.0), k)
    return mul(g, add(mul(add(t, 1.0), 0.5), mul(mul(mul(x, 0.5), sub(1.0, mul(t, t))), inner)))


def _d_mish(g: Tensor, x: Tensor, a: float, b: float) -> Tensor:
    t = tanh(softplus(x))
    return mul(g, add(t, mul(mul(x, sigmoid(x)), sub(1.0, mul(t, t)))))


def _inside(x: Tensor, a: float, b: float) -> Tensor:
    line = add(mul(x, a), b)
    return logical_and(greater(line, 0.0), less(line, 1.0))


def _d_hard_swish(g: Tensor, x: Tensor, a: float, b: float) -> Tensor:
    slope = where(_inside(x, a, b), add(mul(x, 2 * a), b), where(greater_equal(add(mul(x, a), b), 1.0), 1.0, 0.0))
    return mul(g, slope)


_FROM_INPUT: dict[str, Any] = {
    "leaky_relu": lambda g, x, a, b: where(greater(x, 0.0), g, mul(g, a)),
    "elu": lambda g, x, a, b: where(greater(x, 0.0), g, mul(g, mul(exp(minimum(x, 0.0)), a))),
    "silu": _d_silu,
    "gelu": _d_gelu,
    "gelu_tanh": _d_gelu_tanh,
    "hard_sigmoid": lambda g, x, a, b: where(_inside(x, a, b), mul(g, a), 0.0),
    "hard_swish": _d_hard_swish,
    "softplus": lambda g, x, a, b: mul(g, sigmoid(x)),
    "mish": _d_mish,
}


def _input_vjp(name: str) -> Any:
    return lambda node, g: _FROM_INPUT[name](g, node.inputs[0], *node.attrs)


def _activation_op(name: str) -> Op:
    output = name in _activation.FROM_OUTPUT
    return Op(
        name,
        _same,
        lambda attrs, x: _activation.reference(name, attrs[0], attrs[1], x),
        _output_vjp(name) if output else _input_vjp(name),
        _activation_samples(_activation.DEFAULTS[name]),
        saves=() if output else (0,),
        saves_outputs=output,
    )


ACTIVATIONS = {name: _activation_op(name) for name in _activation.DEFAULTS}

_FROM_OUTPUT: dict[str, Any] = {
    "relu": lambda g, y: g * (y > 0),
    "relu6": lambda g, y: g * ((y > 0) & (y < 6)),
    "tanh": lambda g, y: g * (1 - y * y),
    "sigmoid": lambda g, y: g * y * (1 - y),
}


def _grad_samples(name: str) -> Callable[[], list[Sample]]:
    fills = {"relu": ("kinked", 0.0, 1.0), "relu6": ("uniform", 0.1, 5.9), "tanh": ("uniform", -0.9, 0.9), "sigmoid": ("uniform", 0.1, 0.9)}
    fill, low, high = fills[name]

    def samples() -> list[Sample]:
        out = [Sample((Arg(s), Arg(s, fill=fill, low=low, high=high))) for s in ((2, 3), (), (0,))]
        last = Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill=fill, low=low, high=high)
        large = (Arg((40, 1000)), Arg((40, 1000), fill=fill, low=low, high=high))
        return [*out, Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST), last)), Sample(large, grad=False, note="large")]

    return samples


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


def _grad_op(name: str, f: Any) -> Op:
    return Op(f"{name}_grad", _same, lambda attrs, g, y: f(g, y), _grad_vjp(name), _grad_samples(name))


GRADS = {name: _grad_op(name, f) for name, f in _FROM_OUTPUT.items()}


def activation_grad(name: str, g: Tensor, y: Tensor) -> Tensor:
    """g times the derivative of relu, relu6, tanh or sigmoid, from the activation's output y."""
    if g.spec.layout != y.spec.layout:
        g = g.to(layout=y.spec.layout)
    return call(GRADS[name], (g, y))


def activate(x: Tensor, name: str, alpha: float | None = None, beta: float | None = None) -> Tensor:
    """The activation of that name as an op of its own; None takes its default parameters."""
    if not isinstance(x, Tensor):
        need_tensor(name, x=x)
    if x.spec.dtype.kind != "f":
        if name == "relu" and x.spec.dtype is not bool_:
            return clamp(x, 0)
        x = x.to(dtype=float32)
    if alpha is None and beta is None:
        return call(ACTIVATIONS[name], (x,), _activation.DEFAULTS[name])
    _, a, b = _activation.normalise(name, name, alpha, beta)
    return call(ACTIVATIONS[name], (x,), (a, b))


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN. The derivative at 0 is 0."""
    return activate(x, "relu")


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6); NaN stays NaN. The derivative at 0 and 6 is 0."""
    return activate(x, "relu6")


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where positive, else negative_slope * x (also the derivative at 0)."""
    return activate(x, "leaky_relu", negative_slope, 0.0)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha * (exp(x) - 1) (Clevert et al., 2016)."""
    return activate(x, "elu", alpha, 0.0)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def selu(x: Tensor) -> Tensor:
    """scale * elu(x, alpha) with the fixed point of Klambauer et al. (2017)."""
    return mul(elu(x, _SELU_ALPHA), _SELU_SCALE)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016), exact or by "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: approximate {approximate!r} must be 'none' or 'tanh'")
    return activate(x, "gelu" if approximate == "none" else "gelu_tanh")


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return activate(x, "silu")


def mish(x: Tensor) -> Tensor:
    """x * tanh(softplus(x)) (Misra, 2019)."""
    return activate(x, "mish")


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return activate(x, "sigmoid")


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return activate(x, "tanh")


def softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    """log(1 + exp(beta * x)) / beta, without overflow."""
    return activate(x, "softplus") if beta == 1.0 else div(activate(mul(x, float(beta)), "softplus"), float(beta))


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    return neg(softplus(neg(x)))


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return div(x, add(abs(x), 1.0))


def hard_sigmoid(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    """alpha * x + beta limited to [0, 1]; the derivative at and beyond the bounds is 0. ONNX's alpha is 0.2."""
    return activate(x, "hard_sigmoid", alpha, beta)


def hard_swish(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    """x * hard_sigmoid(x) (Howard et al., 2019); the derivative is 0 at the lower bound and 1 at the upper."""
    return activate(x, "hard_swish", alpha, beta)


def hard_tanh(x: Tensor, min: float = -1.0, max: float = 1.0) -> Tensor:
    """x limited to [min, max]."""
    return clamp(x, min, max)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x where positive, else weight * x; weight has one element or one per channel (axis 1) of x."""
    from tilewright.ops.movement import reshape

    if weight.size != 1:
        if x.ndim < 2 or weight.shape != (x.shape[1],):
            raise ShapeError(f"prelu: weight {weight.shape} must have one element or the {x.shape[1] if x.ndim > 1 else 0} channels of {x.shape}")
        weight = reshape(weight, (1, -1, *[1] * (x.ndim - 2)))
    return where(greater(x, 0.0), x, mul(x, weight))
