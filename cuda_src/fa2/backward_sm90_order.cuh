// In which order thread blocks take the keys, and each of them its rows.
//
// dk and dv are summed in the registers of one thread block. dq's sums are over thread blocks, each of which has some keys: their
// parts are added as they come, or, for deterministic gradients, in the order in which the key blocks stand in the grid. That order
// is what costs, where a thread block waits for one that started before it; steps are row blocks:
//
// - Of a head whose key blocks start with the longest, rows are taken from the last: each key block ends at its diagonal. The one
//   behind must stay a step behind, so that of k that start at once the last waits k - 1 steps.
// - Of a head whose key blocks start with the shortest, rows are taken from the diagonal on. The one behind is one step behind
//   already, for it begins one step before the rows of the other: nobody ever waits. But the longest start last.
//
// So the sections of heads take turns, the longest start first in the last one. What the one kind leaves off at the length of its
// blocks, apart by the steps that the other kind needs, and the other ends everywhere at once, where the first may begin: a causal
// launch has no waits but those of a section that starts beside nothing, and no long block at its end. Without a mask all key
// blocks of a head are of one length, and what starts behind has to stay behind: k - 1 steps once in the launch, for what follows
// starts as far apart as what went before ends. heads_per_section, at least 16, bounds k at 132 multiprocessors to 9.
//
// Steps beside those of the default order, predicted with a turn handed on in one step: 16,384 tokens of 2,048 columns in all
//
//   tokens of a sequence              1,024        4,096        16,384
//   head size 64, full, causal        7, 7         9, 4         17, 0     of 340, 219; 1,138, 612; 4,331, 2,183
//   head size 128, full, causal       6, 3         17, 1        44, -6    of 306, 185; 1,115, 579; 4,351, 2,154
#pragma once

#include "attn/tile_scheduler.cuh"

namespace hfc {

// Whether of this head the key blocks with the most rows start first, as by default all do.
template <typename Config>
__device__ __forceinline__ bool longest_first(const AttentionParams& params, int entry, int head_k) {
  if constexpr (Config::kDeterministic) {
    const int last = params.batch * params.num_heads_k - 1, pair = entry * params.num_heads_k + head_k;
    return (last / params.heads_per_section - pair / params.heads_per_section) % 2 == 0;
  }
  return true;
}

template <bool kDeterministic>
struct RowDirection {
  static constexpr bool downwards = false;
};
template <>
struct RowDirection<true> {
  bool downwards = false;
};

template <typename Config>
__device__ __forceinline__ WorkTile ordered_key_tile(const AttentionParams& params, int64 tile) {
  WorkTile keys = key_work_tile(params, tile);
  if (!longest_first<Config>(params, keys.entry, keys.head)) keys.m_block = params.num_n_blocks - 1 - keys.m_block;
  return keys;
}

// The key block that adds to dq after this one, where both see the rows.
template <typename Config>
__device__ __forceinline__ int next_to_add(const AttentionParams& params, const WorkTile& keys) {
  return keys.m_block + (longest_first<Config>(params, keys.entry, keys.head) ? 1 : -1);
}
// The key block that adds to the dq of these rows first; anything where no key block does.
template <typename Config>
__device__ __forceinline__ int first_to_add(const AttentionParams& params, const WorkTile& rows) {
  if (longest_first<Config>(params, rows.entry, rows.head / (params.num_heads / params.num_heads_k))) return 0;
  const int last = params.num_n_blocks - 1;
  if (params.window_right < 0) return last;
  const int end = (rows.m_block + 1) * Config::kBlockM + params.seqlen_k - params.seqlen_q + params.window_right;
  return min(last, (end - 1) / Config::kBlockN);  // of the last row
}

}  // namespace hfc
