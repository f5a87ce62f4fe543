// Number formats and special functions.
#pragma once

#include <cmath>
#include <cstring>

#include "common/types.cuh"

namespace hfc {

__device__ __forceinline__ uint32 float_bits(float x) {
  uint32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
__device__ __forceinline__ float bits_float(uint32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

__device__ __forceinline__ float max_float(float a, float b) { return a >= b || b != b ? a : b; }

__device__ __forceinline__ float abs_float(float x) { return x < 0.0f ? -x : x; }

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// g++ would make one FMA of a product and the sum it goes into.
__device__ __forceinline__ float multiply(float a, float b) { return __builtin_fmaf(a, b, -0.0f); }

inline float natural_log(float x) { return std::log(x); }
__device__ __forceinline__ float reciprocal_fast(float x) { return 1.0f / x; }

}  // namespace hfc

#include "isa/exp2_precise.cuh"

namespace hfc {

template <typename Element>
__device__ __forceinline__ float exp2_fast(float x) {
  return exp2_precise(x);
}

template <typename Element>
__device__ __forceinline__ float to_float(uint16 bits) {
  if constexpr (is_same<Element, bf16>::value) return bits_float(uint32(bits) << 16);
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return float(x);
}

template <typename Element>
__device__ __forceinline__ uint16 from_float(float x) {
  if constexpr (is_same<Element, bf16>::value) {
    const uint32 bits = float_bits(x);
    if (x != x) return uint16(bits >> 16 | 0x40);
    return uint16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);  // round to nearest even
  }
  const _Float16 half = _Float16(x);
  uint16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

template <typename Element>
__device__ __forceinline__ uint32 pack2(float low, float high) {
  return uint32(from_float<Element>(low)) | uint32(from_float<Element>(high)) << 16;
}

}  // namespace hfc
