"""Element-by-element arithmetic, comparison and activations, with NumPy's broadcasting.

Types promote as `tilewright.dtypes` says, and a Python number beside a tensor takes the tensor's type where its kind
allows. Functions of real numbers (division, exp, sigmoid, ...) turn integers into float32.

At a kink the derivative is PyTorch's: relu takes 0 at 0; relu6, hard_tanh and hard_sigmoid take 0 at both bounds;
hard_swish 0 at the lower and 1 at the upper; leaky_relu and prelu the negative slope and elu and selu the left-hand
derivative at 0; clamp lets the gradient through at its bounds; abs and sign take 0 at 0; maximum and minimum share it
equally between equal operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Spec, spec
from tilewright.dtypes import DType, bool_, float32, float64, promote_scalar
from tilewright.errors import ArgumentError, DTypeError, ShapeError
from tilewright.ops import _activation
from tilewright.ops._call import as_tensor, call, need_tensor, operands, scalar
from tilewright.ops._grad import unbroadcast
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor, zeros_like

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


def _binary_infer(name: str, result: DType | None, bools: bool) -> Callable[..., Spec]:
    def infer(attrs: Any, a: Spec, b: Spec) -> Spec:
        if a.dtype is bool_ and not bools:
            raise DTypeError(f"{name}: bool operands have no such arithmetic; convert one with .to('int32')")
        if a is b and result is None:
            return a
        shape, layout = broadcast(name, a, b)
        return spec(shape, result or a.dtype, layout)

    return infer


_SHAPES = (((2, 3), (2, 3)), ((), ()), ((4,), ()), ((), (4,)), ((2, 1, 4), (3, 1)), ((0, 3), (1, 3)), ((1, 1), (3, 5)))


def _binary_samples(fill_a: str, fill_b: str, grad: bool, ints: bool) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        out = [Sample((Arg(x, fill=fill_a), Arg(y, fill=fill_b)), grad=grad) for x, y in _SHAPES]
        four = (2, 3, 4, 5)
        for b in (four, (1, 3, 1, 1), (2, 3, 1, 1)):
            out.append(Sample((Arg(four, layout=CHANNELS_LAST, fill=fill_a), Arg(b, layout=CHANNELS_LAST, fill=fill_b)), grad=grad))
        out.append(Sample((Arg(four, layout=CHANNELS_LAST, fill=fill_a), Arg(four, fill=fill_b)), grad=grad, note="two layouts"))
        large = (2, 32, 24, 25)
        for layout in (CONTIGUOUS, CHANNELS_LAST):
            for b in (large, (1, 32, 1, 1), (2, 32, 1, 1), (2, 1, 24, 25), (1, 32, 24, 25), (2, 1, 1, 1), (32, 1, 1), (25,), ()):
                out.append(Sample((Arg(large, layout=layout, fill=fill_a), Arg(b, layout=layout, fill=fill_b)), grad=False, note="large"))
        out.append(Sample((Arg(large, layout=CHANNELS_LAST, fill=fill_a), Arg((2, 32, 1, 1), fill=fill_b)), grad=False, note="two layouts"))
        for a, b in (((40, 1000), (1000,)), ((40, 1000), (40, 1)), ((4, 10, 600), (4, 1, 600)), ((40, 1000), (40, 1000)), ((), (2000,))):
            out.append(Sample((Arg(a, fill=fill_a), Arg(b, fill=fill_b)), grad=False, note="large"))
        if ints:
            out.append(Sample((Arg((2, 3), "int32", fill="int", low=1, high=9), Arg((3,), "int32", fill="int", low=1, high=9)), grad=False))
        return out

    return samples


def _binary_errors(name: str, bools: bool) -> Callable[[], list[ErrorSample]]:
    def errors() -> list[ErrorSample]:
        from tilewright.tensor import zeros

        f = globals()[name]
        text = f"{name}: shapes (2, 3) and (4,) do not broadcast; along each axis, counted from the last, sizes must be equal or 1"
        out = [ErrorSample(lambda: f(zeros(2, 3), zeros(4)), ShapeError, text)]
        if not bools:
            text = f"{name}: bool operands have no such arithmetic; convert one with .to('int32')"
            out.append(ErrorSample(lambda: f(zeros(2, dtype=bool), zeros(2, dtype=bool)), DTypeError, text))
        return out

    return errors


def _define(
    name: str,
    reference: Any,
    vjp: Any = None,
    *,
    fills: tuple[str, str] = ("normal", "positive"),
    result: DType | None = None,
    saves: Any = None,
    bools: bool = True,
    real: bool = False,
) -> Op:
    return Op(
        name,
        _binary_infer(name, result, bools),
        lambda attrs, a, b: reference(a, b),
        vjp,
        _binary_samples(*fills, grad=vjp is not None, ints=not real),
        _binary_errors(name, bools),
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


def _share(beaten: Any) -> Any:
    """The gradient of maximum or minimum: to the operand chosen, half to each of two equal ones; NaN gets it too."""

    def part(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
        return where(beaten(a, b), 0.0, where(equal(a, b), mul(g, 0.5), g))

    return _pair_vjp(lambda g, a, b: part(a, b, g), lambda g, a, b: part(b, a, g))


def _pow_left(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # b * a^(b-1), where b = 0 as 0 * a^0: it is 0 even for a = 0.
    return mul(g, mul(b, pow(a, sub(where(equal(b, 0.0), 1.0, b), 1.0))))


def _pow_right(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    flat = logical_and(equal(a, 0.0), greater_equal(b, 0.0))
    return mul(g, mul(pow(a, b), log(where(flat, 1.0, a))))


def _whole_pow(a: Any, b: Any) -> Any:
    """Python's own integers, truncated toward zero where the exponent is negative."""
    if a.dtype.kind not in "iu":
        return a**b
    one = np.vectorize(lambda x, y: int(x) ** int(y) if y >= 0 else int(float(x) ** int(y)) if x else 0, otypes=[object])
    return (one(a, b).astype(np.int64) if np.broadcast(a, b).size else np.broadcast_arrays(a, b)[0]).astype(a.dtype)


ADD = _define("add", lambda a, b: a + b, _pair_vjp(lambda g, a, b: g, lambda g, a, b: g), saves=())
SUB = _define("sub", lambda a, b: a - b, _pair_vjp(lambda g, a, b: g, lambda g, a, b: neg(g)), saves=(), bools=False)
MUL = _define("mul", lambda a, b: a * b, _pair_vjp(lambda g, a, b: mul(g, b), lambda g, a, b: mul(g, a)))
DIV = _define("div", lambda a, b: a / b, _pair_vjp(lambda g, a, b: div(g, b), lambda g, a, b: neg(mul(g, div(div(a, b), b)))), real=True)
FLOOR_DIV = _define("floor_div", lambda a, b: np.floor_divide(a, b), bools=False)
REMAINDER = _define(
    "remainder",
    lambda a, b: np.remainder(a, b),
    _pair_vjp(lambda g, a, b: g, lambda g, a, b: neg(mul(g, floor_div(a, b)))),
    fills=("kinked", "positive"),
    bools=False,
)
POW = _define("pow", _whole_pow, _pair_vjp(_pow_left, _pow_right), fills=("positive", "positive"), bools=False)
MAXIMUM = _define("maximum", np.maximum, _share(lambda a, b: less(a, b)), fills=("normal", "normal"))
MINIMUM = _define("minimum", np.minimum, _share(lambda a, b: greater(a, b)), fills=("normal", "normal"))
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
    """The largest integer not above a / b, in the operands' dtype; integers divided by 0 give 0. No gradient."""
    return _two(FLOOR_DIV, a, b)


def remainder(a: Any, b: Any) -> Tensor:
    """a - b * floor_div(a, b): the sign is b's, as in Python; integers by 0 give 0."""
    return _two(REMAINDER, a, b)


def pow(a: Any, b: Any) -> Tensor:
    """a to the power b; x^0 is 1, also for 0 and NaN. The derivative in a is 0 where b is 0; the one in b is 0 where a is 0
    and b is not negative. Integers to negative integer powers are truncated toward zero (0 gives 0)."""
    if isinstance(a, Tensor) and isinstance(b, (int, float)):
        if b == 2:
            return square(a)
        if b == 3:
            return mul(mul(a, a), a)
        if a.spec.dtype.is_floating:
            if b == 0.5:
                return sqrt(a)
            if b == -1:
                return reciprocal(a)
            if b == -0.5:
                return rsqrt(a)
    return _two(POW, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of a and b; NaN where either is."""
    return _two(MAXIMUM, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of a and b; NaN where either is."""
    return _two(MINIMUM, a, b)


def _compared(name: str, a: Any, b: Any) -> Tensor:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.spec.dtype is b.spec.dtype):
        a, b = _exactly(a, b), _exactly(b, a)
        a, b = operands(name, a, b)
    return call(_COMPARE[name], (a, b))


def _exactly(value: Any, other: Any) -> Any:
    """`value` in a form whose comparison with the other operand is not rounded: an integer tensor beside a number that its
    type does not hold is compared as float64, and such a number as infinity."""
    if isinstance(value, Tensor):
        outside = not isinstance(other, Tensor) and not value.spec.dtype.is_floating and not _holds(value.spec.dtype, other)
        return value.to(dtype=float64) if outside else value
    if isinstance(value, (int, np.integer)) and isinstance(other, Tensor) and not _holds(other.spec.dtype, value):
        return math.inf if value > 0 else -math.inf
    return value


def _holds(dtype: DType, value: Any) -> bool:
    if isinstance(value, (float, np.floating)):
        return dtype.is_floating
    return not isinstance(value, (int, np.integer)) or dtype.kind not in "iu" or bool(dtype.min <= value <= dtype.max)


def equal(a: Any, b: Any) -> Tensor:
    """a == b, bool. Numbers that an integer type does not hold are compared by value."""
    return _compared("equal", a, b)


def not_equal(a: Any, b: Any) -> Tensor:
    """a != b, bool."""
    return _compared("not_equal", a, b)


def less(a: Any, b: Any) -> Tensor:
    """a < b, bool."""
    return _compared("less", a, b)


def less_equal(a: Any, b: Any) -> Tensor:
    """a <= b, bool."""
    return _compared("less_equal", a, b)


def greater(a: Any, b: Any) -> Tensor:
    """a > b, bool."""
    return _compared("greater", a, b)


def greater_equal(a: Any, b: Any) -> Tensor:
    """a >= b, bool."""
    return _compared("greater_equal", a, b)


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
    saved: bool = True,
    bools: bool = True,
) -> Op:
    """An op on one operand; `vjp(g, x)` reads the input, or with `output` the result, or neither where not `saved`."""

    def back(node: Any, g: Tensor) -> Tensor:
        return vjp(g, node.outputs[0] if output else node.inputs[0])  # type: ignore[misc]

    def samples() -> list[Sample]:
        shapes = [Arg(s, fill=fill, low=low, high=high) for s in _POINTS]
        shapes.append(Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill=fill, low=low, high=high))
        large = Sample((Arg((2, 32, 24, 25), layout=CHANNELS_LAST, fill=fill, low=low, high=high),), grad=False, note="large")
        return [*[Sample((a,), grad=vjp is not None) for a in shapes], large]

    def infer(attrs: Any, x: Spec) -> Spec:
        if x.dtype is bool_ and not bools:
            raise DTypeError(f"{name}: a bool operand has no such arithmetic; convert it with .to('int32')")
        return x if result is None else x.like(dtype=result)

    def errors() -> list[ErrorSample]:
        from tilewright.tensor import zeros

        out = [ErrorSample(lambda: globals()[name](1.5), DTypeError, f"{name}: x must be a Tensor and is float; make one with tensor(...)")]
        if not bools:
            text = f"{name}: a bool operand has no such arithmetic; convert it with .to('int32')"
            out.append(ErrorSample(lambda: globals()[name](zeros(2, dtype=bool)), DTypeError, text))
        return out

    return Op(
        name, infer, lambda attrs, x: reference(x), None if vjp is None else back, samples, errors,
        saves=() if output or vjp is None or not saved else (0,), saves_outputs=output and vjp is not None,
    )  # fmt: skip


def _erf_reference(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x


_2_SQRT_PI = 2 / math.sqrt(math.pi)
UNARY: dict[str, Op] = {
    "neg": _unary("neg", np.negative, lambda g, x: neg(g), saved=False, bools=False),
    "abs": _unary("abs", np.abs, lambda g, x: mul(g, sign(x))),
    "sign": _unary("sign", np.sign, lambda g, x: zeros_like(g), saved=False, bools=False),
    "exp": _unary("exp", np.exp, lambda g, y: mul(g, y), output=True),
    "expm1": _unary("expm1", np.expm1, lambda g, y: mul(g, add(y, 1.0)), output=True),
    "log": _unary("log", np.log, lambda g, x: div(g, x), fill="positive"),
    "log1p": _unary("log1p", np.log1p, lambda g, x: div(g, add(x, 1.0)), fill="positive"),
    "sqrt": _unary("sqrt", np.sqrt, lambda g, y: div(mul(g, 0.5), y), output=True, fill="positive"),
    "rsqrt": _unary("rsqrt", lambda x: 1 / np.sqrt(x), lambda g, y: mul(mul(g, -0.5), mul(y, mul(y, y))), output=True, fill="positive"),
    "reciprocal": _unary("reciprocal", lambda x: 1 / x, lambda g, y: neg(mul(g, mul(y, y))), output=True, fill="positive"),
    "square": _unary("square", np.square, lambda g, x: mul(mul(g, 2.0), x), bools=False),
    "floor": _unary("floor", np.floor, lambda g, x: zeros_like(g), saved=False),
    "ceil": _unary("ceil", np.ceil, lambda g, x: zeros_like(g), saved=False),
    "round": _unary("round", np.rint, lambda g, x: zeros_like(g), saved=False),
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


def _whole(name: str, x: Any) -> Tensor:
    """Rounding, which leaves integers and bool as they are."""
    from tilewright.ops.movement import copy

    return copy(x) if isinstance(x, Tensor) and not x.spec.dtype.is_floating else _one(name, x)


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
    return _one("square", x, False)


def floor(x: Tensor) -> Tensor:
    """The largest integer not above x. The derivative is 0."""
    return _whole("floor", x)


def ceil(x: Tensor) -> Tensor:
    """The smallest integer not below x. The derivative is 0."""
    return _whole("ceil", x)


def round(x: Tensor) -> Tensor:
    """The nearest integer, halves to even. The derivative is 0."""
    return _whole("round", x)


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


# -- where -------------------------------------------------------------------------------------------------------------


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
    """a where the condition is nonzero, else b; all broadcast, a and b promoted."""
    condition = as_tensor(condition)
    if condition.spec.dtype is not bool_:
        condition = not_equal(condition, 0)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = as_tensor(a).to(device=condition.device)
    a, b = operands("where", a, b)
    return call(WHERE, (condition, a, b))


# -- clamp -------------------------------------------------------------------------------------------------------------


def _clamp(attrs: Any, x: np.ndarray) -> np.ndarray:
    low, high = attrs
    y = x if low is None else np.where(x < low, np.asarray(low, x.dtype), x)
    return y if high is None else np.where(y > high, np.asarray(high, x.dtype), y)


def _clamp_grad(attrs: Any, g: np.ndarray, x: np.ndarray) -> np.ndarray:
    low, high = attrs
    inside = (x >= (-np.inf if low is None else low)) & (x <= (np.inf if high is None else high))
    return g * inside


def _clamp_vjp(node: Any, g: Tensor) -> Tensor:
    return _like(CLAMP_GRAD, g, node.inputs[0], node.attrs)


_BOUNDS = ((-1.0, 1.0), (0.0, None), (None, 2.0), (0.0, 6.0))
CLAMP_GRAD = Op(
    "clamp_grad",
    lambda attrs, g, x: x,
    _clamp_grad,
    lambda node, v: (_like(CLAMP_GRAD, v, node.inputs[1], node.attrs) if node.needs[0] else None, None),
    lambda: [Sample((Arg(s), Arg(s, fill="kinked")), a) for s in ((2, 3), (), (0,)) for a in _BOUNDS],
    saves=(1,),
)
CLAMP = Op(
    "clamp",
    lambda attrs, x: x,
    _clamp,
    _clamp_vjp,
    lambda: (
        [Sample((Arg(s, fill="kinked"),), a) for s in ((2, 3), (), (0,), (40000,)) for a in _BOUNDS]
        + [Sample((Arg((2, 3), "int32", fill="int", low=-5, high=9),), (0, 6), grad=False)]
    ),
    lambda: [_clamp_error()],
)


def _clamp_error() -> ErrorSample:
    from tilewright.tensor import zeros

    return ErrorSample(lambda: clamp(zeros(2)), ArgumentError, "clamp: min and max are both None; give at least one bound")


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """x limited to [min, max], either None for no bound (max wins where min > max); NaN stays. The gradient passes at the
    bounds. Integers stay integers unless a bound is a float. Raises ArgumentError without any bound."""
    need_tensor("clamp", x=x)
    if min is None and max is None:
        raise ArgumentError("clamp: min and max are both None; give at least one bound")
    dtype = x.spec.dtype
    for bound in (min, max):
        if bound is not None:
            dtype = promote_scalar(dtype, bound)
    if dtype is not x.spec.dtype:
        x = x.to(dtype=dtype)
    if dtype.is_floating:
        bounds: Any = tuple(None if v is None else float(v) for v in (min, max))
    else:  # a bound that the type does not hold acts as the nearest one that it does
        bounds = tuple(None if v is None else sorted((dtype.min, int(v), dtype.max))[1] for v in (min, max))
    return call(CLAMP, (x,), bounds)


# -- prelu -------------------------------------------------------------------------------------------------------------


def _prelu_infer(attrs: Any, x: Spec, w: Spec) -> Spec:
    shape, _ = broadcast("prelu", x, w)
    if shape != x.shape:
        raise ShapeError(f"prelu: weight {w.shape} must broadcast to the input's shape {x.shape}")
    return x


def _prelu_vjp(node: Any, g: Tensor) -> Any:
    x, w = node.inputs
    positive = greater(x, 0.0)
    return (
        where(positive, g, mul(g, w)) if node.needs[0] else None,
        unbroadcast(where(positive, 0.0, mul(g, x)), node.specs[1]) if node.needs[1] else None,
    )


def _prelu_errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    text = "prelu: weight (2,) must have one element or the 3 channels of (2, 3)"
    return [ErrorSample(lambda: prelu(zeros(2, 3), zeros(2)), ShapeError, text)]


PRELU = Op(
    "prelu",
    _prelu_infer,
    lambda attrs, x, w: np.where(x > 0, x, x * w),
    _prelu_vjp,
    lambda: (
        [Sample((Arg(x, fill="kinked"), Arg(w, fill="normal"))) for x, w in (((2, 3), (1, 3)), ((), ()), ((0, 2), (1,)), ((4, 5), (1, 1)))]
        + [Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill="kinked"), Arg((1, 3, 1, 1))))]
    ),
    _prelu_errors,
)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x where positive, else weight * x (He et al., 2015); weight has one element or one per channel (axis 1) of x.

    The derivative at 0 is weight. Raises ShapeError.
    """
    from tilewright.ops.movement import reshape

    need_tensor("prelu", x=x, weight=weight)
    if weight.size == 1:
        weight = reshape(weight, (1,) * x.ndim)
    elif x.ndim > 1 and weight.shape == (x.shape[1],):
        weight = reshape(weight, (1, -1, *[1] * (x.ndim - 2)))
    else:
        raise ShapeError(f"prelu: weight {weight.shape} must have one element or the {x.shape[1] if x.ndim > 1 else 0} channels of {x.shape}")
    return _two(PRELU, x, weight)


# -- activations -------------------------------------------------------------------------------------------------------


def _same(attrs: Any, x: Spec, *others: Spec) -> Spec:
    return x


def _like(op: Op, g: Tensor, s: Tensor, attrs: Any) -> Tensor:
    """A gradient op on g and s, which must lie alike."""
    if g.spec.layout != s.spec.layout:
        g = g.to(layout=s.spec.layout)
    return call(op, (g, s), attrs)


def activation_grad(name: str, g: Tensor, s: Tensor, alpha: float | None = None, beta: float | None = None) -> Tensor:
    """g times the derivative of an activation from `s`: its output for those in `_activation.FROM_OUTPUT`, else its input.

    alpha and beta are the activation's own; None takes its default.
    """
    a, b = _activation.ALL[name]
    return _like(GRADS[name], g, s, (a if alpha is None else alpha, b if beta is None else beta))


_SIZES = ((2, 3), (), (0,), (40,))
_OTHERS = {"leaky_relu": (0.3, 0.0), "elu": (0.7, 0.0), "hard_sigmoid": (0.2, 0.5), "hard_swish": (0.25, 0.4), "hard_tanh": (-0.7, 2.2)}


def _activation_samples(name: str) -> Callable[[], list[Sample]]:
    attrs = _activation.ALL[name]

    def samples() -> list[Sample]:
        out = [Sample((Arg(s, fill="kinked"),), attrs) for s in _SIZES]
        out.append(Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill="kinked"),), attrs))
        out.append(Sample((Arg((40, 1000), fill="uniform", low=-12, high=12),), attrs, grad=False, note="large"))
        if name in _OTHERS:
            out.append(Sample((Arg((7, 4), fill="kinked"),), _OTHERS[name], note="other parameters"))
            out.append(Sample((Arg((40, 1000), fill="uniform", low=-5, high=5),), _OTHERS[name], grad=False, note="large, other parameters"))
        return out

    return samples


def _activation_vjp(name: str) -> Any:
    if name in _activation.FROM_OUTPUT:
        return lambda node, g: activation_grad(name, g, node.outputs[0], *node.attrs)
    return lambda node, g: activation_grad(name, g, node.inputs[0], *node.attrs)


# The derivative of the derivative by what it is computed from (output or input), in public ops; absent where it is 0.


def _silu_second(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return mul(mul(s, sub(1.0, s)), add(mul(x, sub(1.0, mul(s, 2.0))), 2.0))


def _gelu_second(x: Tensor) -> Tensor:
    square_ = mul(x, x)
    return mul(mul(exp(mul(square_, -0.5)), 1 / math.sqrt(2 * math.pi)), sub(2.0, square_))


def _gelu_tanh_second(x: Tensor) -> Tensor:
    k, cube = math.sqrt(2 / math.pi), 0.044715
    square_ = mul(x, x)
    t = tanh(mul(mul(x, add(mul(square_, cube), 1.0)), k))
    first, second = mul(add(mul(square_, 3 * cube), 1.0), k), mul(x, 6 * cube * k)
    bend = sub(second, mul(mul(t, 2.0), mul(first, first)))
    return mul(sub(1.0, mul(t, t)), add(first, mul(mul(x, 0.5), bend)))


def _mish_second(x: Tensor) -> Tensor:
    s, t = sigmoid(x), tanh(softplus(x))
    bend = sub(sub(1.0, s), mul(mul(t, s), 2.0))
    return mul(mul(sub(1.0, mul(t, t)), s), add(mul(x, bend), 2.0))


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return mul(s, sub(1.0, s))


def _left(x: Tensor, value: Tensor) -> Tensor:
    return where(less_equal(x, 0.0), value, 0.0)


_SECOND: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "tanh": lambda y, a, b: mul(y, -2.0),
    "sigmoid": lambda y, a, b: sub(1.0, mul(y, 2.0)),
    "elu": lambda x, a, b: _left(x, mul(exp(minimum(x, 0.0)), a)),
    "selu": lambda x, a, b: _left(x, mul(exp(minimum(x, 0.0)), a * b)),
    "silu": lambda x, a, b: _silu_second(x),
    "gelu": lambda x, a, b: _gelu_second(x),
    "gelu_tanh": lambda x, a, b: _gelu_tanh_second(x),
    "hard_swish": lambda x, a, b: mul(logical_and(greater(x, -b / a), less(x, (1 - b) / a)).to(dtype=x.dtype), 2 * a),
    "softplus": lambda x, a, b: _sigmoid_slope(x),
    "logsigmoid": lambda x, a, b: neg(_sigmoid_slope(x)),
    "softsign": lambda x, a, b: mul(mul(sign(x), -2.0), pow(add(abs(x), 1.0), -3.0)),
    "mish": lambda x, a, b: _mish_second(x),
}


def _grad_vjp(name: str) -> Any:
    def vjp(node: Any, v: Tensor) -> Any:
        g, s = node.inputs
        dg = activation_grad(name, v, s, *node.attrs) if node.needs[0] else None
        ds = mul(mul(v, g), _SECOND[name](s, *node.attrs)) if node.needs[1] and name in _SECOND else None
        return dg, ds

    return vjp


def _grad_samples(name: str) -> Callable[[], list[Sample]]:
    ranges = {"relu": (0.1, 3.0), "relu6": (0.1, 5.9), "tanh": (-0.9, 0.9), "sigmoid": (0.1, 0.9), "hard_tanh": (-0.9, 0.9)}
    low, high = ranges.get(name, (0.0, 0.0))
    fill = "uniform" if name in ranges else "kinked"

    def samples() -> list[Sample]:
        attrs = _activation.ALL[name]
        out = [Sample((Arg(s), Arg(s, fill=fill, low=low, high=high)), attrs) for s in _SIZES]
        last = Arg((2, 3, 4, 5), layout=CHANNELS_LAST, fill=fill, low=low, high=high)
        out.append(Sample((Arg((2, 3, 4, 5), layout=CHANNELS_LAST), last), attrs))
        if name in ("relu", "relu6", "hard_tanh"):  # whose outputs often lie on a bound
            wide = Arg((40, 1000), fill="int", low=-2, high=8)
        elif name in ranges:
            wide = Arg((40, 1000), fill=fill, low=low, high=high)
        else:
            wide = Arg((40, 1000), fill="uniform", low=-12, high=12)
        out.append(Sample((Arg((40, 1000)), wide), attrs, grad=False, note="large"))
        if name in _OTHERS:
            wide = Arg((40, 1000), fill="uniform", low=-5, high=5)
            out.append(Sample((Arg((40, 1000)), wide), _OTHERS[name], grad=False, note="large, other parameters"))
        return out

    return samples


def _activation_op(name: str) -> Op:
    output = name in _activation.FROM_OUTPUT
    return Op(
        name,
        lambda attrs, x: x,
        lambda attrs, x: _activation.reference(name, attrs[0], attrs[1], x),
        _activation_vjp(name),
        _activation_samples(name),
        _gelu_errors if name == "gelu" else tuple,
        saves=() if output else (0,),
        saves_outputs=output,
    )


def _gelu_errors() -> list[ErrorSample]:
    from tilewright.tensor import zeros

    return [ErrorSample(lambda: gelu(zeros(2), "erf"), ArgumentError, "gelu: approximate 'erf' must be 'none' or 'tanh'")]


def _grad_op(name: str) -> Op:
    return Op(
        f"{name}_grad",
        lambda attrs, g, s: s,
        lambda attrs, g, s: g * _activation.derivative(name, attrs[0], attrs[1], s),
        _grad_vjp(name),
        _grad_samples(name),
    )


ACTIVATIONS = {name: _activation_op(name) for name in _activation.ALL}
GRADS = {name: _grad_op(name) for name in _activation.ALL}


def activate(x: Tensor, name: str, alpha: float | None = None, beta: float | None = None) -> Tensor:
    """The activation of that name as an op of its own; None takes its default parameters."""
    if not isinstance(x, Tensor):
        need_tensor(name, x=x)
    if x.spec.dtype.kind != "f":
        if name in ("relu", "relu6") and x.spec.dtype is not bool_:
            return clamp(x, 0, None if name == "relu" else 6)
        x = x.to(dtype=float32)
    a, b = _activation.ALL[name]
    return call(ACTIVATIONS[name], (x,), (a if alpha is None else float(alpha), b if beta is None else float(beta)))


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays. The derivative at 0 is 0. Integers stay integers, here and in relu6."""
    return activate(x, "relu")


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6); NaN stays. The derivative at 0, at 6 and at NaN is 0."""
    return activate(x, "relu6")


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where positive, else negative_slope * x (also the derivative at 0)."""
    return activate(x, "leaky_relu", negative_slope)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha * (exp(x) - 1) (Clevert et al., 2016). The derivative at 0 is alpha."""
    return activate(x, "elu", alpha)


def selu(x: Tensor, alpha: float | None = None, scale: float | None = None) -> Tensor:
    """scale * elu(x, alpha), by default with the fixed point of Klambauer et al. (2017). The derivative at 0 is scale * alpha."""
    return activate(x, "selu", alpha, scale)


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


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    return activate(x, "logsigmoid")


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return activate(x, "tanh")


def softplus(x: Tensor, beta: float = 1.0, threshold: float | None = None) -> Tensor:
    """log(1 + exp(beta * x)) / beta, without overflow.

    threshold: where beta * x is above it the result is x itself. PyTorch's is 20; it changes the value by less than 2.1e-9,
    and None leaves it exact.
    """
    if beta == 1.0:
        scaled, y = x, activate(x, "softplus")
    else:
        scaled = mul(x, float(beta))
        y = div(activate(scaled, "softplus"), float(beta))
    return y if threshold is None else where(greater(scaled, float(threshold)), x, y)


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return activate(x, "softsign")


def hard_sigmoid(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    """alpha * x + beta limited to [0, 1]; the derivative at and beyond the bounds is 0. ONNX's default alpha is 0.2."""
    return activate(x, "hard_sigmoid", alpha, beta)


def hard_swish(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    """x * hard_sigmoid(x) (Howard et al., 2019); the derivative is 0 at the lower bound and 1 at the upper."""
    return activate(x, "hard_swish", alpha, beta)


def hard_tanh(x: Tensor, min: float = -1.0, max: float = 1.0) -> Tensor:
    """x limited to [min, max]; NaN stays. Unlike `clamp`, the derivative at the bounds (and at NaN) is 0."""
    return activate(x, "hard_tanh", min, max)
