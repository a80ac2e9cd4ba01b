"""Convolution and its gradients as implicit products of matrices, channels last, float32, for any window, stride, dilation and groups."""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import CHANNELS_LAST, Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl import _gemm
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._gemm import loader
from tilewright.devices.opencl.conv2d.direct import _BIAS, launch_of, sizes, steps
from tilewright.devices.opencl.movement import filler

_MOST = 2**31 - 2**16


class _Gemm(ClKernel):
    rank = 20

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        operands = [s for s in problem.inputs + problem.outputs if s is not None]
        if any(s.dtype.name != "float32" for s in operands):
            return ["it computes in float32 alone"]
        if any(s.ndim == 4 and s.layout != CHANNELS_LAST for s in operands):
            return ["it reads and writes channels last alone"]
        if problem.empty:
            return ["there is nothing to compute"]
        if any(s.size >= _MOST for s in operands):
            return [f"an operand has more than {_MOST} elements, beyond its 32-bit offsets"]
        m, n, _, groups = self.shape(problem)
        if groups > 1 and min(m, n) < 8:
            return ["its tiles would be nearly empty: each group has fewer than 8 channels"]
        return []

    def shape(self, problem: Problem) -> tuple[int, int, int, int]:
        """(M, N, K, groups)"""
        raise NotImplementedError

    def configs(self, problem: Problem, device: Any) -> list[Config]:
        return _gemm.configs(device, *self.shape(problem))

    def workspace(self, problem: Problem, config: Config) -> int:
        return _gemm.workspace(config, problem.outputs[0].size)


def _constants(geometry: list[int]) -> str:
    names = ("N_", "C_", "H_", "W_", "F_", "OH_", "OW_", "KH_", "KW_", "SH_", "SW_", "PH_", "PW_", "DH_", "DW_", "G_")
    return "".join(f"#define {name} {value}\n" for name, value in zip(names, geometry, strict=True))


def _specs(*operands: Spec | None) -> list[Spec]:
    assert all(s is not None for s in operands)
    return [s for s in operands if s is not None]


@kernel
class Forward(_Gemm):
    """Rows are the output's pixels, columns its channels; K runs over the window and, fastest, the input's channels."""

    id, op = "opencl.conv2d.gemm", "conv2d"

    def shape(self, problem: Problem) -> tuple[int, int, int, int]:
        _, w = _specs(*problem.inputs[:2])
        y, groups = problem.outputs[0], problem.attrs.groups
        return y.size // y.shape[1], w.shape[0] // groups, w.size // w.shape[0], groups

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, w), a, y = _specs(*problem.inputs[:2]), problem.attrs, problem.outputs[0]
        m, n, k, groups = self.shape(problem)
        geometry = sizes(a, x.shape, w.shape, y.shape)
        c = geometry[1]
        if geometry[7:15] == [1, 1, 1, 1, 0, 0, 1, 1] and x.shape[2:] == y.shape[2:]:
            valid, address = "const int ok_ = m < M && k < end;", "m * (C_ * G_) + g * C_ + k"
        else:
            valid = (
                "const int c = k % C_, s = k / C_ % KW_, r = k / C_ / KW_, ow = m % OW_, oh = m / OW_ % OH_, i = m / OW_ / OH_; "
                "const int h = oh * SH_ - PH_ + r * DH_, v = ow * SW_ - PW_ + s * DW_; "
                "const int ok_ = m < M && k < end && h >= 0 && h < H_ && v >= 0 && v < W_;"
            )
            address = "((i * H_ + h) * W_ + v) * (C_ * G_) + g * C_ + c"
        loaders = _constants(geometry) + loader("a", address, valid, "k", c % 4 == 0)
        loaders += loader("b", "(g * N + n) * K + k", "const int ok_ = n < N && k < end;", "k", k % 4 == 0)
        run = _gemm.product(
            device, config, loaders, m=m, n=n, k=k, groups=groups, row=n * groups, group_step=n, along=(True, True), size=max(x.size, w.size, y.size),
            bias=problem.inputs[2] is not None, residual=problem.inputs[3] is not None, activation=a.activation, alpha=a.alpha, beta=a.beta,
        )  # fmt: skip
        return lambda inputs, outputs: run(*inputs, outputs[0])


@kernel
class InputGrad(_Gemm):
    """Rows are the input's pixels, columns its channels; K runs over the window and, fastest, the output's channels."""

    id, op = "opencl.conv2d_input_grad.gemm", "conv2d_input_grad"

    def shape(self, problem: Problem) -> tuple[int, int, int, int]:
        _, w = _specs(*problem.inputs)
        y, groups = problem.outputs[0], problem.attrs.conv.groups
        return y.size // y.shape[1], w.shape[1], w.shape[0] // groups * w.shape[2] * w.shape[3], groups

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (g, w), a, y = _specs(*problem.inputs), problem.attrs, problem.outputs[0]
        m, n, k, groups = self.shape(problem)
        geometry = sizes(a.conv, y.shape, w.shape, g.shape)
        f = geometry[4]
        if geometry[7:15] == [1, 1, 1, 1, 0, 0, 1, 1] and g.shape[2:] == y.shape[2:]:
            valid, address = "const int ok_ = m < M && k < end;", "m * (F_ * G_) + g * F_ + k"
        else:
            valid = (
                "const int f = k % F_, s = k / F_ % KW_, r = k / F_ / KW_, v = m % W_, h = m / W_ % H_, i = m / W_ / H_; "
                "const int p_ = h + PH_ - r * DH_, q_ = v + PW_ - s * DW_, oh = p_ / SH_, ow = q_ / SW_; "
                "const int ok_ = m < M && k < end && p_ >= 0 && q_ >= 0 && oh * SH_ == p_ && ow * SW_ == q_ && oh < OH_ && ow < OW_;"
            )
            address = "((i * OH_ + oh) * OW_ + ow) * (F_ * G_) + g * F_ + f"
        loaders = _constants(geometry) + loader("a", address, valid, "k", f % 4 == 0)
        loaders += loader(
            "b", "((g * F_ + k % F_) * (KH_ * KW_) + k / F_) * C_ + n", "const int ok_ = n < N && k < end;", "n", geometry[1] % 4 == 0
        )  # fmt: skip
        run = _gemm.product(
            device, config, loaders, m=m, n=n, k=k, groups=groups, row=n * groups, group_step=n, along=(True, False), size=max(g.size, w.size, y.size)
        )  # fmt: skip
        return lambda inputs, outputs: run(inputs[0], inputs[1], None, None, outputs[0])


@kernel
class WeightGrad(_Gemm):
    """Rows are the output's channels, columns the weight's other places; K runs over all pixels, shared among groups (split K)."""

    id, op = "opencl.conv2d_weight_grad.gemm", "conv2d_weight_grad"

    def shape(self, problem: Problem) -> tuple[int, int, int, int]:
        _, g = _specs(*problem.inputs)
        y, groups = problem.outputs[0], problem.attrs.conv.groups
        return y.shape[0] // groups, y.size // y.shape[0], g.size // g.shape[1], groups

    def configs(self, problem: Problem, device: Any) -> list[Config]:
        return _gemm.configs(device, *self.shape(problem), reduce=True)

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, g), a, y = _specs(*problem.inputs), problem.attrs, problem.outputs[0]
        m, n, k, groups = self.shape(problem)
        geometry = sizes(a.conv, x.shape, y.shape, g.shape)
        loaders = _constants(geometry) + loader("a", "k * (F_ * G_) + g * F_ + m", "const int ok_ = m < M && k < end;", "m", m % 4 == 0)
        if geometry[7:15] == [1, 1, 1, 1, 0, 0, 1, 1] and x.shape[2:] == g.shape[2:]:
            valid, address = "const int ok_ = n < N && k < end;", "k * (C_ * G_) + g * C_ + n"
        else:
            valid = (
                "const int c = n % C_, s = n / C_ % KW_, r = n / C_ / KW_, ow = k % OW_, oh = k / OW_ % OH_, i = k / OW_ / OH_; "
                "const int h = oh * SH_ - PH_ + r * DH_, v = ow * SW_ - PW_ + s * DW_; "
                "const int ok_ = n < N && k < end && h >= 0 && h < H_ && v >= 0 && v < W_;"
            )
            address = "((i * H_ + h) * W_ + v) * (C_ * G_) + g * C_ + c"
        loaders += loader("b", address, valid, "n", geometry[1] % 4 == 0)
        run = _gemm.product(
            device, config, loaders, m=m, n=n, k=k, groups=groups, row=n, group_step=m * n, along=(False, False), size=max(x.size, g.size, y.size)
        )  # fmt: skip
        if not a.bias:
            return lambda inputs, outputs: run(inputs[1], inputs[0], None, None, outputs[0])
        shared = 128 if device.is_gpu else 1
        add = launch_of(device, problem, _BIAS, "bias_grad", geometry, x, g, steps(y), size=y.shape[0], buffers=2, group=shared)

        def both(inputs: Any, outputs: Any) -> None:
            run(inputs[1], inputs[0], None, None, outputs[0])
            add(inputs[1], outputs[1])

        return both


@kernel
class InputGradByPhase(_Gemm):
    """For strides: the input's pixels that meet the same taps together, a product for each such phase, without the zeros in between."""

    id, op, rank = "opencl.conv2d_input_grad.phases", "conv2d_input_grad", 15

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        return super().refuse(problem, device) or (["it is for strides above 1"] if problem.attrs.conv.stride == (1, 1) else [])

    def shape(self, problem: Problem) -> tuple[int, int, int, int]:
        _, w = _specs(*problem.inputs)
        y, a = problem.outputs[0], problem.attrs.conv
        share = a.stride[0] * a.stride[1]
        k = max(1, w.shape[2] * w.shape[3] // share) * (w.shape[0] // a.groups)
        return max(1, y.size // y.shape[1] // share), w.shape[1], k, a.groups

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (g, w), a, y = _specs(*problem.inputs), problem.attrs, problem.outputs[0]
        groups, n = a.conv.groups, w.shape[1]
        geometry = sizes(a.conv, y.shape, w.shape, g.shape)
        f = geometry[4]
        runs: list[Any] = []
        empty = False
        for ph in range(min(a.conv.stride[0], y.shape[2])):
            rows = _taps(ph, a.conv.padding[0], w.shape[2], a.conv.stride[0], a.conv.dilation[0])
            for pw in range(min(a.conv.stride[1], y.shape[3])):
                columns = _taps(pw, a.conv.padding[1], w.shape[3], a.conv.stride[1], a.conv.dilation[1])
                if not rows or not columns:
                    empty = True
                    continue
                high, across = -(-(y.shape[2] - ph) // a.conv.stride[0]), -(-(y.shape[3] - pw) // a.conv.stride[1])
                m, k = y.shape[0] * high * across, len(rows) * len(columns) * f
                phase = {
                    "PH0": ph, "PW0": pw, "HP": high, "WP": across, "R0": rows[0], "RS": _step(rows), "S0": columns[0], "SS": _step(columns),
                    "SN": len(columns),
                }  # fmt: skip
                valid = (
                    "const int f = k % F_, s = S0 + k / F_ % SN * SS, r = R0 + k / F_ / SN * RS; "
                    "const int v = PW0 + m % WP * SW_, h = PH0 + m / WP % HP * SH_, i = m / WP / HP; "
                    "const int oh = (h + PH_ - r * DH_) / SH_, ow = (v + PW_ - s * DW_) / SW_; "
                    "const int ok_ = m < M && k < end && h + PH_ >= r * DH_ && v + PW_ >= s * DW_ && oh < OH_ && ow < OW_;"
                )
                address = "((i * OH_ + oh) * OW_ + ow) * (F_ * G_) + g * F_ + f"
                loaders = _constants(geometry) + "".join(f"#define {name} {value}\n" for name, value in phase.items())
                loaders += loader("a", address, valid, "k", f % 4 == 0)
                place = "((g * F_ + k % F_) * (KH_ * KW_) + (R0 + k / F_ / SN * RS) * KW_ + S0 + k / F_ % SN * SS) * C_ + n"
                loaders += loader("b", place, "const int ok_ = n < N && k < end;", "n", geometry[1] % 4 == 0)
                runs.append(
                    _gemm.product(
                        device, config, loaders, m=m, n=n, k=k, groups=groups, row=n * groups, group_step=n, along=(True, False),
                        size=max(g.size, w.size, y.size), rows="((INDEX)(m / WP / HP * H_ + PH0 + m / WP % HP * SH_) * W_ + PW0 + m % WP * SW_) * OM",
                    )
                )  # fmt: skip
        clear = filler(device, y, 0) if empty else None

        def run(inputs: Any, outputs: Any) -> None:
            if clear is not None:
                clear(outputs[0])
            for part in runs:
                part(inputs[0], inputs[1], None, None, outputs[0])

        return run


def _taps(phase: int, before: int, taps: int, stride: int, dilation: int) -> list[int]:
    """Which taps a pixel of this phase meets: those that lead to a whole output position."""
    return [t for t in range(taps) if (phase + before - t * dilation) % stride == 0]


def _step(taps: list[int]) -> int:
    return taps[1] - taps[0] if len(taps) > 1 else 1
