// Which keys the rows of a block see together: fa2_backward_prepare and fa2_backward_sm90_prepare note it, so that a block of keys
// finds the row blocks that see it by four numbers each instead of by every row's.
#pragma once

#include "attn/mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

// The keys of the rows of one block: all of them together, and what they have in common. At row_block_keys, (batch, heads or 1 for
// all, row blocks, 4).
struct RowBlockKeys {
  KeyInterval some;
  KeyInterval common;

  // The place of a head's first row block among all.
  template <typename Config>
  __device__ __forceinline__ static int64 first(const AttentionParams& params, int entry, int head) {
    const bool one_for_all = params.interval_head_stride == 0;
    const int64 pair = one_for_all ? entry : int64(entry) * params.num_heads + head;
    return pair * num_row_blocks<Config>(params);
  }
  template <typename Config>
  __device__ __forceinline__ static int* address(const AttentionParams& params, int entry, int head) {
    return params.row_block_keys + first<Config>(params, entry, head) * 4;
  }
};

// Notes the keys of this thread block's rows; each(row of the block, its keys) is told those of every row that exists. Thread blocks
// of one set of intervals leave it to the first.
template <typename Config, typename Each>
__device__ __forceinline__ void note_keys(const AttentionParams& params, const SeqlenInfo& seqlen, const WorkTile& work,
                                          Each each) {
  if (warp_id() != 0 || (params.interval_head_stride == 0 && work.head != 0)) return;
  const int* intervals =
      params.key_intervals + work.entry * params.interval_batch_stride + work.head * params.interval_head_stride;
  KeyInterval some{0x7fffffff, 0}, common{0, 0x7fffffff};
  for (int i = lane_id(); i < Config::kBlockM; i += kWarpSize) {
    const int row = work.m_block * Config::kBlockM + i;
    if (row >= seqlen.seqlen_q) continue;
    const KeyInterval keys = row_interval(params, seqlen, intervals, row);
    each(i, keys);
    common = {max(common.lo, keys.lo), min(common.hi, keys.hi)};
    if (keys.lo < keys.hi) some = {min(some.lo, keys.lo), max(some.hi, keys.hi)};
  }
  some = {warp_min(some.lo), -warp_min(-some.hi)};
  common = {-warp_min(-common.lo), warp_min(common.hi)};
  int* numbers = RowBlockKeys::address<Config>(params, work.entry, work.head) + work.m_block * 4;
  const int all[4] = {some.lo, some.hi, common.lo, common.hi};
  if (lane_id() == 0)
    for (int i = 0; i < 4; ++i) numbers[i] = all[i];
}

// Whether some row of the block whose RowBlockKeys these are sees some key of [first_key, end_key).
__device__ __forceinline__ bool sees_some(const int* numbers, int first_key, int end_key) {
  return max(numbers[0], first_key) < min(numbers[1], end_key);
}

// Of 32 row blocks, a bit each: those with a row that sees some key of a block, and those whose rows see all of them.
struct SeenBlocks {
  uint32 seen, whole;
};

// Row blocks 32 `number` and on, as far as [first_block, last_block] has them. `numbers`: RowBlockKeys of the head. A warp calls.
__device__ __forceinline__ SeenBlocks seen_blocks(const int* numbers, int number, int first_block, int last_block, int first_key,
                                                  int end_key) {
  const int m_block = number * kWarpSize + lane_id();
  bool seen = false, whole = false;
  if (m_block >= first_block && m_block <= last_block) {
    const int* of_block = numbers + m_block * 4;
    const KeyInterval common{of_block[2], of_block[3]};
    seen = sees_some(of_block, first_key, end_key);
    whole = common.lo <= first_key && common.hi >= end_key;
  }
  return {warp_ballot(seen), warp_ballot(whole)};
}

}  // namespace hfc
