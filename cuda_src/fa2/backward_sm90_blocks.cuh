// The row blocks that see a block of keys, of one query head after the other: those that share the head of keys.
#pragma once

#include "attn/tile_scheduler.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "fa2/backward_sm90_order.cuh"
#include "fa2/row_block_keys.cuh"
#include "isa.cuh"
#include "warpgroup.cuh"

namespace hfc {

// A row block's number among all of the launch.
__device__ __forceinline__ int row_block_place(const AttentionParams& params, int entry, int head, int m_block) {
  return (entry * params.num_heads + head) * params.num_m_blocks + m_block;
}

// Without kIntervals: upwards from the diagonal, so that neighbouring key blocks do not add to the same rows of dq at once; or
// downwards, see longest_first().
template <typename Config, bool kIntervals = Config::kIntervals>
class RowBlocks {
 public:
  __device__ __forceinline__ RowBlocks(const AttentionParams& params, const WorkTile& keys) : end_(params.num_m_blocks) {
    const int group = params.num_heads / params.num_heads_k;
    if constexpr (Config::kCausal) {
      const int diagonal = params.seqlen_k - params.seqlen_q + params.window_right;  // row i sees keys up to i + diagonal
      first_ = max(keys.m_block * Config::kBlockN - diagonal, 0) / Config::kBlockM;  // the last row sees every key
    }
    m_block_ = first_;
    place_ = row_block_place(params, keys.entry, keys.head * group, first_);
    count_ = group * (end_ - first_);
    if constexpr (Config::kDeterministic) {
      direction_.downwards = longest_first<Config>(params, keys.entry, keys.head);
      if (direction_.downwards) {
        m_block_ = end_ - 1;
        place_ += m_block_ - first_;
      }
    }
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int heads_before() const { return 0; }
  __device__ __forceinline__ int m_block() const { return m_block_; }
  __device__ __forceinline__ int64 place() const { return place_; }
  // Returns whether the next block is the first of another head.
  __device__ __forceinline__ bool advance() {
    if (direction_.downwards) return retreat();
    ++place_;
    if (++m_block_ < end_) return false;
    m_block_ = first_;
    place_ += first_;
    return true;
  }

 private:
  __device__ __forceinline__ bool retreat() {
    --place_;
    if (--m_block_ >= first_) return false;
    m_block_ = end_ - 1;
    place_ += 2 * end_ - first_;
    return true;
  }

  int end_, first_ = 0, m_block_, place_, count_;
  RowDirection<Config::kDeterministic> direction_;
};

// With kIntervals: those of which RowBlockKeys say that some row sees some key, maybe none. Whole warps make and advance it.
template <typename Config>
class RowBlocks<Config, true> {
  static_assert(!Config::kDeterministic, "next_to_add() takes key blocks without a gap between them");

 public:
  __device__ __forceinline__ RowBlocks(const AttentionParams& params, const WorkTile& keys)
      : params_(params), first_key_(keys.m_block * Config::kBlockN) {
    const int group = params.num_heads / params.num_heads_k, head = keys.head * group, heads = one_for_all() ? 1 : group;
    first_record_ = int(RowBlockKeys::first<Config>(params, keys.entry, head));
    first_of_head_ = row_block_place(params, keys.entry, head, 0);
    int seen = 0, first = num_chunks(), last = 0;  // of this lane: all loads are under way at once, before a warp's votes
    for (int i = 0; i < heads; ++i)
#pragma unroll 4
      for (int m_block = lane_id(); m_block < params.num_m_blocks; m_block += kWarpSize) {
        const int* numbers = of_record(first_record_ + i * params.num_m_blocks + m_block);
        if (!sees_some(numbers, first_key_, first_key_ + Config::kBlockN)) continue;
        ++seen;
        first = min(first, m_block / kWarpSize);
        last = max(last, m_block / kWarpSize);
      }
    count_ = warp_sum(seen);
    first_chunk_ = for_warp(warp_min(first)), last_chunk_ = for_warp(-warp_min(-last));
    if (one_for_all()) count_ *= group;
    left_ = count_;
    chunk_ = first_chunk_ - 1;
    heads_before_ = count_ > 0 ? find() : 0;
  }
  __device__ __forceinline__ int count() const { return count_; }
  // Heads of which no row sees any key, before the first that has a block.
  __device__ __forceinline__ int heads_before() const { return heads_before_; }
  __device__ __forceinline__ int m_block() const { return chunk_ * kWarpSize + first_bit(blocks_.seen); }
  __device__ __forceinline__ int64 place() const { return first_of_head_ + m_block(); }
  // Of the block in RowBlockKeys' order.
  __device__ __forceinline__ int64 record() const { return first_record_ + m_block(); }
  // Whether every row sees every key.
  __device__ __forceinline__ bool whole() const { return blocks_.whole >> first_bit(blocks_.seen) & 1; }
  // Returns how many heads further the next block is; behind the last there is none, and the last remains.
  __device__ __forceinline__ int advance() {
    if (--left_ <= 0) return 0;
    blocks_.seen &= blocks_.seen - 1;
    return find();
  }

 private:
  __device__ __forceinline__ bool one_for_all() const { return params_.interval_head_stride == 0; }
  __device__ __forceinline__ int num_chunks() const { return ceil_div(params_.num_m_blocks, kWarpSize); }
  // The same in all lanes, as the compiler does not see.
  __device__ __forceinline__ static int for_warp(int value) { return int(broadcast(uint32(value), 0)); }
  __device__ __forceinline__ const int* of_record(int record) const { return params_.row_block_keys + record * int64(4); }
  __device__ __forceinline__ SeenBlocks read(int first_record, int chunk) const {
    return seen_blocks(of_record(first_record), chunk, 0, params_.num_m_blocks - 1, first_key_, first_key_ + Config::kBlockN);
  }
  // Goes on to the next chunk that has a block to visit, of this head or the next ones.
  __device__ __forceinline__ int find() {
    int heads = 0;
    while (blocks_.seen == 0) {
      if (++chunk_ > last_chunk_) {
        chunk_ = first_chunk_;
        first_of_head_ += params_.num_m_blocks;
        if (!one_for_all()) first_record_ += params_.num_m_blocks;
        ++heads;
      }
      blocks_ = read(first_record_, chunk_);
    }
    return heads;
  }

  const AttentionParams& params_;
  const int first_key_;
  int first_record_;  // of the head's RowBlockKeys
  int first_of_head_;  // place of its first row block
  int first_chunk_, last_chunk_, chunk_;  // of 32 row blocks: those of the walk, and where it is
  int count_, left_, heads_before_;
  SeenBlocks blocks_{0, 0};  // of the chunk, without those that were visited
};

}  // namespace hfc
