// Four 8x8 matrices of 16-bit elements: every row's address can be asked for, so no exchange is needed.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

template <typename Address>
__device__ __forceinline__ void ldmatrix(uint32 (&r)[4], Address address) {
  const int lane = lane_id();
  for (int i = 0; i < 4; ++i) r[i] = read<uint32>(address(8 * i + lane / 4) + 4 * (lane % 4));
}

template <typename Address>
__device__ __forceinline__ void ldmatrix_transposed(uint32 (&r)[4], Address address) {
  const int lane = lane_id(), row = 2 * (lane % 4), column = 2 * (lane / 4);
  for (int i = 0; i < 4; ++i) {
    const uint32 low = read<uint16>(address(8 * i + row) + column);
    const uint32 high = read<uint16>(address(8 * i + row + 1) + column);
    r[i] = low | high << 16;
  }
}

}  // namespace hfc
