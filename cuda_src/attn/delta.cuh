// delta of the backward pass: for each row the sum of dout * out, which is that of the probabilities times their gradients.
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "isa.cuh"
#include "tile/copy.cuh"

namespace hfc {

// The dot product of one row of dout and out, summed by kLanes neighbouring lanes.
template <bool kVector, int kLanes, typename Element>
__device__ __forceinline__ float row_product(const Element* dout, const Element* out, int columns) {
  constexpr int kPerChunk = 16 / sizeof(Element);
  float sum = 0.0f;
  for (int column = lane_id() % kLanes * kPerChunk; column < columns; column += kLanes * kPerChunk) {
    Chunk a, b;
    if constexpr (kVector) {
      a = load_global_chunk(dout + column);
      b = load_global_chunk(out + column);
    } else {
      a = load_elements(dout + column, columns - column);
      b = load_elements(out + column, columns - column);
    }
    sum += chunk_product<Element>(a, b);
  }
  return group_sum<kLanes>(sum);
}

// delta of the row that lies at `index` in lse's layout. lse's own gradient is subtracted; a row without keys has none,
// whatever came for its lse.
__device__ __forceinline__ void store_delta(const AttentionParams& params, int64 index, float product) {
  const float dlse = params.dlse == nullptr ? 0.0f : params.dlse[index];
  params.delta[index] = params.lse[index] == bits_float(0xff800000u) ? 0.0f : product - dlse;
}

}  // namespace hfc
