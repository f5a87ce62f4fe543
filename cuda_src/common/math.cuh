// Integer helpers shared by every kernel.
#pragma once

#include "common/types.cuh"

namespace hfc {

template <typename T>
__device__ __forceinline__ constexpr T min(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
__device__ __forceinline__ constexpr T max(T a, T b) {
  return a > b ? a : b;
}

template <typename T>
__device__ __forceinline__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

struct DivMod {
  int64 quotient;
  int64 remainder;
};

// 64-bit division costs a hundred instructions: take the 32-bit one whenever both operands allow it.
__device__ __forceinline__ DivMod divmod(int64 a, int64 b) {
  if (((a | b) >> 32) == 0) {
    const uint32 quotient = uint32(a) / uint32(b);
    return {int64(quotient), int64(uint32(a) - quotient * uint32(b))};
  }
  return {a / b, a % b};
}

}  // namespace hfc
