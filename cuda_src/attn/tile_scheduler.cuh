// Which row block of which head a thread block works on.
#pragma once

#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

struct WorkTile {
  int m_block;
  int head;
  int entry;  // batch entry
};

// Late row blocks first: under a causal mask they have the most keys, and what starts last should be short. The blocks of
// `heads_per_section` (batch, head) pairs run interleaved, few enough that their keys and values stay in the L2 cache.
__device__ __forceinline__ WorkTile work_tile(const ForwardParams& params, int64 tile) {
  const int num_entries = params.cu_seqlens_q == nullptr ? params.batch : params.batch + 1;
  const int64 section_tiles = int64(params.num_m_blocks) * params.heads_per_section;
  const DivMod section = divmod(tile, section_tiles);
  const int64 first_pair = section.quotient * params.heads_per_section;
  const int64 pairs_left = int64(num_entries) * params.num_heads - first_pair;
  const DivMod within = divmod(section.remainder, min<int64>(pairs_left, params.heads_per_section));
  const DivMod pair = divmod(first_pair + within.remainder, params.num_heads);
  return {params.num_m_blocks - 1 - int(within.quotient), int(pair.remainder), int(pair.quotient)};
}

}  // namespace hfc
