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

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// 2^x: the integer part goes to the exponent, the Taylor polynomial on [-1/2, 1/2] takes the rest; below -126 zero.
__device__ __forceinline__ float exp2_fast(float x) {
  const float bounded = x < 128.0f ? (x > -127.0f ? x : -127.0f) : 128.0f;  // NaN becomes 128, put right below
  const float shifted = bounded + 12582912.0f;                             // 1.5 * 2^23: rounds to the nearest integer
  const float fraction = bounded - (shifted - 12582912.0f);
  float p = 1.5403530e-4f;
  p = p * fraction + 1.3333558e-3f;
  p = p * fraction + 9.6181291e-3f;
  p = p * fraction + 5.5504109e-2f;
  p = p * fraction + 2.4022651e-1f;
  p = p * fraction + 6.9314718e-1f;
  p = p * fraction + 1.0f;
  const uint32 exponent = (float_bits(shifted) << 23) + 0x3f800000u;
  const float scaled = p * bits_float(exponent);
  return x > -126.0f ? (x < 128.0f ? scaled : x + INFINITY) : (x <= -126.0f ? 0.0f : x);
}
inline float natural_log(float x) { return std::log(x); }
__device__ __forceinline__ float reciprocal_fast(float x) { return 1.0f / x; }

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
