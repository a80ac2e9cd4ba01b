"""Depthwise convolution, one output channel for each input channel, channels last: bound by memory, so four channels at a time.

Forward: a work-item makes `wide` neighbouring outputs of a row, and reads what their windows share once. Input gradient: a work-item gathers
a pixel. Weight gradient: a group sums a strip of pixels with all taps in registers, a second kernel adds the strips in fixed order.
"""

from __future__ import annotations

from typing import Any

from tilewright.devices.api import CHANNELS_LAST, Config, Launch, Problem, Spec, kernel
from tilewright.devices.opencl._base import ClKernel
from tilewright.devices.opencl._expr import activation_source
from tilewright.devices.opencl.conv2d.direct import _BIAS, launch_of, sizes, steps
from tilewright.devices.opencl.program import launcher

TAPS = 25  # most taps whose sums a work-item holds in registers
_NAMES = ("N", "C", "H", "W", "F", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW", "G")

_HEAD = """
#define Q (G / 4)
#define W4(w, c, t) (float4)(w[(c) * (KH * KW) + (t)], w[((c) + 1) * (KH * KW) + (t)], w[((c) + 2) * (KH * KW) + (t)], w[((c) + 3) * (KH * KW) + (t)])
"""
_FORWARD = """
#define SPAN ((WIDE - 1) * SW + (KW - 1) * DW + 1)
#define STRIPS ((OW + WIDE - 1) / WIDE)
__kernel void forward(__global const float4 *restrict x, __global const float *restrict w, __global const float4 *restrict bias,
    __global const float4 *restrict residual, __global float4 *restrict y) {
  const int i = get_global_id(0);
  if (i >= N * OH * STRIPS * Q) return;
  const int c = i % Q, ow = i / Q % STRIPS * WIDE, oh = i / Q / STRIPS % OH, n = i / Q / STRIPS / OH;
  float4 acc[WIDE];
  #pragma unroll
  for (int j = 0; j < WIDE; ++j) acc[j] = (float4)(0.0f);
  #pragma unroll
  for (int r = 0; r < KH; ++r) {
    const int h = oh * SH - PH + r * DH;
    if (h < 0 || h >= H) continue;
    float4 row[SPAN];
    #pragma unroll
    for (int j = 0; j < SPAN; ++j) {
      const int v = ow * SW - PW + j;
      row[j] = v >= 0 && v < W ? x[((n * H + h) * W + v) * Q + c] : (float4)(0.0f);
    }
    #pragma unroll
    for (int s = 0; s < KW; ++s) {
      const float4 t = W4(w, c * 4, r * KW + s);
      #pragma unroll
      for (int j = 0; j < WIDE; ++j) acc[j] = fma(row[j * SW + s * DW], t, acc[j]);
    }
  }
  #pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    if (ow + j >= OW) break;
    const int at = ((n * OH + oh) * OW + ow + j) * Q + c;
    float4 v = acc[j];
#if BIASED
    v += bias[c];
#endif
#if ADDED
    v += residual[at];
#endif
    y[at] = (float4)(tw_activation(v.x), tw_activation(v.y), tw_activation(v.z), tw_activation(v.w));
  }
}
"""
_INPUT = """
__kernel void input_grad(__global const float4 *restrict g, __global const float *restrict w, __global float4 *restrict y) {
  const int i = get_global_id(0);
  if (i >= N * H * W * Q) return;
  const int c = i % Q, v = i / Q % W, h = i / Q / W % H, n = i / Q / W / H;
  float4 acc = (float4)(0.0f);
  #pragma unroll
  for (int r = 0; r < KH; ++r) {
    const int a = h + PH - r * DH, oh = a / SH;
    if (a < 0 || oh * SH != a || oh >= OH) continue;
    #pragma unroll
    for (int s = 0; s < KW; ++s) {
      const int b = v + PW - s * DW, ow = b / SW;
      if (b < 0 || ow * SW != b || ow >= OW) continue;
      acc = fma(g[((n * OH + oh) * OW + ow) * Q + c], W4(w, c * 4, r * KW + s), acc);
    }
  }
  y[i] = acc;
}
"""
# A group has LC work-items side by side over channels and LP over pixels; it sums pixels strip * P to strip * P + P.
_WEIGHT = """
__kernel __attribute__((reqd_work_group_size(LC * LP, 1, 1)))
void weight_grad(__global const float4 *restrict x, __global const float4 *restrict g, __global float4 *restrict parts) {
  __local float4 share[LC * LP];
  const int lid = get_local_id(0), lc = lid % LC, lp = lid / LC;
  const int c = get_group_id(0) * LC + lc, strip = get_group_id(1);
  float4 acc[KH * KW];
  #pragma unroll
  for (int t = 0; t < KH * KW; ++t) acc[t] = (float4)(0.0f);
  const int last = min((strip + 1) * P, N * OH * OW);
  if (c < Q)
    for (int p = strip * P + lp; p < last; p += LP) {
      const int ow = p % OW, oh = p / OW % OH, n = p / OW / OH;
      const float4 d = g[p * Q + c];
      #pragma unroll
      for (int r = 0; r < KH; ++r) {
        const int h = oh * SH - PH + r * DH;
        #pragma unroll
        for (int s = 0; s < KW; ++s) {
          const int v = ow * SW - PW + s * DW;
          if (h >= 0 && h < H && v >= 0 && v < W) acc[r * KW + s] = fma(x[((n * H + h) * W + v) * Q + c], d, acc[r * KW + s]);
        }
      }
    }
  for (int t = 0; t < KH * KW; ++t) {
    barrier(CLK_LOCAL_MEM_FENCE);
    share[lid] = acc[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_ = LP / 2; half_ > 0; half_ >>= 1) {
      if (lp < half_) share[lid] += share[lid + half_ * LC];
      barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lp == 0 && c < Q) parts[(strip * (KH * KW) + t) * Q + c] = share[lid];
  }
}
__kernel void join(__global const float *restrict parts, __global float *restrict y) {
  const int i = get_global_id(0);
  if (i >= G * KH * KW) return;
  const int c = i % G, t = i / G;
  float acc = 0.0f;
  for (int s = 0; s < STRIPS; ++s) acc += parts[(s * (KH * KW) + t) * G + c];
  y[c * (KH * KW) + t] = acc;
}
"""


class _Depthwise(ClKernel):
    rank = 10

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        operands = [s for s in problem.inputs + problem.outputs if s is not None]
        conv = problem.attrs if self.op == "conv2d" else problem.attrs.conv
        channels = self.channels(problem)
        if conv.groups < 2 or channels != (conv.groups, conv.groups):
            return ["it is for depthwise convolutions, with as many groups as channels on either side"]
        if conv.groups % 4:
            return [f"it takes four channels at a time, and {conv.groups} are no multiple of 4"]
        if any(s.dtype.name != "float32" for s in operands):
            return ["it computes in float32 alone"]
        if any(s.ndim == 4 and s.layout != CHANNELS_LAST for s in operands):
            return ["it reads and writes channels last alone"]
        if problem.empty:
            return ["there is nothing to compute"]
        if any(s.size >= 2**31 - 2**16 for s in operands):
            return ["an operand is beyond its 32-bit offsets"]
        kh, kw = self.window(problem)
        if kh * kw > 49 or conv.stride[1] > 4 or conv.dilation[1] * (kw - 1) > 16:
            return ["its window would not fit the registers: at most 49 taps, 17 columns, and a stride of 4"]
        return []

    def channels(self, problem: Problem) -> tuple[int, int]:
        x, y = (problem.outputs[0], problem.inputs[0]) if self.op == "conv2d_input_grad" else (problem.inputs[0], problem.outputs[0])
        if self.op == "conv2d_weight_grad":
            y = problem.inputs[1]
        assert x is not None
        assert y is not None
        return x.shape[1], y.shape[1]

    def window(self, problem: Problem) -> tuple[int, int]:
        w = problem.outputs[0] if self.op == "conv2d_weight_grad" else problem.inputs[1]
        assert w is not None
        return w.shape[2], w.shape[3]

    def source(self, conv: Any, x: Spec, w: Spec, y: Spec, body: str, **more: int) -> str:
        geometry = dict(zip(_NAMES, sizes(conv, x.shape, w.shape, y.shape), strict=True)) | more
        return "".join(f"#define {name} {value}\n" for name, value in geometry.items()) + _HEAD + body


def _all(*operands: Spec | None) -> list[Spec]:
    assert all(s is not None for s in operands)
    return [s for s in operands if s is not None]


@kernel
class Forward(_Depthwise):
    id, op = "opencl.conv2d.depthwise", "conv2d"

    def configs(self, problem: Problem, device: Any) -> list[Config]:
        return [(("wide", n),) for n in ((4, 2, 8, 1) if device.is_gpu else (4,))]

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, w), a, y = _all(*problem.inputs[:2]), problem.attrs, problem.outputs[0]
        wide = dict(config)["wide"]
        more = {"WIDE": wide, "BIASED": int(problem.inputs[2] is not None), "ADDED": int(problem.inputs[3] is not None)}
        source = activation_source(a.activation, a.alpha, a.beta) + self.source(a, x, w, y, _FORWARD, **more)
        size = y.shape[0] * y.shape[2] * -(-y.shape[3] // wide) * (y.shape[1] // 4)
        run = launcher(device, source, "forward", size=(size,), group=(64,), define={"-cl-single-precision-constant": None}, buffers=5)
        return lambda inputs, outputs: run(*inputs, outputs[0])


@kernel
class InputGrad(_Depthwise):
    id, op = "opencl.conv2d_input_grad.depthwise", "conv2d_input_grad"

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (g, w), y = _all(*problem.inputs), problem.outputs[0]
        source = self.source(problem.attrs.conv, y, w, g, _INPUT)
        run = launcher(device, source, "input_grad", size=(y.size // 4,), group=(64,), buffers=3)
        return lambda inputs, outputs: run(inputs[0], inputs[1], outputs[0])


@kernel
class WeightGrad(_Depthwise):
    id, op = "opencl.conv2d_weight_grad.depthwise", "conv2d_weight_grad"

    def refuse(self, problem: Problem, device: Any) -> list[str]:
        kh, kw = problem.attrs.kernel
        return super().refuse(problem, device) or ([f"it holds at most {TAPS} taps in registers"] if kh * kw > TAPS else [])

    def _layout(self, problem: Problem, device: Any) -> tuple[int, int, int, int]:
        """(work-items over channels, over pixels, pixels of a strip, strips)"""
        (_, g) = _all(*problem.inputs)
        quads, pixels = g.shape[1] // 4, g.size // g.shape[1]
        threads = min(128, device.max_group) if device.is_gpu else 16
        over_c = 1
        while over_c < min(quads, 32 if device.is_gpu else 4):
            over_c *= 2
        over_p = threads // over_c
        blocks = -(-quads // over_c)
        strips = max(1, min(-(-4 * device.units // blocks), -(-pixels // (8 * over_p))))
        strip = -(-pixels // strips)
        return over_c, over_p, strip, -(-pixels // strip)

    def workspace(self, problem: Problem, config: Config) -> int:
        return 4 * 1024 * problem.outputs[0].size

    def prepare(self, problem: Problem, config: Config, device: Any) -> Launch:
        (x, g), a, y = _all(*problem.inputs), problem.attrs, problem.outputs[0]
        over_c, over_p, strip, strips = self._layout(problem, device)
        source = self.source(a.conv, x, y, g, _WEIGHT, LC=over_c, LP=over_p, P=strip, STRIPS=strips)
        blocks = -(-g.shape[1] // 4 // over_c)
        group = over_c * over_p
        run = launcher(device, source, "weight_grad", size=(blocks * group, strips), group=(group, 1), buffers=3)
        join = launcher(device, source, "join", size=(y.size,), group=(64,), buffers=2)
        room = strips * y.size * 4
        add = None
        if a.bias:
            geometry = sizes(a.conv, x.shape, y.shape, g.shape)
            shared = 128 if device.is_gpu else 1
            add = launch_of(device, problem, _BIAS, "bias_grad", geometry, x, g, steps(y), size=y.shape[0], buffers=2, group=shared)

        def both(inputs: Any, outputs: Any) -> None:
            parts = device.allocate(room)
            run(inputs[0], inputs[1], parts)
            join(parts, outputs[0])
            if add is not None:
                add(inputs[1], outputs[1])

        return both
