// How the warps of a group, each with its own keys ("split-K"), put their results together through shared memory.
#pragma once

#include "isa.cuh"
#include "tile/fragment.cuh"

namespace hfc {

// One number of every warp for every row: maxima and sums.
template <int kRows, int kNumWarps>
struct RowTable {
  static constexpr int kBytes = kRows * kNumWarps * int(sizeof(float));

  SharedPtr base;
  int warp;  // this one

  // `values` of the lane's rows, the same in the four lanes of a quad.
  template <int kCount>
  __device__ __forceinline__ void put(const float (&values)[kCount]) const {
    if (lane_id() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      store_shared(base + (row_of(i / 2, i % 2 * 2) * kNumWarps + warp) * 4, float_bits(values[i]));
  }

  // The numbers of all warps, reduced in the order of the warps.
  template <typename Combine>
  __device__ __forceinline__ float reduce(int row, Combine combine) const {
    const SharedPtr numbers = base + row * kNumWarps * 4;
    float result;
    if constexpr (kNumWarps % 4 == 0) {
#pragma unroll
      for (int first = 0; first < kNumWarps; first += 4) {
        const Chunk chunk = load_shared_chunk(numbers + first * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float number = bits_float(chunk.words[i]);
          result = first + i == 0 ? number : combine(result, number);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kNumWarps; ++i) {
        const float number = bits_float(load_shared(numbers + i * 4));
        result = i == 0 ? number : combine(result, number);
      }
    }
    return result;
  }
};

// The smallest divisor of kNumber that is at least kLeast.
constexpr int divisor_from(int number, int least) { return number % least == 0 ? least : divisor_from(number, least + 1); }

// Partial products of every warp, kM × kN fragments of an accumulator. A fragment travels as it lies in the registers, 16 bytes
// a lane: no bank conflicts on either side. Of the sum each warp takes kOwn fragments of one row tile.
template <int kM, int kN, int kNumWarps>
struct PartialProducts {
  static constexpr int kFragmentBytes = kWarpSize * 16;
  static constexpr int kWarpBytes = kM * kN * kFragmentBytes;
  static constexpr int kBytes = kNumWarps * kWarpBytes;
  static constexpr int kOwn = divisor_from(kN, (kM * kN + kNumWarps - 1) / kNumWarps);
  static_assert(kM <= kNumWarps, "a warp's share would span row tiles");

  SharedPtr base;
  int warp;  // this one

  __device__ __forceinline__ bool owns() const { return warp * kOwn < kM * kN; }  // there may be more warps than shares
  __device__ __forceinline__ int own_row_tile() const { return warp * kOwn / kN; }
  __device__ __forceinline__ int own_column_tile() const { return warp * kOwn % kN; }

  __device__ __forceinline__ void put(const float (&accumulator)[kM][kN][4]) const {
    const SharedPtr target = base + (warp * kWarpBytes + lane_id() * 16);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < 4; ++e) chunk.words[e] = float_bits(accumulator[i][j][e]);
        store_shared(target + (i * kN + j) * kFragmentBytes, chunk);
      }
  }

  // The warp's own fragments, summed over the warps that `counts` names, in their order.
  template <typename Counts>
  __device__ __forceinline__ void sum(float (&own)[kOwn][4], Counts counts) const {
#pragma unroll
    for (int f = 0; f < kOwn; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) own[f][e] = 0.0f;
    const SharedPtr source = base + (warp * kOwn * kFragmentBytes + lane_id() * 16);
#pragma unroll
    for (int from = 0; from < kNumWarps; ++from) {
      if (!counts(from)) continue;
#pragma unroll
      for (int f = 0; f < kOwn; ++f) {
        const Chunk chunk = load_shared_chunk(source + from * kWarpBytes + f * kFragmentBytes);
#pragma unroll
        for (int e = 0; e < 4; ++e) own[f][e] += bits_float(chunk.words[e]);
      }
    }
  }
};

// Two neighbouring elements of an accumulator, and of a row in device memory.
struct alignas(8) FloatPair {
  float x, y;
};
template <typename Element>
struct alignas(2 * sizeof(Element)) ElementPair {
  Element x, y;
};

// The pair at `column` of a row of `columns` elements, rounded to Element; kVector: it is whole and aligned.
template <bool kVector, typename Element>
__device__ __forceinline__ void store_pair(Element* row, int column, int columns, FloatPair pair) {
  if (column >= columns) return;
  Element* target = row + column;
  ElementPair<Element> rounded;
  if constexpr (sizeof(Element) == 2) {
    const uint32 word = pack2<Element>(pair.x, pair.y);
    rounded = {{uint16(word)}, {uint16(word >> 16)}};
  } else {
    rounded = {pair.x, pair.y};
  }
  if constexpr (kVector) {
    *reinterpret_cast<ElementPair<Element>*>(target) = rounded;
  } else {
    target[0] = rounded.x;
    if (column + 1 < columns) target[1] = rounded.y;
  }
}

}  // namespace hfc
