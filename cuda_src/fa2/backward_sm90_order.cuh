// In which order thread blocks take the keys, and each of them its rows.
//
// dk and dv are summed in the registers of one thread block, dq over all that see a row. Their parts are added as they come or, for
// deterministic gradients, in the order in which the key blocks of a head stand in the grid, which a word in device memory enforces
// for every row block: whose turn it is. A thread block then waits for none but those that started before it, however many run at
// once. How long depends on the orders. In steps, of a row block each, with k key blocks of a head at work at once:
//
// - No mask. All key blocks are of one length and meet the rows in one order, so that each has to stay a step behind the one
//   before. Less cannot be where every key block sees every row. It is paid once, k - 1 steps: what follows starts as far apart
//   as what went before has ended.
// - Causal, the shortest key block of a head first, rows from the diagonal on: each is a step behind the one before already, for
//   it begins that much before the other's rows. Nobody ever waits; but the longest, which starts last, ends far behind the rest.
// - Causal, the longest first, rows from the last one to the diagonal: no long end. But those that start together have to get
//   apart first, k - 1 steps for the last, and end together, so that it is the same with those that follow.
// - Taken in turns by sections of heads, the last of which has its longest first: key blocks of the one kind end apart by the
//   steps that those of the other need, and these end together, as those of the first may start. This is what is done, without
//   a mask as well, where it changes nothing.
//
// Without a mask k is kept small: at least 16 heads of k and v a section. With one, a simulation of 132 multiprocessors had said the
// same. On an H200 two sections took 1.2 to 1.5 times the default's time, one section or at least eight 0.9 to 1.1 times: so these.
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

// Of a walk over rows: no more than a constant where all go upwards.
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
