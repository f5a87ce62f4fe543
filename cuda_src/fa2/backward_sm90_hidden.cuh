// Key intervals and windows in the Hopper backward: which scores a block of rows leaves out, and what keys hold that no row sees.
#pragma once

#include "common/params.cuh"
#include "fa2/backward_sm90_blocks.cuh"
#include "fa2/backward_sm90_traits.cuh"
#include "fa2/row_block_keys.cuh"
#include "isa.cuh"
#include "tile/finite.cuh"
#include "warpgroup.cuh"

namespace hfc {

// Scores of the warpgroup's keys start from -inf where a row does not see them, and no product brings them back: so their numbers
// are compared while the tensor cores still have the step before, and the step itself knows of no mask.
// `pairs`: the intervals of the block's rows, in device memory. Blocks whose rows see all keys do not read them: shared memory has
// no room (at head size 64, 88 bytes are free), and the few others find them in the L1 cache, where all warps look.
template <int kN>
__device__ __forceinline__ void hide_unseen(float (&scores)[kN][4], const int* pairs, int first_key) {
  const int thread = in_place(thread_id()) % kWarpgroupSize;  // here, rather than in registers of every step
  const int key = first_key + thread / kWarpSize * 16 + thread % kWarpSize / 4;  // row_of
  pairs += thread % 4 * 4;  // of column_of(0, 0) and the next
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const Chunk two = load_global_chunk(pairs + 16 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int lo = int(two.words[e % 2 * 2]), hi = int(two.words[e % 2 * 2 + 1]), of_score = key + e / 2 * 8;
      if (of_score < lo || of_score >= hi) scores[j][e] = bits_float(0xff800000u);  // -inf
    }
  }
}

// Whether some row of the heads that share the keys sees one. A warp calls.
template <typename Config>
__device__ __forceinline__ bool any_row_sees(const BackwardSm90Params& launch, const WorkTile& keys, int key) {
  const AttentionParams& params = launch.attention;
  const int group = params.num_heads / params.num_heads_k, heads = params.interval_head_stride == 0 ? 1 : group;
  const int64 first = RowBlockKeys::first<Config>(params, keys.entry, keys.head * group);
  bool any = false;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const int* pairs = launch.row_intervals + (first + head * params.num_m_blocks) * (2 * Config::kBlockM);
#pragma unroll 1
    for (int row = lane_id(); row < params.seqlen_q; row += kWarpSize) any |= pairs[2 * row] <= key && key < pairs[2 * row + 1];
  }
  return warp_any(any);
}

// A warpgroup calls, a thread a key of the tile; of a smaller one all but its first warps only fence.
template <typename Config, typename Tile>
__device__ __forceinline__ void clear_hidden(Tile tile, const BackwardSm90Params& launch, const WorkTile& keys) {
  static_assert(Tile::kRows <= kWarpgroupSize && Tile::kRows % kWarpSize == 0);
  constexpr int kExponents = is_same<typename Config::Element, bf16>::value ? 28 : 1;  // 2^101 and more
  const int first = thread_id() % kWarpgroupSize / kWarpSize * kWarpSize, row = first + lane_id();
  const bool exists = Tile::kRows == kWarpgroupSize || first < Tile::kRows;
  uint32 suspects = warp_ballot(exists && row_reaches<typename Config::Element, kExponents>(tile, row));
  for (; suspects != 0; suspects &= suspects - 1) {
    const int suspect = first + first_bit(suspects);
    if (!any_row_sees<Config>(launch, keys, keys.m_block * Config::kBlockN + suspect)) clear_row(tile, suspect);
  }
  fence_async_proxy();
}

// What k and v hold for keys that no row sees becomes 0 where it is not finite, or so large that a product might not be: neither a
// score that starts from -inf nor a factor of 0 removes that. One of the warpgroups looks at k, the other at v. With kSharesKeys the
// zeros that the first gives the second for a dS before the first one also say that k is done.
template <typename Config>
__device__ __forceinline__ void clear_hidden_keys(const BackwardSm90Params& launch, const BackwardSm90Traits<Config>& shared,
                                                  int warpgroup) {
  const WorkTile keys = key_work_tile(launch.attention, in_place(block_id()));
  clear_hidden<Config>(warpgroup == 0 ? shared.k() : shared.v(), launch, keys);
  if constexpr (BackwardSm90Traits<Config>::kSharesKeys)
    named_barrier_sync(1 + warpgroup, kWarpgroupSize);
  else
    named_barrier_sync(1, shared.kWarpgroups * kWarpgroupSize);
}

}  // namespace hfc
