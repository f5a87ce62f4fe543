// Which row block of which head a thread block works on.
#pragma once

#include "attn/seqlen.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

struct WorkTile {
  int m_block;  // of rows, in the backward of keys; negative: nothing to do
  int head;
  int entry;  // batch entry
};

// Tile 0 is the last block of the first (batch, head) pair; the blocks of `heads_per_section` pairs run interleaved.
__device__ __forceinline__ WorkTile sectioned_tile(const AttentionParams& params, int num_blocks, int num_heads, int64 tile) {
  const DivMod section = divmod(tile, int64(num_blocks) * params.heads_per_section);
  const int64 first_pair = section.quotient * params.heads_per_section;
  const int64 pairs_left = int64(params.batch) * num_heads - first_pair;
  const DivMod within = divmod(section.remainder, min<int64>(pairs_left, params.heads_per_section));
  const DivMod pair = divmod(first_pair + within.remainder, num_heads);
  return {num_blocks - 1 - int(within.quotient), int(pair.remainder), int(pair.quotient)};
}

// Late row blocks first: under a causal mask they have the most keys, and what starts last should be short. The blocks of
// `heads_per_section` (batch, head) pairs run interleaved, few enough that their keys and values stay in the L2 cache.
__device__ __forceinline__ WorkTile work_tile(const AttentionParams& params, int64 tile) {
  return sectioned_tile(params, params.num_m_blocks, params.num_heads, tile);
}

// Early key blocks first: under a causal mask they have the most rows.
__device__ __forceinline__ WorkTile key_work_tile(const AttentionParams& params, int64 tile) {
  const WorkTile work = sectioned_tile(params, params.num_n_blocks, params.num_heads_k, tile);
  return {params.num_n_blocks - 1 - work.m_block, work.head, work.entry};
}

// Packed sequences: every head has num_m_blocks slots, enough for the row blocks of all entries together whatever their
// lengths; each warp counts the entries' blocks, 32 at a time, up to its slot.
template <int kBlock, typename Length>
__device__ __forceinline__ WorkTile packed_tile(const AttentionParams& params, int num_blocks, int64 tile, Length length) {
  const DivMod position = divmod(tile, num_blocks);
  const int slot = int(position.remainder);
  const int num_entries = params.batch + 1;  // the last holds the rows beyond the last offset
  int before = 0;
  for (int first = 0; first < num_entries; first += kWarpSize) {
    const int entry = first + lane_id();
    const int blocks = entry < num_entries ? ceil_div(length(SeqlenInfo(params, entry)), kBlock) : 0;
    const int end = before + warp_inclusive_sum(blocks);
    const int found = warp_min(end > slot ? lane_id() : kWarpSize);
    if (found < kWarpSize) {
      const int from_last = warp_min(lane_id() == found ? end - 1 - slot : 0x7fffffff);
      return {from_last, int(position.quotient), first + found};
    }
    before = -warp_min(-end);
  }
  return {-1, 0, 0};
}

template <int kBlockM>
__device__ __forceinline__ WorkTile packed_work_tile(const AttentionParams& params, int64 tile) {
  return packed_tile<kBlockM>(params, params.num_m_blocks, tile, [](const SeqlenInfo& seqlen) { return seqlen.seqlen_q; });
}

template <int kBlockN>
__device__ __forceinline__ WorkTile packed_key_work_tile(const AttentionParams& params, int64 tile) {
  return packed_tile<kBlockN>(params, params.num_n_blocks, tile, [](const SeqlenInfo& seqlen) { return seqlen.seqlen_k; });
}

// Row blocks of one head; packed: of one head over all entries, each of which may end in one that is not full.
template <typename Config>
__device__ __forceinline__ int num_row_blocks(const AttentionParams& params) {
  return ceil_div(params.seqlen_q, Config::kBlockM) + (Config::kVarlen ? params.batch + 1 : 0);
}

// The row block of this thread block, in the kernels of the backward pass, whose block sizes differ. kRowChunks thread blocks in a
// row share one.
template <typename Config>
__device__ __forceinline__ WorkTile row_work_tile(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return {-1, 0, 0};
  const int64 tile = block_id() / Config::kRowChunks;
  const int num_blocks = num_row_blocks<Config>(params);
  if constexpr (Config::kVarlen)
    return packed_tile<Config::kBlockM>(params, num_blocks, tile, [](const SeqlenInfo& seqlen) { return seqlen.seqlen_q; });
  else
    return sectioned_tile(params, num_blocks, params.num_heads, tile);
}

}  // namespace hfc
