// delta of the backward pass: for each row the sum of dout * out, which is that of the probabilities times their gradients.
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "isa.cuh"
#include "tile/copy.cuh"

namespace hfc {

constexpr int kDeltaLanes = 8;  // that share a row
constexpr int kDeltaRows = 4;   // that such lanes ask for at once

// The dot products of kRows rows of dout and out, at most kColumns wide, each summed by kDeltaLanes neighbouring lanes. The rows
// lie `step` apart; those from `count` on do not exist. All are asked for before the first is waited for.
template <bool kVector, int kColumns, int kRows, typename Element>
__device__ __forceinline__ void row_products(float (&sums)[kRows], const Element* dout, int64 dout_stride, const Element* out,
                                             int64 out_stride, int step, int count, int columns) {
  constexpr int kPerChunk = 16 / sizeof(Element);
  auto load = [&](const Element* row, int column) {
    if constexpr (kVector) return load_global_chunk(row + column);
    return load_elements(row + column, columns - column);
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
#pragma unroll
  for (int first = 0; first < kColumns; first += kDeltaLanes * kPerChunk) {
    const int column = first + lane_id() % kDeltaLanes * kPerChunk;
    if (column >= columns) break;
    Chunk a[kRows], b[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(r * step, count - 1);  // of what does not exist nobody reads the sum
      a[r] = load(dout + row * dout_stride, column);
      b[r] = load(out + row * out_stride, column);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] += chunk_product<Element>(a[r], b[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = group_sum<kDeltaLanes>(sums[r]);
}

// delta of the row that lies at `index` in lse's layout. lse's own gradient is subtracted; a row without keys has none,
// whatever came for its lse.
__device__ __forceinline__ float store_delta(const AttentionParams& params, int64 index, float product, float lse) {
  const float dlse = params.dlse == nullptr ? 0.0f : params.dlse[index];
  const float delta = lse == bits_float(0xff800000u) ? 0.0f : product - dlse;
  params.delta[index] = delta;
  return delta;
}

// The deltas of `rows` rows that begin at dout and out, and at `first` in lse's layout; `count` of them exist. Each is computed by
// eight of the block's lanes, kRows at a time, and told once: note(row, lse, delta), -inf and 0 of a row that does not exist.
template <typename Config, int kRows, typename Element, typename Note>
__device__ __forceinline__ void compute_deltas(const AttentionParams& params, const Element* dout, const Element* out,
                                               int64 first, int rows, int count, Note note) {
  constexpr int kStep = Config::kNumWarps * kWarpSize / kDeltaLanes;  // rows that the block takes side by side
  static_assert(kRows <= kDeltaLanes);
  for (int pass = 0; pass < rows; pass += kRows * kStep) {
    const int start = pass + thread_id() / kDeltaLanes;
    const int mine = lane_id() % kDeltaLanes, row = start + mine * kStep;  // of the first kRows lanes each has one to tell
    const bool exists = mine < kRows && row < min(rows, count);
    const float lse = exists ? params.lse[first + row] : bits_float(0xff800000u);  // -inf
    float products[kRows];
    row_products<Config::kVector, Config::kHeadDimV>(products, dout + start * params.dout.row_stride, params.dout.row_stride,
                                                     out + start * params.out.row_stride, params.out.row_stride, kStep,
                                                     count - start, params.head_dim_v);
    float product = products[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) product = mine == r ? products[r] : product;
    const float delta = exists ? store_delta(params, first + row, product, lse) : 0.0f;
    if (mine < kRows && row < rows) note(row, lse, delta);
  }
}

}  // namespace hfc
