// FlashAttention-2, backward pass (Dao 2023, Algorithm 2), for compute capability 9.0: as fa2/backward.cuh, with warpgroups for warps,
// wgmma for mma.sync and the copy engine for loads (Shah et al. 2024, FlashAttention-3, section 3, has the roles of the warps).
//
// A thread block owns kBlockN keys of one head of k and v, 64 for each of two warpgroups that keep the gradients dk, dv of theirs in
// registers, or at head size 256 the same 64 for both, of which one keeps dv, the other dk (backward_sm90_pair.cuh). It walks over
// the row blocks of every query head that shares the keys. All products are transposed, keys for rows:
//   S^T = K Q^T, dP^T = V dO^T     A and B from shared memory; both start from the row's statistics
//   dv += P^T dO, dk += dS^T Q     A from the registers in which S^T and dP^T left it
//   dq^T = K^T dS^T                dS goes through shared memory, for both warpgroups' products need it
// dq is multiplied a step late, so that no warpgroup waits for the other's dS; what it gives goes to shared memory and from there, by
// the copy engine, to fp32 sums in device memory. What each line of Algorithm 2 is:
//   3-4    dQ = 0, D                                   fa2_backward_sm90_prepare (backward_sm90_rows.cuh)
//   6, 9   K_j, V_j, Q_i, dO_i, L_i, D_i to the SM     load_rows_of_keys
//   7      dK, dV                                      run of BackwardConsumer or BackwardPairConsumer
//   10-16  S, P, dV, dP, dS, dQ, dK                    step; add_dq
//   18     dK, dV to device memory                     store
#pragma once

#include "fa2/backward_sm90_consumer.cuh"
#include "fa2/backward_sm90_pair.cuh"
#include "fa2/backward_sm90_producer.cuh"

namespace hfc {

template <typename Config>
__device__ __forceinline__ void fa2_backward_sm90(const BackwardSm90Params& params) {
  const BackwardSm90Traits<Config> shared;
  static_assert(shared.kSharedBytes == Config::kSharedBytes, "sm90_backward.py and this plan disagree");
  if (thread_id() == 0) shared.init_barriers();
  sync_threads();
  if (block_id() >= params.attention.num_tiles) return;
  const WorkTile keys = ordered_key_tile<Config>(params.attention, block_id());
  const int warpgroup = warpgroup_id();
  if (warpgroup == 0) {
    decrease_registers<Config::kLoadRegisters>();
    const int warp = warp_id();
    if (!Config::kIntervals && lane_id() != 0) return;
    if (warp == 0) load_rows_of_keys<Config>(params, shared, keys);
    if (warp == 1 || warp == 2) add_dq<Config>(params, shared, keys, warp - 1);
  } else {
    increase_registers<Config::kComputeRegisters>();
    if constexpr (!shared.kSharesKeys)
      BackwardConsumer<Config>(params, shared, keys, warpgroup - 1).run();
    else if (warpgroup == 1)
      BackwardPairConsumer<Config, true>(params, shared, keys, 0).run();
    else
      BackwardPairConsumer<Config, false>(params, shared, keys, 1).run();
  }
}

}  // namespace hfc
