// Number formats and the special-function unit (PTX ISA: cvt, ex2, rcp).
#pragma once

#include "common/types.cuh"

namespace hfc {

__device__ __forceinline__ float natural_log(float x) { return logf(x); }  // to an ulp: once a row, not once a score
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_float(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float abs_float(float x) { return fabsf(x); }
__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }  // rounded: never part of an FMA

__device__ __forceinline__ uint32 float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(uint32 x) { return __uint_as_float(x); }

}  // namespace hfc

#include "isa/exp2_precise.cuh"

namespace hfc {

// 2^x as exact as products of Element make it worth.
template <typename Element>
__device__ __forceinline__ float exp2_fast(float x) {
  if constexpr (is_same<Element, float>::value) return exp2_precise(x);
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename Element>
__device__ __forceinline__ float to_float(uint16 bits) {
  if constexpr (is_same<Element, bf16>::value) return bits_float(uint32(bits) << 16);
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Two floats to one register, `low` in the lower half.
template <typename Element>
__device__ __forceinline__ uint32 pack2(float low, float high) {
  uint32 packed;
  if constexpr (is_same<Element, bf16>::value) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    static_assert(!is_same<Element, Element>::value, "bf16 needs sm_80");
#endif
  } else {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("{\n .reg .f16 lo, hi;\n cvt.rn.f16.f32 lo, %1;\n cvt.rn.f16.f32 hi, %2;\n mov.b32 %0, {lo, hi};\n}"
        : "=r"(packed)
        : "f"(low), "f"(high));
#endif
  }
  return packed;
}

}  // namespace hfc
