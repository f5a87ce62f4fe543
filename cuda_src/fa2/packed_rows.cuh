// The rows of a decode tile: (query row, head) pairs of the heads that share a head of keys, heads innermost. So few rows
// against many keys fill a tile, and keys and values are read once for the whole group.
#pragma once

#include "attn/mask.cuh"
#include "attn/row_mask.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

// A packed row, by its index in the entry's rows of one head of keys.
struct PackedRow {
  int row;   // of the queries
  int head;  // of the queries

  __device__ __forceinline__ PackedRow(const AttentionParams& params, int head_k, int index) {
    const int group = params.num_heads / params.num_heads_k;
    row = index / group;
    head = head_k * group + (index - row * group);
  }
};

// A lane's rows of a tile that every warp of a thread block has whole, and the keys each of them sees.
template <typename Config>
class PackedRows {
 public:
  static constexpr int kCount = Config::kBlockM / 8;                     // of a lane
  static constexpr int kN = Config::kBlockN / Config::kNumWarps / 8;     // n-tiles of a warp's keys
  static constexpr bool kHoles = Config::kIntervals || Config::kMask;    // keys inside block_keys() that no row may see

  int row[kCount];
  int head[kCount];
  int entry;

  __device__ __forceinline__ PackedRows(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head_k,
                                        int entry_)
      : entry(entry_) {
    constexpr int kInfinity = 0x7fffffff;
    KeyInterval all{kInfinity, 0};
    common_ = {0, kInfinity};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const PackedRow packed(params, head_k, first_row + row_of(i / 2, i % 2 * 2));
      row[i] = packed.row;
      head[i] = packed.head;
      keys_[i] = {0, 0};
      if (packed.row >= seqlen.seqlen_q) continue;
      const int* intervals = nullptr;
      if constexpr (Config::kIntervals)
        intervals = params.key_intervals + entry * params.interval_batch_stride + packed.head * params.interval_head_stride;
      keys_[i] = row_interval(params, seqlen, intervals, packed.row);
      common_ = {max(common_.lo, keys_[i].lo), min(common_.hi, keys_[i].hi)};
      if (!keys_[i].empty()) all = {min(all.lo, keys_[i].lo), max(all.hi, keys_[i].hi)};
    }
    union_ = {warp_min(all.lo), -warp_min(-all.hi)};
    if (union_.empty()) union_ = {0, 0};
    common_ = {-warp_min(-common_.lo), warp_min(common_.hi)};
  }

  // The keys that some row may see.
  __device__ __forceinline__ KeyInterval block_keys() const { return union_; }

  // What the intervals of the rows say of a warp's keys from `first_key`.
  __device__ __forceinline__ Visibility visibility(int first_key) const {
    if (first_key >= union_.hi || first_key + 8 * kN <= union_.lo) return Visibility::kNone;
    const bool all = first_key >= common_.lo && first_key + 8 * kN <= common_.hi;
    return !Config::kMask && all ? Visibility::kAll : Visibility::kSome;
  }

  // The keys that each of the lane's rows sees: bits as in mask.cuh. Returns whether there are any in this lane.
  __device__ __forceinline__ bool look(uint32 (&visible)[kCount], const AttentionParams& params, int first_key) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      visible[i] = interval_bits<kN>(keys_[i], first_key);
      if constexpr (Config::kMask) {
        const uint8* mask_row =
            params.mask + entry * params.mask_batch_stride + head[i] * params.mask_head_stride + row[i] * params.mask_row_stride;
        visible[i] = dense_bits<kN>(params, mask_row, first_key, visible[i]);
      }
      any |= visible[i] != 0;
    }
    return any;
  }

 private:
  KeyInterval keys_[kCount];
  KeyInterval union_;   // keys that some row sees
  KeyInterval common_;  // keys that every row sees
};

// Where a tile of scores of packed rows lies: modify_scores takes it in place of a ScoreTile.
template <typename Config>
struct PackedTile {
  const PackedRows<Config>& rows;
  int first_key;
};

template <typename Config, int kM, int kN>
__device__ __forceinline__ void add_alibi(float (&scores)[kM][kN][4], const AttentionParams& params, const SeqlenInfo& seqlen,
                                          const PackedTile<Config>& tile) {
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const float slope = params.alibi_slopes[tile.rows.entry * params.alibi_batch_stride + tile.rows.head[i]];
    const int diagonal = tile.rows.row[i] + seqlen.seqlen_k - seqlen.seqlen_q - tile.first_key;
    const float distance = float(diagonal - column_of(0, 0));
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) scores[i / 2][j][i % 2 * 2 + e] -= slope * abs_float(distance - float(8 * j + e));
  }
}

// Nothing is read beyond the last row or key; the rows there see no key.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&scores)[kM][kN][4], const AttentionParams& params, const SeqlenInfo& seqlen,
                                         const PackedTile<Config>& tile) {
  using Bias = typename Config::Bias;
  const int keys = seqlen.seqlen_k - tile.first_key;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const Bias* elements = static_cast<const Bias*>(params.bias) + tile.rows.entry * params.bias_batch_stride +
                           tile.rows.head[i] * params.bias_head_stride + tile.rows.row[i] * params.bias_row_stride +
                           (tile.first_key + column_of(0, 0)) * params.bias_col_stride;
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[i / 2][j][i % 2 * 2 + e];
        const bool exists = tile.rows.row[i] < seqlen.seqlen_q && column_of(j, e) < keys;
        score =
            biased_score(score, exists ? read_bias(elements + (8 * j + e) * params.bias_col_stride) : bits_float(0xff800000u));
      }
  }
}

}  // namespace hfc
