// Which keys a row sees. Causal, window, key intervals and the ragged end all are one interval of keys per row; a dense mask
// takes keys out of it.
#pragma once

#include "attn/seqlen.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"
#include "tile/fragment.cuh"

namespace hfc {

struct KeyInterval {
  int lo;  // first key
  int hi;  // one past the last key

  __device__ __forceinline__ bool empty() const { return hi <= lo; }
};

// The interval that window and length leave to a row, aligned at the bottom right (api: causal, window_size).
__device__ __forceinline__ KeyInterval window_interval(const AttentionParams& params, const SeqlenInfo& seqlen, int row) {
  const int diagonal = row + seqlen.seqlen_k - seqlen.seqlen_q;
  KeyInterval keys{0, seqlen.seqlen_k};
  if (params.window_left >= 0) keys.lo = max(0, diagonal - params.window_left);
  if (params.window_right >= 0) keys.hi = min(keys.hi, diagonal + params.window_right + 1);
  return keys;
}

__device__ __forceinline__ KeyInterval row_interval(const AttentionParams& params, const SeqlenInfo& seqlen,
                                                    const int* key_intervals, int row) {
  KeyInterval keys = window_interval(params, seqlen, row);
  if (key_intervals != nullptr) {
    const int* pair = key_intervals + row * params.interval_row_stride;
    keys.lo = max(keys.lo, pair[0]);
    keys.hi = max(min(keys.hi, pair[1]), 0);  // the caller's numbers: differences must not overflow
  }
  return keys;
}

// Bit 2j + e of a lane's row of scores stands for accumulator column column_of(j, e): the bits of the keys below `end`.
template <int kN>
__device__ __forceinline__ uint32 bits_below(int end) {
  const int columns = min(max(end - lane_id() % 4 * 2, 0), 8 * kN);
  const int count = columns / 8 * 2 + min(columns % 8, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

template <int kN>
__device__ __forceinline__ uint32 interval_bits(KeyInterval keys, int first_key) {
  return bits_below<kN>(keys.hi - first_key) & ~bits_below<kN>(keys.lo - first_key);
}

// mask[row, key] for this lane's keys of a block, among those in `bits`.
template <int kN>
__device__ __forceinline__ uint32 dense_bits(const AttentionParams& params, const uint8* mask_row, int first_key, uint32 bits) {
  uint32 visible = 0;
#pragma unroll 4  // eight loads on their way
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (bits >> (2 * j + e) & 1)
        visible |= uint32(mask_row[(first_key + column_of(j, e)) * params.mask_col_stride] != 0) << (2 * j + e);
  return visible;
}

// The keys that each of a lane's rows of a tile sees, none where the row does not exist: bits as above.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void visible_bits(uint32 (&visible)[2 * kM], const AttentionParams& params, const SeqlenInfo& seqlen,
                                             int entry, int head, int first_row, int first_key) {
  const int* intervals = nullptr;
  if constexpr (Config::kIntervals)
    intervals = params.key_intervals + entry * params.interval_batch_stride + head * params.interval_head_stride;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int row = first_row + row_of(i / 2, i % 2 * 2);
    visible[i] = 0;
    if (row >= seqlen.seqlen_q) continue;
    visible[i] = interval_bits<kN>(row_interval(params, seqlen, intervals, row), first_key);
    if constexpr (Config::kMask) {
      const uint8* mask_row =
          params.mask + entry * params.mask_batch_stride + head * params.mask_head_stride + row * params.mask_row_stride;
      visible[i] = dense_bits<kN>(params, mask_row, first_key, visible[i]);
    }
  }
}

// Scores whose bit is not set become `value`.
template <int kM, int kN>
__device__ __forceinline__ void replace_unset(float (&scores)[kM][kN][4], const uint32 (&bits)[2 * kM], float value) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(bits[2 * i + e / 2] >> (2 * j + e % 2) & 1)) scores[i][j][e] = value;
}

template <int kM, int kN>
__device__ __forceinline__ void hide(float (&scores)[kM][kN][4], const uint32 (&visible)[2 * kM]) {
  replace_unset(scores, visible, bits_float(0xff800000u));  // -inf
}

// The keys that some row of the warp sees, as a bias of -inf has left them.
template <int kM, int kN>
__device__ __forceinline__ uint32 seen_columns(const float (&scores)[kM][kN][4]) {
  const float hidden = bits_float(0xff800000u);
  uint32 seen = 0;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) seen |= uint32(scores[i][j][e] != hidden) << (2 * j + e % 2);
  return column_or(seen);
}

// Blanks the rows of an operand b whose keys nobody sees: bit 2j + e of `columns` as above.
template <typename Element>
__device__ __forceinline__ void keep_columns(uint32 columns, int k, uint32 (&words)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (sizeof(Element) == 2) {
      const uint32 pair = columns >> (4 * k + 2 * i);
      words[i] &= (pair & 1 ? 0x0000ffffu : 0u) | (pair & 2 ? 0xffff0000u : 0u);
    } else {
      words[i] = columns >> (2 * k + i) & 1 ? words[i] : 0u;
    }
  }
}

}  // namespace hfc
