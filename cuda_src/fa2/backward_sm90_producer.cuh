// The warpgroup that moves data: one thread loads, one for each computing warpgroup adds its part of dq to the sums in device memory.
#pragma once

#include "fa2/backward_sm90_blocks.cuh"
#include "fa2/backward_sm90_traits.cuh"
#include "turn.cuh"

namespace hfc {

// Whether the calling thread is the one of its warp that acts; with kIntervals the whole warp walks over the row blocks with it.
template <typename Config>
__device__ __forceinline__ bool acts() {
  return !Config::kIntervals || lane_id() == 0;
}

// Statistics of a row block from `part` on, reported to `loaded` beside its rows.
__device__ __forceinline__ void load_statistics(SharedPtr target, const char* part, int bytes, SharedPtr loaded) {
  mbarrier_arrive_expect(loaded, bytes);
  bulk_load(target, part, bytes, loaded);
}

// K, then Q and dO block by block; V when the first products no longer need it to wait for Q. One thread calls, with kIntervals its
// warp.
template <typename Config>
__device__ __forceinline__ void load_rows_of_keys(const BackwardSm90Params& params, BackwardSm90Traits<Config> shared,
                                                  const WorkTile& keys) {
  using Traits = BackwardSm90Traits<Config>;
  using Statistics = typename Traits::Statistics;
  const int first_key = keys.m_block * Config::kBlockN;
  if (acts<Config>()) load_panels(shared.k(), params.k, shared.k_loaded(), first_key, keys.head, keys.entry);
  RowBlocks<Config> rows(params.attention, keys);
  int head = keys.head * (params.attention.num_heads / params.attention.num_heads_k) + rows.heads_before();
  typename Traits::RowRing ring;
  for (int i = 0; i < rows.count(); ++i) {
    const int slot = ring.slot(), dout_slot = Traits::dout_slot(ring), first_row = rows.m_block() * Config::kBlockM;
    const char* statistics = reinterpret_cast<const char*>(params.row_statistics) + rows.place() * Statistics::kBytes;
    mbarrier_wait(shared.q_released(slot), ring.parity() ^ 1);
    if (acts<Config>()) {
      load_panels(shared.q(slot), params.q, shared.q_loaded(slot), first_row, head, keys.entry);
      load_statistics(shared.statistics(slot), statistics, Statistics::kScoreBytes, shared.q_loaded(slot));
      if (i == 0) load_panels(shared.v(), params.v, shared.v_loaded(), first_key, keys.head, keys.entry);
    }
    mbarrier_wait(shared.dout_released(dout_slot), Traits::dout_parity(ring) ^ 1);
    if (acts<Config>()) {
      load_panels(shared.dout(dout_slot), params.dout, shared.dout_loaded(dout_slot), first_row, head, keys.entry);
      load_statistics(shared.statistics(dout_slot) + Statistics::kDpStarts, statistics + Statistics::kDpStarts,
                      Statistics::kDpBytes, shared.dout_loaded(dout_slot));
    }
    ring.advance();
    head += rows.advance();
    if constexpr (Config::kIntervals) sync_warp();  // no lane may wait for a phase that is long over
  }
}

// What a warpgroup stages comes a step late: before the first block's it stages nothing that is anybody's. Where each part of dq has
// its turn, that is asked for while the one before is on its way, and passed on when the warpgroup may stage again: what a turn takes
// lies beside the warpgroup's products. Called as load_rows_of_keys.
template <typename Config>
__device__ __forceinline__ void add_dq(const BackwardSm90Params& params, BackwardSm90Traits<Config> shared, const WorkTile& keys,
                                       int warpgroup) {
  using Traits = BackwardSm90Traits<Config>;
  RowBlocks<Config> rows(params.attention, keys);
  if (Config::kIntervals && rows.count() == 0) return;  // nothing is staged
  Ring<1> ring;
  const int next = next_to_add<Config>(params.attention, keys);
  bool has_come = false;  // the turn of the next part
  for (int i = 0; i <= rows.count(); ++i) {
    int* const turn = params.dq_turns + (rows.place() * Traits::kWarpgroups + warpgroup);
    if (Config::kDeterministic && i > 0 && !has_come) wait_turn(turn, keys.m_block);
#pragma unroll
    for (int part = 0; part < Traits::kDqParts; ++part) {
      mbarrier_wait(shared.dq_staged(warpgroup), ring.parity());
      ring.advance();
      if (i > 0) {
        if (acts<Config>()) {
          bulk_add(params.attention.dq_accum + Traits::dq_place(rows.place(), warpgroup, part), shared.dq(warpgroup),
                   Traits::kDqBytes);
          tma_store_commit();
          tma_store_wait_read();
        }
        if (part + 1 == Traits::kDqParts) rows.advance();
      }
      if (acts<Config>()) mbarrier_arrive(shared.dq_read(warpgroup));
    }
    if (Config::kDeterministic && i > 0) {
      const int64 part = rows.place() * Traits::kWarpgroups + warpgroup;
      has_come = i < rows.count() && is_turn(params.dq_turns + part, keys.m_block);
      tma_store_wait();
      pass_turn(turn, next);
    }
    if constexpr (Config::kIntervals) sync_warp();
  }
  tma_store_wait();
}

}  // namespace hfc
