// Warp-level matrix products: the last lane of a warp gathers everybody's fragments (layouts: isa/ptx/mma.cuh), multiplies
// them as small dense matrices and adds the result to everybody's accumulators.
#pragma once

#include "common/types.cuh"
#include "convert.cuh"
#include "thread.cuh"

namespace hfc {

struct tf32 {};

namespace host {

typedef float Vector __attribute__((vector_size(32)));  // eight columns: one n-tile

template <typename Element, int kK>
__device__ __forceinline__ void unpack_fragment(uint32 bits, float* target, int stride) {
  if constexpr (kK == 16) {
    target[0] = to_float<Element>(uint16(bits));
    target[stride] = to_float<Element>(uint16(bits >> 16));
  } else {
    target[0] = bits_float(bits);
  }
}

template <typename Element, int kM, int kN, int kColumns>
struct MmaOperands {
  float (*d)[kColumns][4];
  const uint32 (*a)[4];
  const uint32 (*b)[2];
};

template <typename Element, int kM, int kN, int kColumns>
inline void multiply(MmaOperands<Element, kM, kN, kColumns>* const* lanes, int first) {
  constexpr int kK = is_same<Element, float>::value ? 8 : 16;  // depth of one step
  constexpr int kPerRegister = kK / 8;
  alignas(64) float a[kM * 16][kK];
  alignas(64) float b[kK][kN][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = *lanes[lane];
    const int group = lane / 4, k = lane % 4 * kPerRegister;
    for (int i = 0; i < kM; ++i)
      for (int r = 0; r < 4; ++r)
        unpack_fragment<Element, kK>(mine.a[i][r], &a[16 * i + group + r % 2 * 8][k + r / 2 * kK / 2], 1);
    for (int j = 0; j < kN; ++j)
      for (int r = 0; r < 2; ++r) unpack_fragment<Element, kK>(mine.b[j][r], &b[k + r * kK / 2][j][group], kN * 8);
  }
  for (int row = 0; row < kM * 16; ++row) {
    Vector sums[kN] = {};
    for (int k = 0; k < kK; ++k) {
      const float x = a[row][k];
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) sums[j] += x * *reinterpret_cast<const Vector*>(b[k][j]);
    }
    const int i = row / 16, group = row % 8, half = row / 8 % 2;
    for (int j = 0; j < kN; ++j)
      for (int n = 0; n < 8; ++n) lanes[group * 4 + n / 2]->d[i][first + j][2 * half + n % 2] += sums[j][n];
  }
}

}  // namespace host

template <typename Element, int kM, int kN, int kColumns>
inline void mma_tile(float (&d)[kM][kColumns][4], int first, const uint32 (&a)[kM][4], const uint32 (&b)[kN][2]) {
  using Operands = host::MmaOperands<Element, kM, kN, kColumns>;
  Operands operands{d, a, b};
  host::Block::current->warp_collective(&operands, [first](void** lanes) {
    host::multiply<Element, kM, kN, kColumns>(reinterpret_cast<Operands**>(lanes), first);
  });
}

}  // namespace hfc
