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

// The keys that some row of a tile sees, and those that every row sees.
struct TileKeys {
  KeyInterval any;
  KeyInterval all;
};

template <typename Config>
__device__ __forceinline__ KeyInterval packed_interval(const AttentionParams& params, const SeqlenInfo& seqlen, PackedRow packed,
                                                       int entry) {
  const int* intervals = nullptr;
  if constexpr (Config::kIntervals)
    intervals = params.key_intervals + entry * params.interval_batch_stride + packed.head * params.interval_head_stride;
  return row_interval(params, seqlen, intervals, packed.row);
}

// Every warp finds the same. Loads wait for this, so it asks no other lane where it need not: without intervals the rows' keys
// move on with the rows, and the first and the last bound them all.
template <typename Config>
__device__ __forceinline__ TileKeys tile_keys(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head_k,
                                              int entry) {
  constexpr int kInfinity = 0x7fffffff;
  const int end_row = min<int>(first_row + Config::kBlockM, params.num_heads / params.num_heads_k * seqlen.seqlen_q);
  TileKeys keys{{kInfinity, 0}, {0, kInfinity}};
  if constexpr (Config::kIntervals) {
    for (int row = first_row + lane_id(); row < end_row; row += kWarpSize) {
      const KeyInterval own = packed_interval<Config>(params, seqlen, PackedRow(params, head_k, row), entry);
      keys.all = {max(keys.all.lo, own.lo), min(keys.all.hi, own.hi)};
      if (!own.empty()) keys.any = {min(keys.any.lo, own.lo), max(keys.any.hi, own.hi)};
    }
    keys.any = {warp_min(keys.any.lo), -warp_min(-keys.any.hi)};
    keys.all = {-warp_min(-keys.all.lo), warp_min(keys.all.hi)};
  } else if (first_row < end_row) {
    const KeyInterval first = packed_interval<Config>(params, seqlen, PackedRow(params, head_k, first_row), entry);
    const KeyInterval last = packed_interval<Config>(params, seqlen, PackedRow(params, head_k, end_row - 1), entry);
    keys = {{first.lo, last.hi}, {last.lo, first.hi}};
  }
  if (keys.any.empty()) keys.any = {0, 0};
  return keys;
}

// A lane's rows of a tile that every warp of a thread block has whole, and the keys each of them sees.
template <typename Config>
class PackedRows {
 public:
  static constexpr int kCount = Config::kBlockM / 8;                     // of a lane
  static constexpr int kN = Config::kBlockN / Config::kNumWarps / 8;     // n-tiles of a warp's keys
  static constexpr bool kHoles = Config::kIntervals || Config::kMask;    // keys between others that no row may see

  int row[kCount];
  int head[kCount];
  int entry;

  __device__ __forceinline__ PackedRows(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head_k,
                                        int entry_, TileKeys tile)
      : entry(entry_), tile_(tile) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const PackedRow packed(params, head_k, first_row + row_of(i / 2, i % 2 * 2));
      row[i] = packed.row;
      head[i] = packed.head;
      keys_[i] = {0, 0};
      if (packed.row < seqlen.seqlen_q) keys_[i] = packed_interval<Config>(params, seqlen, packed, entry);
    }
  }

  // What the intervals of the rows say of a warp's keys from `first_key`.
  __device__ __forceinline__ Visibility visibility(int first_key) const {
    if (first_key >= tile_.any.hi || first_key + 8 * kN <= tile_.any.lo) return Visibility::kNone;
    const bool all = first_key >= tile_.all.lo && first_key + 8 * kN <= tile_.all.hi;
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
  TileKeys tile_;
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
