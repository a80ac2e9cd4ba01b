"""Random numbers and dropout. The draws are Philox4x32-10's (see `tilewright.random`), the same on every device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright import devices
from tilewright import random as stream
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, Spec, spec
from tilewright.dtypes import as_dtype, bool_, float32, int64
from tilewright.errors import ArgumentError, DTypeError
from tilewright.ops._call import call
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.ops.pointwise import minimum
from tilewright.tensor import Tensor, _shape, tensor

SHARED = ("philox", "words_of")

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10 in Python's integers: the reference."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * _M0, c[2] * _M1
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + _W0) & 0xFFFFFFFF, (k[1] + _W1) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def _words(state: np.ndarray, n: int) -> np.ndarray:
    """n 32-bit words of the stream, from (seed, first counter)."""
    seed, start = int(state[0]), int(state[1])
    key = (seed & 0xFFFFFFFF, seed >> 32)
    out: list[int] = []
    for block in range(-(-n // 4)):
        at = start + block
        out += philox((at & 0xFFFFFFFF, at >> 32, 0, 0), key)
    return np.array(out[:n], np.uint32)


# Random bits a number in [0, 1) takes: as many as each type holds below 1, so that none is rounded up to 1.
BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def words_of(dtype: Any) -> int:
    """32-bit words of the stream that one number takes."""
    return 2 if dtype.name in ("float64", "int64") else 1


def _unit(state: np.ndarray, n: int, bits: int) -> np.ndarray:
    """n numbers in [0, 1) in float64: the leading `bits` of a word, or of two for more than 32."""
    if bits <= 32:
        return (_words(state, n) >> np.uint32(32 - bits)).astype(np.float64) * 2.0**-bits
    high, low = _words(state, 2 * n).reshape(n, 2).T.astype(np.float64)
    return (np.floor(high / 32) * 2.0**26 + np.floor(low / 64)) * 2.0**-53


def _infer(attrs: Any, state: Spec) -> Spec:
    return spec(*attrs[:3])


# Number i of a draw goes to element i in *logical* order, whatever the layout.


def _uniform_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    shape, dtype, _ = attrs
    return _unit(state, math.prod(shape), BITS[dtype.name]).reshape(shape)


def _normal_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    """Box and Muller's transform of pairs (a, b): sqrt(-2 ln(1 - a)) cos(2 pi b), then sin."""
    shape, dtype, _ = attrs
    n = math.prod(shape)
    u = _unit(state, n + n % 2, max(24, BITS[dtype.name]))
    radius, angle = np.sqrt(-2 * np.log1p(-u[0::2])), 2 * np.pi * u[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n].reshape(shape)


def _integers_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    """low + floor(w * count / 2^64), w of two words: uneven by less than count / 2^64 (Lemire, 2019, without rejection)."""
    shape, _, _, low, count = attrs
    pairs = _words(state, 2 * math.prod(shape)).reshape(-1, 2).tolist()
    return np.array([low + ((((high << 32) | below) * count) >> 64) for high, below in pairs], np.int64).reshape(shape)


def _keep_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    shape, _, _, p = attrs
    return (_unit(state, math.prod(shape), 32) >= p).reshape(shape)


_STATE = Arg((2,), "int64", fill="int", low=0, high=1 << 40)
_SHAPES = (((5,), CONTIGUOUS), ((), CONTIGUOUS), ((0, 3), CONTIGUOUS), ((2, 3, 4, 5), CHANNELS_LAST))


def _samples() -> list[Sample]:
    types = [((7, 3), as_dtype(name), CONTIGUOUS) for name in ("float64", "float16", "bfloat16")]
    return [Sample((_STATE,), attrs, grad=False) for attrs in [*[(s, float32, layout) for s, layout in _SHAPES], *types]]


UNIFORM = Op("uniform01", _infer, _uniform_reference, None, _samples, saves=())
NORMAL = Op("standard_normal", _infer, _normal_reference, None, _samples, saves=())
INTEGERS = Op(
    "random_integers",
    _infer,
    _integers_reference,
    None,
    lambda: [
        Sample((_STATE,), (s, int64, layout, low, count), grad=False)
        for (s, layout), (low, count) in zip(_SHAPES, ((0, 10), (-5, 1), (0, 3), (-(2**63), 2**64)), strict=True)
    ],
    lambda: [ErrorSample(lambda: randint(3, 3, 2), ArgumentError, "randint: low 3 must be less than high 3, both within int64")],
    saves=(),
)
KEEP = Op(
    "random_keep",
    _infer,
    _keep_reference,
    None,
    lambda: [Sample((_STATE,), (s, bool_, CONTIGUOUS, p), grad=False) for s, p in (((7,), 0.5), ((), 0.1), ((2, 3), 0.0), ((0,), 0.5), ((3,), 1.0))],
    saves=(),
)


def _draw(op: Op, attrs: Any, place: Device, generator: stream.Generator | None) -> Tensor:
    count = math.prod(attrs[0])
    state = tensor((generator or stream.default).advance((count + count % 2) * words_of(attrs[1])), int64, place)
    return call(op, (state,), attrs)


def _floating(name: str, dtype: Any) -> Any:
    found = as_dtype(dtype)
    if not found.is_floating:
        raise DTypeError(f"{name}: dtype {found.name} is not a floating type; draw integers with randint")
    return found


def uniform(
    *shape: Any, low: float = 0.0, high: float = 1.0, dtype: Any = float32, device: Any = None, layout: str = CONTIGUOUS,
    generator: stream.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Numbers uniform in [low, high): of 53 random bits in float64, 24 in float32, 11 in float16, 8 in bfloat16."""
    of = _floating("uniform", dtype)
    if not low <= high or math.isinf(high - low):
        raise ArgumentError(f"uniform: low {low} must not be above high {high}, both finite")
    out = _draw(UNIFORM, (_shape(shape), of, layout), devices.get(device), generator)
    if (low, high) == (0.0, 1.0):
        return out
    below = np.nextafter(of.np.type(high), of.np.type(low))  # the sum may round up to `high`
    return minimum(out * (high - low) + low, float(below))


def normal(
    *shape: Any, mean: float = 0.0, std: float = 1.0, dtype: Any = float32, device: Any = None, layout: str = CONTIGUOUS,
    generator: stream.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Numbers from the normal distribution (Box and Muller, 1958)."""
    out = _draw(NORMAL, (_shape(shape), _floating("normal", dtype), layout), devices.get(device), generator)
    return out if (mean, std) == (0.0, 1.0) else out * std + mean


def randn(*shape: Any, **options: Any) -> Tensor:
    """`normal` with mean 0 and standard deviation 1."""
    return normal(*shape, **options)


def rand(*shape: Any, **options: Any) -> Tensor:
    """`uniform` in [0, 1)."""
    return uniform(*shape, **options)


def randint(low: int, high: int, *shape: Any, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """Integers (int64) uniform in low..high-1."""
    if not low < high or low < -(2**63) or high > 2**63:
        raise ArgumentError(f"randint: low {low} must be less than high {high}, both within int64")
    return _draw(INTEGERS, (_shape(shape), int64, CONTIGUOUS, int(low), int(high) - int(low)), devices.get(device), generator)


def randperm(n: int, *, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """0..n-1 in random order, int64: the order of n random 64-bit numbers. Sorted on the host."""
    if n < 0:
        raise ArgumentError(f"randperm: n {n} must be at least 0")
    keys = randint(-(2**63), 2**63, n, device="cpu", generator=generator).numpy()
    return tensor(np.argsort(keys, kind="stable"), int64, device)


def bernoulli(p: float, *shape: Any, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """True with probability p (to 2^-32), bool."""
    return _draw(KEEP, (_shape(shape), bool_, CONTIGUOUS, 1.0 - _check("bernoulli", p)), devices.get(device), generator)


def _check(name: str, p: float) -> float:
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ArgumentError(f"{name}: p {p!r} must lie in 0 to 1")
    return float(p)


def _drop(name: str, x: Tensor, p: float, shape: tuple[int, ...], generator: stream.Generator | None) -> Tensor:
    p = _check(name, p)
    if p == 0.0 or x.size == 0:
        return x
    layout = x.layout if len(shape) == x.ndim else CONTIGUOUS
    keep = _draw(KEEP, (shape, bool_, layout, p), x.device, generator)
    return call(DROPOUT, (x, keep), 1.0 / (1.0 - p) if p < 1.0 else 1.0)


def _dropout_vjp(node: Any, g: Tensor) -> Any:
    return call(DROPOUT, (g, node.inputs[1]), node.attrs), None


DROPOUT = Op(
    "dropout_apply",
    lambda scale, x, keep: x,
    lambda scale, x, keep: np.where(keep, x * scale, 0).astype(x.dtype),
    _dropout_vjp,
    lambda: [
        Sample((Arg((4, 3)), Arg((4, 3), "bool", fill="bool")), 2.0),
        Sample((Arg((2, 3, 4, 4), layout=CHANNELS_LAST), Arg((2, 3, 1, 1), "bool", CHANNELS_LAST, fill="bool")), 1.25),
        Sample((Arg((0,)), Arg((0,), "bool", fill="bool")), 2.0),
    ],
    lambda: [ErrorSample(lambda: dropout(tensor([1.0]), 1.5), ArgumentError, "dropout: p 1.5 must lie in 0 to 1")],
    saves=(1,),
)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, generator: stream.Generator | None = None) -> Tensor:
    """Each element zeroed with probability p, the rest divided by 1 - p (Srivastava et al., 2014)."""
    return _drop("dropout", x, p, x.shape, generator) if training else x


def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, *, generator: stream.Generator | None = None) -> Tensor:
    """As `dropout`, for whole channels of (N, C, ...)."""
    return _drop("dropout2d", x, p, (*x.shape[:2], *[1] * (x.ndim - 2)), generator) if training else x
