"""One product of matrices for all that is one: C (M, N) = A (M, K) B (K, N) in float32, tiled in registers and local memory.

Who uses it gives C functions that fetch elements of A and B, four at a time along one axis, so that a convolution is a product whose
A is gathered as it is read (implicit GEMM: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014). A work-group makes a
tile of BM x BN, a work-item TM x TN of it; tiles go through local memory BK of K at a time, the next one fetched into registers while
this one is used (Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", SC 2008). Where there are too few tiles to fill
the device, `split` groups share K; their partial sums are added by a second kernel in fixed order, then bias, residual and activation follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.devices.api import Config
from tilewright.devices.opencl._expr import activation_source
from tilewright.devices.opencl.program import launcher

TILES = (
    (128, 128, 16, 8, 8),
    (128, 64, 16, 8, 8),
    (64, 64, 16, 8, 4),
    (128, 32, 16, 8, 4),
    (64, 32, 16, 4, 4),
    (32, 128, 16, 4, 8),
    (32, 64, 16, 4, 4),
    (32, 32, 32, 4, 4),
)
CPU_TILES = ((32, 32, 16, 8, 8),)
NAMES = ("bm", "bn", "bk", "tm", "tn")
MOST_WORKSPACE = 256 << 20  # bytes of partial sums

SOURCE = """
#define TX (BN / TN)
#define TY (BM / TM)
#define T (TX * TY)
#define RM (TM / 4)
#define RN (TN / 4)
#define NA (BM * BK / 4 / T)
#define NB (BN * BK / 4 / T)
#define LDA (BM / 4 + 1)
#define LDB (BN / 4 + 1)
#if A_ALONG_K
#define A_M(q) ((q) / (BK / 4))
#define A_K(q) ((q) % (BK / 4) * 4)
#else
#define A_M(q) ((q) % (BM / 4) * 4)
#define A_K(q) ((q) / (BM / 4))
#endif
#if B_ALONG_K
#define B_N(q) ((q) / (BK / 4))
#define B_K(q) ((q) % (BK / 4) * 4)
#else
#define B_N(q) ((q) % (BN / 4) * 4)
#define B_K(q) ((q) / (BN / 4))
#endif
#define PUT4(share, ld, row, column, v) { __local float *p_ = (__local float *)(share) + (row) * (ld) * 4 + (column); \\
  p_[0] = v.x; p_[(ld) * 4] = v.y; p_[2 * (ld) * 4] = v.z; p_[3 * (ld) * 4] = v.w; }

__kernel __attribute__((reqd_work_group_size(T, 1, 1)))
void gemm(__global const float *restrict a, __global const float *restrict b, __global const float *restrict bias,
    __global const float *restrict residual, __global float *restrict out) {
  __local float4 as[BK * LDA];
  __local float4 bs[BK * LDB];
  const int tid = get_local_id(0), tx = tid % TX, ty = tid / TX;
  const int m0 = get_group_id(0) * BM, n0 = get_group_id(1) * BN;
  const int split = get_group_id(2) % SPLIT, g = get_group_id(2) / SPLIT;
  const int k0 = split * KS, k1 = min(k0 + KS, K);
  float4 acc[TM][RN];
  float4 ra[NA], rb[NB];
  #pragma unroll
  for (int i = 0; i < TM; ++i)
    #pragma unroll
    for (int j = 0; j < RN; ++j) acc[i][j] = (float4)(0.0f);
  #pragma unroll
  for (int i = 0; i < NA; ++i) { const int q = tid + i * T; ra[i] = load_a(a, g, m0 + A_M(q), k0 + A_K(q), k1); }
  #pragma unroll
  for (int i = 0; i < NB; ++i) { const int q = tid + i * T; rb[i] = load_b(b, g, k0 + B_K(q), n0 + B_N(q), k1); }
  for (int k = k0; k < k1; k += BK) {
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (int i = 0; i < NA; ++i) {
      const int q = tid + i * T;
#if A_ALONG_K
      PUT4(as, LDA, A_K(q), A_M(q), ra[i])
#else
      as[A_K(q) * LDA + A_M(q) / 4] = ra[i];
#endif
    }
    #pragma unroll
    for (int i = 0; i < NB; ++i) {
      const int q = tid + i * T;
#if B_ALONG_K
      PUT4(bs, LDB, B_K(q), B_N(q), rb[i])
#else
      bs[B_K(q) * LDB + B_N(q) / 4] = rb[i];
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (k + BK < k1) {
      #pragma unroll
      for (int i = 0; i < NA; ++i) { const int q = tid + i * T; ra[i] = load_a(a, g, m0 + A_M(q), k + BK + A_K(q), k1); }
      #pragma unroll
      for (int i = 0; i < NB; ++i) { const int q = tid + i * T; rb[i] = load_b(b, g, k + BK + B_K(q), n0 + B_N(q), k1); }
    }
    #pragma unroll
    for (int kk = 0; kk < BK; ++kk) {
      float4 va[RM], vb[RN];
      #pragma unroll
      for (int i = 0; i < RM; ++i) va[i] = as[kk * LDA + i * TY + ty];
      #pragma unroll
      for (int j = 0; j < RN; ++j) vb[j] = bs[kk * LDB + j * TX + tx];
      #pragma unroll
      for (int i = 0; i < RM; ++i)
        #pragma unroll
        for (int j = 0; j < RN; ++j) {
          acc[4 * i][j] = fma((float4)(va[i].x), vb[j], acc[4 * i][j]);
          acc[4 * i + 1][j] = fma((float4)(va[i].y), vb[j], acc[4 * i + 1][j]);
          acc[4 * i + 2][j] = fma((float4)(va[i].z), vb[j], acc[4 * i + 2][j]);
          acc[4 * i + 3][j] = fma((float4)(va[i].w), vb[j], acc[4 * i + 3][j]);
        }
    }
  }
  #pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int m = m0 + (i / 4 * TY + ty) * 4 + i % 4;
    if (m < M) {
      #pragma unroll
      for (int j = 0; j < RN; ++j) {
        const int n = n0 + (j * TX + tx) * 4;
#if SPLIT > 1
        const INDEX at = (((INDEX)split * G + g) * M + m) * N + n;
        if (n < N) out[at] = acc[i][j].x;
        if (n + 1 < N) out[at + 1] = acc[i][j].y;
        if (n + 2 < N) out[at + 2] = acc[i][j].z;
        if (n + 3 < N) out[at + 3] = acc[i][j].w;
#else
        const INDEX at = ROW(m) + (INDEX)g * OG + n;
        if (n < N) out[at] = FINISH(acc[i][j].x, at, n);
        if (n + 1 < N) out[at + 1] = FINISH(acc[i][j].y, at + 1, n + 1);
        if (n + 2 < N) out[at + 2] = FINISH(acc[i][j].z, at + 2, n + 2);
        if (n + 3 < N) out[at + 3] = FINISH(acc[i][j].w, at + 3, n + 3);
#endif
      }
    }
  }
}

__kernel void join(__global const float *restrict parts, __global const float *restrict bias, __global const float *restrict residual,
    __global float *restrict out) {
  const INDEX i = get_global_id(0);
  if (i >= (INDEX)G * M * N) return;
  float acc = 0.0f;
  for (int s = 0; s < SPLIT; ++s) acc += parts[(INDEX)s * G * M * N + i];
  const int n = i % N, m = i / N % M, g = i / N / M;
  const INDEX at = ROW(m) + (INDEX)g * OG + n;
  out[at] = FINISH(acc, at, n);
}
"""


def configs(device: Any, m: int, n: int, k: int, groups: int = 1, *, reduce: bool = False) -> list[Config]:
    """Tiles worth trying, the likeliest first; with split K where there would be fewer groups than the device takes."""
    if not device.is_gpu:
        return [tuple(zip(NAMES, CPU_TILES[0], strict=True)) + (("split", 1),)]
    found: list[tuple[float, Config]] = []
    for tile in TILES:
        bm, bn, bk, tm, tn = tile
        if bm // tm * (bn // tn) > device.max_group or (bm + bn + 8) * bk * 4 > device.local_memory:
            continue
        tiles = -(-m // bm) * -(-n // bn) * groups
        wanted = 2 * device.units
        split = 1
        if tiles < wanted:
            split = max(1, min(-(-wanted // tiles), k // (4 * bk), 64))
            while split > 1 and split * groups * m * n * 4 > MOST_WORKSPACE:
                split //= 2
        for s in dict.fromkeys((split, 1) if not reduce else (split,)):
            waste = tiles * bm * bn / (m * n * groups)  # work done for nothing at the edges
            rounds = -(-tiles * s // wanted) * wanted / (tiles * s)
            reuse = 1 + 24 / bm + 24 / bn  # reads from memory and local memory for each product
            found.append((waste * rounds * reuse, tuple(zip(NAMES, tile, strict=True)) + (("split", s),)))
    found.sort(key=lambda f: f[0])
    return [c for _, c in found[:6]]


def product(
    device: Any,
    config: Config,
    loaders: str,
    *,
    m: int,
    n: int,
    k: int,
    groups: int,
    row: int,
    group_step: int,
    along: tuple[bool, bool],
    size: int,
    rows: str = "",
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> Callable[..., None]:
    """run(a, b, bias, residual, out). `loaders`: C of load_a(p, g, m, k, end) and load_b(p, g, k, n, end), each four elements along K where
    `along` says so, else along M or N. Element (m, n) of group g goes to m * row + g * group_step + n, or with
    C `rows`, an expression in m, to that + g * group_step + n. size: the largest operand's elements.
    """
    values = dict(config)
    bm, bn, bk, split = values["bm"], values["bn"], values["bk"], values["split"]
    share = -(-k // (bk * split)) * bk
    index = "int" if max(size, groups * m * n * max(split, 1)) < 2**31 - 2**16 else "long"
    finish = "(v)"
    if bias:
        finish = f"({finish} + bias[g * N + (n)])"
    if residual:
        finish = f"({finish} + residual[at])"
    finish = f"tw_activation({finish})" if activation else finish
    head = (
        f"#define INDEX {index}\n"
        + "".join(f"#define {name} {value}\n" for name, value in (("M", m), ("N", n), ("K", k), ("G", groups), ("OM", row), ("OG", group_step)))
        + "".join(f"#define {name.upper()} {values[name]}\n" for name in NAMES)
        + f"#define SPLIT {split}\n#define KS {share}\n#define A_ALONG_K {int(along[0])}\n#define B_ALONG_K {int(along[1])}\n"
        + (activation_source(activation, alpha, beta) if activation else "")
        + f"#define FINISH(v, at, n) {finish}\n#define ROW(m) ({rows or '(INDEX)(m) * OM'})\n"
    )
    define = {"-cl-single-precision-constant": None}
    threads = (bm // values["tm"]) * (bn // values["tn"])
    tiles = (-(-m // bm) * threads, -(-n // bn), groups * split)
    source = head + loaders + SOURCE
    run = launcher(device, source, "gemm", size=tiles, group=(threads, 1, 1), define=define, buffers=5)
    if split == 1:
        return run
    join = launcher(device, source, "join", size=(groups * m * n,), group=(64,), define=define, buffers=4)
    room = split * groups * m * n * 4

    def both(a: Any, b: Any, bias: Any, residual: Any, out: Any) -> None:
        parts = device.allocate(room)
        run(a, b, None, None, parts)
        join(parts, bias, residual, out)

    return both


def workspace(config: Config, count: int) -> int:
    split = dict(config).get("split", 1)
    return split * count * 4 if split > 1 else 0


def loader(which: str, address: str, valid: str, along: str, vector: bool) -> str:
    """C of load_a or load_b: `address` of the element at (m, k) or (k, n) where `valid`, both in terms of g, m, n, k, `end`; zero elsewhere.

    Four of them along the axis `along` ("k", "m" or "n"): as one vector where they lie together and are valid together.
    """
    first = "const int m, const int k" if which == "a" else "const int k, const int n"
    names = "m, k" if which == "a" else "k, n"
    text = f"""
static float tw_{which}(__global const float *restrict p, const int g, {first}, const int end) {{
  {valid}
  return ok_ ? p[{address}] : 0.0f;
}}
"""
    if vector:
        return f"""
static float4 load_{which}(__global const float *restrict p, const int g, {first}, const int end) {{
  {valid}
  return ok_ ? *(__global const float4 *)(p + ({address})) : (float4)(0.0f);
}}
"""
    calls = ", ".join(f"tw_{which}(p, g, {names.replace(along, f'{along} + {i}')}, end)" for i in range(4))
    return (
        text + f"static float4 load_{which}(__global const float *restrict p, const int g, {first}, const int end) {{ return (float4)({calls}); }}\n"
    )
