// A matrix tile in shared memory, rows of 16-byte chunks, swizzled so that no eight rows of a column meet in one bank.
#pragma once

#include "common/types.cuh"
#include "isa.cuh"

namespace hfc {

template <typename Element_, int kRows_, int kColumns_>
struct SharedTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kElementsPerChunk = 16 / sizeof(Element);
  static constexpr int kChunks = kColumns / kElementsPerChunk;  // of a row
  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kBytes = kRows * kRowBytes;

  static_assert(kColumns % kElementsPerChunk == 0);

  SharedPtr base;

  __device__ __forceinline__ SharedPtr at(int row, int chunk) const {
    return base + (row * kRowBytes + (chunk ^ swizzle(row)) * 16);
  }
  // Row `lane_row + row` with row a multiple of 8, chunk `even + odd` with odd 0 or 1. Only the first part depends on the
  // lane; the constants `even` and `row` follow as an exclusive or and an offset, so that a loop keeps few addresses.
  __device__ __forceinline__ SharedPtr at(int lane_row, int row, int even, int odd) const {
    const SharedPtr lane_address = base + (lane_row * kRowBytes + (odd ^ swizzle(lane_row)) * 16);
    return flip_bits(lane_address, even % kGroup * 16) + (row * kRowBytes + even / kGroup * kGroup * 16);
  }
  __device__ __forceinline__ SharedPtr element(int row, int column) const {
    return at(row, column / kElementsPerChunk) + column % kElementsPerChunk * int(sizeof(Element));
  }

 private:
  // The eight chunks of 128 bytes cover the banks once. A row of c chunks moves the start by c modulo 8, so rows collide
  // every 8 / g rows, g = the largest power of two in c (at most 8): exactly these exchange their chunks.
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
  __device__ __forceinline__ static int swizzle(int row) { return int(uint32(row) / uint32(8 / kGroup) % uint32(kGroup)); }
};

}  // namespace hfc
