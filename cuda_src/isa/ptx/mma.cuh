// Warp-level matrix products, fp32 accumulation (PTX ISA: mma.sync, m16n8k16 for 16-bit and m16n8k8 for 32-bit elements).
// With group = lane / 4 and t = lane % 4 a lane holds:
//   accumulator  [0] (group, 2t)  [1] (group, 2t+1)  [2] (group+8, 2t)  [3] (group+8, 2t+1)
//   16-bit A     [0] (group, 2t..)  [1] (group+8, 2t..)  [2] (group, 2t+8..)  [3] (group+8, 2t+8..)    two elements a register
//   16-bit B     [0] (k 2t.., n group)  [1] (k 2t+8.., n group)
//   32-bit A     [0] (group, t)  [1] (group+8, t)  [2] (group, t+4)  [3] (group+8, t+4)
//   32-bit B     [0] (k t, n group)  [1] (k t+4, n group)
#pragma once

#include "common/types.cuh"
#include "convert.cuh"
#include "thread.cuh"

namespace hfc {

struct tf32 {};  // names the product of fp32 operands on tensor cores, which keep 10 bits of the mantissa

template <typename Element>
__device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]);

template <>
__device__ __forceinline__ void mma<fp16>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32 round_tf32(uint32 x) {
  uint32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(bits_float(x)));
  return y;
}

template <>
__device__ __forceinline__ void mma<tf32>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(round_tf32(a[0])), "r"(round_tf32(a[1])), "r"(round_tf32(a[2])), "r"(round_tf32(a[3])), "r"(round_tf32(b[0])),
        "r"(round_tf32(b[1])));
}
#endif

// d[i][first + j] += a[i] b[j] for a whole row of tiles: one call a k-step, so that a CPU exchanges operands once.
template <typename Element, int kM, int kN, int kColumns>
__device__ __forceinline__ void mma_tile(float (&d)[kM][kColumns][4], int first, const uint32 (&a)[kM][4],
                                         const uint32 (&b)[kN][2]) {
  if constexpr (!is_same<Element, float>::value) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int i = 0; i < kM; ++i) mma<Element>(d[i][first + j], a[i], b[j]);
  } else {
    // True fp32: no tensor core keeps all 24 bits, so the lanes hand their operands round and use plain FMAs.
    const int quad = lane_id() & ~3, column = lane_id() % 4 * 8;
    float sums[kM][kN][4] = {};  // of this step alone: long sums of short sums keep more digits
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll 1  // unrolled, the compiler would hold the operands of all steps
      for (int t = 0; t < 4; ++t) {
        float rows[kM][2];
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          rows[i][0] = bits_float(__shfl_sync(~0u, a[i][2 * half], quad + t));
          rows[i][1] = bits_float(__shfl_sync(~0u, a[i][2 * half + 1], quad + t));
        }
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const float x = bits_float(__shfl_sync(~0u, b[j][half], column + t));
          const float y = bits_float(__shfl_sync(~0u, b[j][half], column + 4 + t));
#pragma unroll
          for (int i = 0; i < kM; ++i) {
            sums[i][j][0] = fmaf(rows[i][0], x, sums[i][j][0]);
            sums[i][j][1] = fmaf(rows[i][0], y, sums[i][j][1]);
            sums[i][j][2] = fmaf(rows[i][1], x, sums[i][j][2]);
            sums[i][j][3] = fmaf(rows[i][1], y, sums[i][j][3]);
          }
        }
      }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][first + j][e] += sums[i][j][e];
  }
}

}  // namespace hfc
