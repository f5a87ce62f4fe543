// Which row block of which head a thread block works on.
#pragma once

#include "attn/seqlen.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

struct WorkTile {
  int m_block;  // negative: nothing to do
  int head;
  int entry;  // batch entry
};

// Late row blocks first: under a causal mask they have the most keys, and what starts last should be short. The blocks of
// `heads_per_section` (batch, head) pairs run interleaved, few enough that their keys and values stay in the L2 cache.
__device__ __forceinline__ WorkTile work_tile(const ForwardParams& params, int64 tile) {
  const int64 section_tiles = int64(params.num_m_blocks) * params.heads_per_section;
  const DivMod section = divmod(tile, section_tiles);
  const int64 first_pair = section.quotient * params.heads_per_section;
  const int64 pairs_left = int64(params.batch) * params.num_heads - first_pair;
  const DivMod within = divmod(section.remainder, min<int64>(pairs_left, params.heads_per_section));
  const DivMod pair = divmod(first_pair + within.remainder, params.num_heads);
  return {params.num_m_blocks - 1 - int(within.quotient), int(pair.remainder), int(pair.quotient)};
}

// Packed sequences: every head has num_m_blocks slots, enough for the row blocks of all entries together whatever their
// lengths; each warp counts the entries' blocks, 32 at a time, up to its slot.
template <int kBlockM>
__device__ __forceinline__ WorkTile packed_work_tile(const ForwardParams& params, int64 tile) {
  const DivMod position = divmod(tile, params.num_m_blocks);
  const int slot = int(position.remainder);
  const int num_entries = params.batch + 1;  // the last holds the rows beyond the last offset
  int before = 0;
  for (int first = 0; first < num_entries; first += kWarpSize) {
    const int entry = first + lane_id();
    const int blocks = entry < num_entries ? ceil_div(SeqlenInfo(params, entry).seqlen_q, kBlockM) : 0;
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

}  // namespace hfc
