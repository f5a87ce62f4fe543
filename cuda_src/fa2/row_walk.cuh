// The row blocks that see a block of keys, in the order the backward pass visits them, and what each warp must hide there.
#pragma once

#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/row_mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "fa2/row_block_keys.cuh"
#include "isa.cuh"

namespace hfc {

struct RowStep {
  int head;
  int m_block;   // negative: no more
  bool sees_all;  // every row sees every key, as far as key intervals tell

  __device__ __forceinline__ bool exists() const { return m_block >= 0; }
};

// From the last row block to the first: under a causal mask all thread blocks of a head start at the same rows, which stay in
// the L2 cache for all of them.
template <typename Config>
class RowWalk {
  static constexpr int kScoreColumnWarps = Config::kNumWarps / Config::kScoreWarps;
  static constexpr int kRows = Config::kBlockM / Config::kScoreWarps;  // of a warp
  static constexpr int kM = kRows / 16;
  static constexpr int kN = Config::kBlockN / kScoreColumnWarps / 8;

 public:
  __device__ __forceinline__ RowWalk(const AttentionParams& params, const SeqlenInfo& seqlen, int first_key, int head_k,
                                     int entry)
      : params_(params), seqlen_(seqlen), first_key_(first_key), entry_(entry) {
    const int group = params.num_heads / params.num_heads_k;
    const int offset = seqlen.seqlen_k - seqlen.seqlen_q;  // row i's diagonal is key i + offset
    int first_row = 0, end_row = seqlen.seqlen_q;
    const int last_key = min(first_key + Config::kBlockN, seqlen.seqlen_k) - 1;
    if (params.window_right >= 0) first_row = max(0, first_key - offset - params.window_right);
    if (params.window_left >= 0) end_row = min(end_row, last_key - offset + params.window_left + 1);
    if (first_row < end_row)
      keys_ = {window_interval(params, seqlen, first_row).lo, window_interval(params, seqlen, end_row - 1).hi};
    first_block_ = first_row / Config::kBlockM;
    last_block_ = first_row < end_row ? (end_row - 1) / Config::kBlockM : first_block_ - 1;
    if constexpr (Config::kIntervals)
      if (params.interval_head_stride == 0) tighten(head_k * group);
    step_ = {head_k * group, last_block_ + 1, false};
    end_head_ = step_.head + group;
  }

  // The keys that some row may see.
  __device__ __forceinline__ KeyInterval keys() const { return keys_; }

  // The next row block in which some row sees some key.
  __device__ __forceinline__ RowStep next() {
    do {
      if (--step_.m_block < first_block_) step_ = {step_.head + 1, last_block_, false};
      if (step_.head >= end_head_ || last_block_ < first_block_) return {0, -1, false};
    } while (Config::kIntervals && !sees());
    return step_;
  }

  // The keys of a warp's tile that each of the lane's rows sees: bits as in mask.cuh, not written where all see all.
  __device__ __forceinline__ Visibility look(uint32 (&visible)[2 * kM], RowStep step, int first_row, int first_key) const {
    if constexpr (Config::kIntervals && !Config::kMask) {
      if (step.sees_all) return Visibility::kAll;
    } else if constexpr (!Config::kMask) {
      const int last_row = first_row + kRows - 1;
      if (first_key >= window_interval(params_, seqlen_, last_row).lo &&
          first_key + 8 * kN <= window_interval(params_, seqlen_, first_row).hi)
        return Visibility::kAll;
    }
    visible_bits<Config, kM, kN>(visible, params_, seqlen_, entry_, step.head, first_row, first_key);
    return Visibility::kSome;
  }

  // Every warp tells which of its keys some row of its tile sees; seen() is for all keys of the block, once all have told.
  __device__ __forceinline__ static void share_seen(SharedPtr shared, int warp, uint32 columns) {
    if (lane_id() < 4) store_shared(shared + (warp * 4 + lane_id()) * 4, columns);
  }
  __device__ __forceinline__ static uint32 seen(SharedPtr shared) {
    uint32 columns = 0;
#pragma unroll
    for (int warp = 0; warp < Config::kNumWarps; ++warp)
      columns |= load_shared(shared + (warp * 4 + lane_id() % 4) * 4) << (warp % kScoreColumnWarps * 2 * kN);
    return columns;
  }

 private:
  // What a warp knows of 32 row blocks of a head; the same for all warps.
  struct Chunk {
    int head, number;
    SeenBlocks blocks;
  };

  __device__ __forceinline__ Chunk read(int head, int number) const {
    const int* numbers = RowBlockKeys::address<Config>(params_, entry_, head);
    return {head, number, seen_blocks(numbers, number, first_block_, last_block_, first_key_, first_key_ + Config::kBlockN)};
  }

  // Packed sequences and windows leave a key block few row blocks of many, and neighbours: the others are not even counted.
  __device__ __forceinline__ void tighten(int head) {
    int first = last_block_ + 1, last = first_block_ - 1;
#pragma unroll 4
    for (int number = first_block_ / kWarpSize; number <= last_block_ / kWarpSize; ++number) {
      const uint32 seen = read(head, number).blocks.seen;
      if (seen == 0) continue;
      first = min(first, number * kWarpSize + first_bit(seen));
      last = number * kWarpSize + 31 - leading_zeros(seen);
    }
    first_block_ = first;
    last_block_ = last;
  }

  // Whether some row of step_'s block sees some key.
  __device__ __forceinline__ bool sees() {
    const int number = step_.m_block / kWarpSize;
    if (number != chunk_.number || step_.head != chunk_.head) chunk_ = read(step_.head, number);
    step_.sees_all = chunk_.blocks.whole >> step_.m_block % kWarpSize & 1;
    return chunk_.blocks.seen >> step_.m_block % kWarpSize & 1;
  }

  const AttentionParams& params_;
  const SeqlenInfo& seqlen_;
  int first_key_;
  int entry_;
  int first_block_;
  int last_block_;
  int end_head_;
  RowStep step_;
  Chunk chunk_{-1, -1, {0, 0}};
  KeyInterval keys_{0, 0};
};

}  // namespace hfc
