"""Random numbers and dropout. The draws are Philox4x32-10's (see `tilewright.random`), the same on every device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright import devices
from tilewright import random as stream
from tilewright.devices.api import CHANNELS_LAST, CONTIGUOUS, Device, Spec, spec
from tilewright.dtypes import as_dtype, bool_, float32, int64
from tilewright.errors import ArgumentError
from tilewright.ops._call import call
from tilewright.ops._op import Arg, ErrorSample, Op, Sample
from tilewright.tensor import Tensor, _shape, tensor

SHARED = ("philox",)

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


def _uniform(words: np.ndarray) -> np.ndarray:
    """24 bits to [0, 1)."""
    return (words >> 8).astype(np.float64) * 2.0**-24


def _in_memory(shape: tuple[int, ...], layout: str, values: np.ndarray) -> np.ndarray:
    """Number i of a draw goes to element i in *logical* order, whatever the layout."""
    return values.reshape(shape)


def _infer(attrs: Any, state: Spec) -> Spec:
    shape, dtype, layout = attrs
    return spec(shape, dtype, layout)


def _uniform_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    shape, _, layout = attrs
    return _in_memory(shape, layout, _uniform(_words(state, math.prod(shape))))


def _normal_reference(attrs: Any, state: np.ndarray) -> np.ndarray:
    """Box and Muller's transform of pairs of words (a, b): sqrt(-2 ln(1 - a)) cos(2 pi b), then sin."""
    shape, _, layout = attrs
    n = math.prod(shape)
    u = _uniform(_words(state, n + n % 2))
    radius, angle = np.sqrt(-2 * np.log(1 - u[0::2])), 2 * np.pi * u[1::2]
    return _in_memory(shape, layout, np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n])


def _samples() -> list[Sample]:
    state = Arg((2,), "int64", fill="int", low=0, high=1 << 40)
    return [
        Sample((state,), (s, float32, layout), grad=False)
        for s, layout in (((5,), CONTIGUOUS), ((), CONTIGUOUS), ((0, 3), CONTIGUOUS), ((2, 3, 4, 5), CHANNELS_LAST))
    ]


UNIFORM = Op("uniform01", _infer, _uniform_reference, None, _samples, saves=())
NORMAL = Op("standard_normal", _infer, _normal_reference, None, _samples, saves=())


def _keep_infer(attrs: Any, state: Spec) -> Spec:
    return spec(attrs[0], bool_, attrs[2])


KEEP = Op(
    "random_keep",
    _keep_infer,
    lambda attrs, state: _in_memory(attrs[0], attrs[2], _uniform(_words(state, math.prod(attrs[0]))) >= attrs[1]),
    None,
    lambda: [
        Sample((Arg((2,), "int64", fill="int", low=0, high=1 << 40),), (s, p, CONTIGUOUS), grad=False)
        for s, p in (((7,), 0.5), ((), 0.1), ((2, 3), 0.0), ((0,), 0.5))
    ],
    saves=(),
)


def _draw(op: Op, attrs: Any, count: int, place: Device, generator: stream.Generator | None) -> Tensor:
    state = tensor((generator or stream.default).advance(count + count % 2), int64, place)
    return call(op, (state,), attrs)


def uniform(
    *shape: Any, low: float = 0.0, high: float = 1.0, dtype: Any = float32, device: Any = None, layout: str = CONTIGUOUS,
    generator: stream.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Numbers uniform in [low, high)."""
    sizes = _shape(shape)
    out = _draw(UNIFORM, (sizes, as_dtype(dtype), layout), math.prod(sizes), devices.get(device), generator)
    return out if (low, high) == (0.0, 1.0) else out * (high - low) + low


def normal(
    *shape: Any, mean: float = 0.0, std: float = 1.0, dtype: Any = float32, device: Any = None, layout: str = CONTIGUOUS,
    generator: stream.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Numbers from the normal distribution."""
    sizes = _shape(shape)
    out = _draw(NORMAL, (sizes, as_dtype(dtype), layout), math.prod(sizes), devices.get(device), generator)
    return out if (mean, std) == (0.0, 1.0) else out * std + mean


def randn(*shape: Any, **options: Any) -> Tensor:
    """`normal` with mean 0 and standard deviation 1."""
    return normal(*shape, **options)


def rand(*shape: Any, **options: Any) -> Tensor:
    """`uniform` in [0, 1)."""
    return uniform(*shape, **options)


def randint(low: int, high: int, *shape: Any, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """Integers (int64) uniform in low..high-1, of a range up to 2^24."""
    if not low < high or high - low > 1 << 24:
        raise ArgumentError(f"randint: low {low} must be less than high {high}, by at most 2^24")
    return (uniform(*shape, dtype="float64", device=device, generator=generator) * (high - low)).to(dtype=int64) + low


def randperm(n: int, *, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """0..n-1 in random order, int64."""
    state = (generator or stream.default).advance(4)
    return tensor(np.random.Generator(np.random.Philox(key=state.view(np.uint64))).permutation(n), int64, device)


def bernoulli(p: float, *shape: Any, device: Any = None, generator: stream.Generator | None = None) -> Tensor:
    """True with probability p, bool."""
    sizes = _shape(shape)
    return _draw(KEEP, (sizes, 1.0 - float(p), CONTIGUOUS), math.prod(sizes), devices.get(device), generator)


def _check(name: str, p: float) -> float:
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ArgumentError(f"{name}: p {p!r} must lie in 0 to 1")
    return float(p)


def _drop(name: str, x: Tensor, p: float, shape: tuple[int, ...], generator: stream.Generator | None) -> Tensor:
    p = _check(name, p)
    if p == 0.0 or x.size == 0:
        return x
    if p == 1.0:
        return x * 0.0
    layout = x.layout if len(shape) == x.ndim else CONTIGUOUS
    keep = _draw(KEEP, (shape, p, layout), math.prod(shape), x.device, generator)
    return call(DROPOUT, (x, keep), 1.0 / (1.0 - p))


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
