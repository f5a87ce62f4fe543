// FlashAttention-2, forward pass (Dao 2023, Algorithm 1), for compute capability 9.0: rows split over warpgroups instead of warps,
// one pass over the keys, one normalisation. One warpgroup loads, by the copy engine; the others compute, by wgmma.
//
// Thread blocks stay and take tiles one after the other. What each line of the algorithm is:
//   1-2    rows dealt to warpgroups, keys to blocks     forward_sm90_tiles.cuh
//   4, 7   Q_i, K_j, V_j to shared memory               load_queries, load_keys (clear_values: what hidden keys hold)
//   5      O, l, m                                      walk_keys
//   8      S = Q_i K_jᵀ                                 multiply_keys
//   9      m, P̃, l                                      StaleSoftmax
//   10     O += P̃ V_j                                   multiply_probabilities
//   12-15  O / l, L, and out                            store_rows
#pragma once

#include "fa2/forward_sm90_clear.cuh"
#include "fa2/forward_sm90_consumer.cuh"
#include "fa2/forward_sm90_producer.cuh"

namespace hfc {

template <typename Config>
__device__ __forceinline__ void fa2_forward_sm90(const ForwardSm90Params& params) {
  const ForwardSm90Traits<Config> shared;
  if (thread_id() == 0) shared.init_barriers();
  sync_threads();
  const int warpgroup = warpgroup_id();
  if (warpgroup == 0) {
    decrease_registers<Config::kLoadRegisters>();
    const int warp = warp_id();
    if (warp == 0) load_keys<Config>(params, shared);
    if (warp == 1 && lane_id() == 0) load_queries<Config>(params, shared);
    if constexpr (ForwardSm90Traits<Config>::kClears)
      if (warp == 2) clear_values<Config>(params, shared);
    if constexpr (Config::kVarlen)
      if (warp == 3) clear_rows<Config>(params.attention);
  } else {
    increase_registers<Config::kComputeRegisters>();
    ForwardConsumer<Config>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace hfc
