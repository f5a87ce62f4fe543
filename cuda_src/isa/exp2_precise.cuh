// 2^x to fp32's precision, by plain arithmetic: the special-function unit is four times less exact.
#pragma once

#include "common/types.cuh"

namespace hfc {

// The integer part goes to the exponent, the Taylor polynomial on [-1/2, 1/2] takes the rest. Below -126 zero.
__device__ __forceinline__ float exp2_precise(float x) {
  const float bounded = x < 128.0f ? (x > -127.0f ? x : -127.0f) : 128.0f;  // NaN becomes 128, put right below
  const float shifted = bounded + 12582912.0f;                             // 1.5 * 2^23: rounds to the nearest integer
  const float fraction = bounded - (shifted - 12582912.0f);
  float p = 1.5252734e-5f;  // ln(2)^7 / 7!
  p = p * fraction + 1.5403530e-4f;
  p = p * fraction + 1.3333558e-3f;
  p = p * fraction + 9.6181291e-3f;
  p = p * fraction + 5.5504109e-2f;
  p = p * fraction + 2.4022651e-1f;
  p = p * fraction + 6.9314718e-1f;
  p = p * fraction + 1.0f;
  const float scaled = p * bits_float((float_bits(shifted) << 23) + 0x3f800000u);
  const float infinity = bits_float(0x7f800000u);
  return x > -126.0f ? (x < 128.0f ? scaled : x + infinity) : (x <= -126.0f ? 0.0f : x);
}

}  // namespace hfc
