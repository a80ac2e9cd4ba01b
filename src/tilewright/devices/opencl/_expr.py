"""Pointwise functions as OpenCL C: one expression an op, from which kernels of one op, of chains, and epilogues are made.

In an expression `a`, `b`, `c` are the operands in the type they are computed in, `p` and `q` the op's two numbers, `R(x)` a
constant of the real type. OpenCL's min and max drop NaN, so comparisons are written out: a NaN must go through as in the ops'
references.
"""

from __future__ import annotations

# What expressions may call. REAL is float or double.
FUNCTIONS = """
#define R(x) ((REAL)(x))
static REAL tw_clip(const REAL x, const REAL low, const REAL high) { return x < low ? low : (x > high ? high : x); }
static REAL tw_sigmoid(const REAL x) { return R(1) / (R(1) + exp(-x)); }
static REAL tw_softplus(const REAL x) { return fmax(x, R(0)) + log1p(exp(-fabs(x))); }
static REAL tw_cdf(const REAL x) { return R(0.5) * erfc(x * R(-0.70710678118654752440)); }
static REAL tw_tanh(const REAL x) {  // exactly 1 where it rounds to 1, which some implementations miss
  return fabs(x) > (sizeof(REAL) == 8 ? R(20) : R(10)) ? copysign(R(1), x) : tanh(x);
}
static REAL tw_bend(const REAL x) { return tw_tanh(R(0.79788456080286535588) * x * (R(1) + R(0.044715) * x * x)); }
static REAL tw_floor_div(const REAL a, const REAL b) {  // as NumPy: exact where a / b would round up to a whole number
  if (b == R(0)) return a / b;
  const REAL m = fmod(a, b);
  REAL d = (a - m) / b;
  if (m != R(0) && (b < R(0)) != (m < R(0))) d -= R(1);
  if (d == R(0)) return copysign(R(0), a / b);
  const REAL f = floor(d);
  return d - f > R(0.5) ? f + R(1) : f;
}
static REAL tw_remainder(const REAL a, const REAL b) {
  const REAL m = fmod(a, b);
  if (m == R(0)) return copysign(R(0), b);
  return (b < R(0)) != (m < R(0)) ? m + b : m;
}
static long tw_ifloor_div(const long a, const long b) {  // a division that no processor traps on
  if (b == 0) return 0;
  if (b == -1) return (long)(0ul - (ulong)a);
  const long d = a / b;
  return a % b != 0 && ((a < 0) != (b < 0)) ? d - 1 : d;
}
static long tw_iremainder(const long a, const long b) {
  if (b == 0 || b == -1) return 0;
  const long m = a % b;
  return m != 0 && ((m < 0) != (b < 0)) ? m + b : m;
}
static long tw_ipow(long a, long b) {  // truncated toward zero for negative b; 0 has no value there and gives 0
  if (b < 0) return a == 1 ? 1 : (a == -1 ? ((b & 1) ? -1 : 1) : 0);
  ulong r = 1, x = (ulong)a;
  for (; b; b >>= 1, x *= x) if (b & 1) r *= x;
  return (long)r;
}
"""

# op -> expression for real operands, or (that, the one for integers)
UNARY: dict[str, str | tuple[str, str]] = {
    "neg": "-a",
    "abs": ("fabs(a)", "(a < 0 ? -a : a)"),
    "sign": "(a > 0 ? 1 : (a < 0 ? -1 : a))",
    "exp": "exp(a)",
    "expm1": "expm1(a)",
    "log": "log(a)",
    "log1p": "log1p(a)",
    "sqrt": "sqrt(a)",
    "rsqrt": "R(1) / sqrt(a)",
    "reciprocal": "R(1) / a",
    "square": "a * a",
    "floor": ("floor(a)", "a"),
    "ceil": ("ceil(a)", "a"),
    "round": ("rint(a)", "a"),
    "sin": "sin(a)",
    "cos": "cos(a)",
    "erf": "erf(a)",
    "isnan": ("isnan(a)", "0"),
    "isinf": ("isinf(a)", "0"),
    "isfinite": ("isfinite(a)", "1"),
    "logical_not": "a == 0",
    "copy": "a",
}
BINARY: dict[str, str | tuple[str, str]] = {
    "add": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b",
    "floor_div": ("tw_floor_div(a, b)", "tw_ifloor_div(a, b)"),
    "remainder": ("tw_remainder(a, b)", "tw_iremainder(a, b)"),
    "pow": ("pow(a, b)", "tw_ipow(a, b)"),
    "maximum": ("(isnan(a) || a > b ? a : b)", "(a > b ? a : b)"),
    "minimum": ("(isnan(a) || a < b ? a : b)", "(a < b ? a : b)"),
    "equal": "a == b",
    "not_equal": "a != b",
    "less": "a < b",
    "less_equal": "a <= b",
    "greater": "a > b",
    "greater_equal": "a >= b",
    "logical_and": "(a != 0 && b != 0)",
    "logical_or": "(a != 0 || b != 0)",
    "logical_xor": "((a != 0) != (b != 0))",
    "prelu": "(a > 0 ? a : a * b)",
    "clamp_grad": "a * (b >= p && b <= q ? R(1) : R(0))",
}
ACTIVATIONS: dict[str, str] = {
    "relu": "(a <= 0 ? R(0) : a)",
    "relu6": "tw_clip(a, R(0), R(6))",
    "hard_tanh": "tw_clip(a, p, q)",
    "leaky_relu": "(a > 0 ? a : p * a)",
    "tanh": "tw_tanh(a)",
    "sigmoid": "tw_sigmoid(a)",
    "elu": "(a <= 0 ? p * expm1(a) : a)",
    "selu": "q * (a <= 0 ? p * expm1(a) : a)",
    "silu": "a * tw_sigmoid(a)",
    "gelu": "a * tw_cdf(a)",
    "gelu_tanh": "R(0.5) * a * (R(1) + tw_bend(a))",
    "hard_sigmoid": "tw_clip(p * a + q, R(0), R(1))",
    "hard_swish": "a * tw_clip(p * a + q, R(0), R(1))",
    "softplus": "tw_softplus(a)",
    "logsigmoid": "-tw_softplus(-a)",
    "softsign": "a / (R(1) + fabs(a))",
    "mish": "a * tw_tanh(tw_softplus(a))",
}
# The derivative as a function of `b`: the activation's output for those in `_activation.FROM_OUTPUT`, else its input.
DERIVATIVES: dict[str, str] = {
    "relu": "(b <= 0 ? R(0) : R(1))",
    "relu6": "(b > 0 && b < 6 ? R(1) : R(0))",
    "hard_tanh": "(b > p && b < q ? R(1) : R(0))",
    "tanh": "(R(1) - b * b)",
    "sigmoid": "b * (R(1) - b)",
    "leaky_relu": "(b <= 0 ? p : R(1))",
    "elu": "(b <= 0 ? p * exp(b) : R(1))",
    "selu": "(q * (b <= 0 ? p * exp(b) : R(1)))",
    "silu": "(tw_sigmoid(b) * (R(1) + b * tw_sigmoid(-b)))",
    "gelu": "(tw_cdf(b) + b * exp(R(-0.5) * b * b) * R(0.39894228040143267794))",
    "gelu_tanh": "(R(0.5) * (R(1) + tw_bend(b)) + R(0.5) * b * (R(1) - tw_bend(b) * tw_bend(b)) * R(0.79788456080286535588) "
    "* (R(1) + R(0.134145) * b * b))",
    "hard_sigmoid": "(p * b + q > 0 && p * b + q < 1 ? p : R(0))",
    "hard_swish": "(p * b + q <= 0 ? R(0) : (p * b + q < 1 ? R(2) * p * b + q : R(1)))",
    "softplus": "tw_sigmoid(b)",
    "logsigmoid": "tw_sigmoid(-b)",
    "softsign": "(R(1) / ((R(1) + fabs(b)) * (R(1) + fabs(b))))",
    "mish": "(tw_tanh(tw_softplus(b)) + b * (R(1) - tw_tanh(tw_softplus(b)) * tw_tanh(tw_softplus(b))) * tw_sigmoid(b))",
}


def real(double: bool, *expressions: str) -> str:
    """The real type, float or double, and the functions that these expressions call."""
    parts = {}
    for part in FUNCTIONS.strip().split("\nstatic "):
        name = part.partition("(")[0].split()[-1]
        parts[name] = part if part.startswith("#") else "static " + part
    head, wanted, text = parts.pop("R"), [], " ".join(expressions)
    for name, part in reversed(parts.items()):  # a function calls only those above it
        if f"{name}(" in text:
            wanted.append(part)
            text += part
    return "\n".join([f"#define REAL {'double' if double else 'float'}", head, *reversed(wanted)]) + "\n"


def activation_source(name: str | None, alpha: float = 0.0, beta: float = 0.0, double: bool = False) -> str:
    """C that defines `REAL tw_activation(REAL a)`, for an epilogue, with what it calls."""
    text = "a" if name is None else ACTIVATIONS[name]
    numbers = f"  const REAL p = R({float(alpha)!r}), q = R({float(beta)!r}); (void)p; (void)q;\n"
    return f"{real(double, text)}static REAL tw_activation(const REAL a) {{\n{numbers}  return {text};\n}}\n"
