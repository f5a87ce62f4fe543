// A warpgroup that computes: 64 keys, all row blocks that see them. A step is in one order, chosen so that the tensor cores always
// have a product beside what the threads do, and so that what the threads do with shared memory lies beside products whose A comes
// from registers, for those leave it idle half of the time:
//
//   the threads                                     the tensor cores, in order
//                                                   S(i), dP(i)
//   wait for S; P = exp(S), mask
//   wait for dP; dS = P (dP - delta)                dv += P dO
//   share dS(i), once all have shared dS(i-1)
//   wait for dq(i-1), stage it for the adder        dq(i-1), dk += dS Q
//   statistics of i+1; intervals of its rows
//   wait for dk
//
// A product under way at the loop's end would have to be the only one, and be waited for first: the loop ends where there is none.
#pragma once

#include "fa2/backward_sm90_warpgroup.cuh"

namespace hfc {

template <typename Config>
class BackwardConsumer : BackwardWarpgroup<Config> {
  using Base = BackwardWarpgroup<Config>;
  using Base::become_probabilities, Base::finish_dq, Base::multiply_columns, Base::multiply_dq, Base::multiply_rows, Base::pack,
      Base::release, Base::share_zeros, Base::stage, Base::start_by_parts, Base::start_from, Base::start_scores, Base::write_ds;
  using Base::ds_slots_, Base::large_, Base::launch_, Base::params_, Base::row_slots_, Base::rows_, Base::shared_,
      Base::warpgroup_;
  using typename Base::Element, typename Base::Operand, typename Base::Scores, typename Base::Statistics, typename Base::TileK,
      typename Base::Traits;
  // Beside dk += dS Q there are registers for the starts of S and dP; of longer row blocks only for those of S.
  static constexpr bool kBothEarly = Config::kBlockM <= 64;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    clear(dk_);
    clear(dv_);
    share_zeros();
    mbarrier_wait(shared_.k_loaded(), 0);
    if (!Config::kIntervals || rows_.count() > 0) walk();  // the last row sees all keys, where only the diagonal hides any
    store();
  }

 private:
  __device__ __forceinline__ void walk() {
    mbarrier_wait(shared_.v_loaded(), 0);
    if constexpr (Config::kIntervals) clear_hidden_keys<Config>(launch_, shared_, warpgroup_);
    await_q();
    if constexpr (kBothEarly) await_dout();
    for (int left = rows_.count(); left > 0; --left) step(left > 1);
    finish_dq();
  }

  __device__ __forceinline__ void step(bool more) {
    const int slot = row_slots_.slot();
    multiply_rows(scores_[0], Traits::kK, Traits::q_offset(slot));
    if constexpr (!kBothEarly) await_dout();
    if (large_) {
      start_by_parts(scores_);
      start_dp(slot);  // again, so that their registers are free in between
    }
    multiply_rows(dp_[0], Traits::kV, Traits::dout_offset(slot));
    wgmma_wait<1>();
    hold_registers(scores_[0]);
    become_probabilities(scores_);
    Operand p, ds;
    pack(p, scores_[0]);
    multiply_columns(dv_[0], p, Traits::dout_offset(slot));
    wgmma_wait<1>();
    hold_registers(dp_[0]);
    become_ds();
    pack(ds, dp_[0]);
    const int late = share(ds);
    float dq[Traits::kNQ][4];
    multiply_dq(dq, late);
    multiply_columns(dk_[0], ds, Traits::q_offset(slot));
    wgmma_wait<1>();
    hold_registers(dq);
    hold_registers(dv_[0]);
    hold_registers(p);
    release(shared_.dout_released(slot));
    stage(dq);
    row_slots_.advance();
    rows_.advance();
    await_q(more);
    if constexpr (kBothEarly) await_dout(more);
    wgmma_wait<0>();
    hold_registers(dk_[0]);
    hold_registers(ds);
    release(shared_.q_released(slot));
  }

  // Rows of the next block: S and dP start from their statistics. Without `arriving`, after the last, from what lies there: loads
  // under a condition take twice the registers.
  __device__ __forceinline__ void await_q(bool arriving = true) {
    const int slot = row_slots_.slot();
    if (arriving) mbarrier_wait(shared_.q_loaded(slot), row_slots_.parity());
    start_scores(scores_, slot);
  }
  __device__ __forceinline__ void await_dout(bool arriving = true) {
    const int slot = row_slots_.slot();
    if (arriving) mbarrier_wait(shared_.dout_loaded(slot), row_slots_.parity());
    start_dp(slot);
  }
  __device__ __forceinline__ void start_dp(int slot) { start_from(dp_[0], shared_.statistics(slot) + Statistics::kDpStarts); }

  // dP - delta becomes dS: line 14.
  __device__ __forceinline__ void become_ds() {
#pragma unroll
    for (int j = 0; j < Base::kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp_[0][j][e] *= scores_[0][j][e];
        if constexpr (kScalesDs<Element>) dp_[0][j][e] *= params_.softmax_scale;
      }
  }
  // Returns the slot of the dS of the block before, which all have written.
  __device__ __forceinline__ int share(const Operand& ds) {
    const int late = ds_slots_.slot();
    mbarrier_wait(shared_.ds_written(late), ds_slots_.parity());  // who writes on has also left the block before that one
    ds_slots_.advance();
    write_ds(ds, ds_slots_.slot());
    return late;
  }

  // dk and dv by way of the places of k and v, which both warpgroups have left then: line 18.
  __device__ __forceinline__ void store() {
    named_barrier_sync(1, Traits::kWarpgroups * kWarpgroupSize);
    const int row = (in_place(thread_id()) - kWarpgroupSize) / kWarpSize * 16;  // of the warp; again, rather than registers
    if constexpr (!kScalesDs<Element>) {
      const float scale = params_.softmax_scale;
      for_each_score(dk_, [scale](float x) { return x * scale; });
    }
    stage_rows<Element, TileK::kPanelBytes>(shared_.k().base + row * kPanelRowBytes, dk_[0]);
    stage_rows<Element, TileK::kPanelBytes>(shared_.v().base + row * kPanelRowBytes, dv_[0]);
    fence_async_proxy();
    sync_warp();
    if (lane_id() != 0) return;
    const WorkTile keys = ordered_key_tile<Config>(params_, in_place(block_id()));
    const int first_key = keys.m_block * Config::kBlockN + row;
#pragma unroll
    for (int panel = 0; panel < TileK::kPanels; ++panel) {
      const int offset = panel * TileK::kPanelBytes + row * kPanelRowBytes, column = panel * kPanelColumns;
      tma_store(launch_.dk, shared_.k().base + offset, column, first_key, keys.head, keys.entry);
      tma_store(launch_.dv, shared_.v().base + offset, column, first_key, keys.head, keys.entry);
    }
    tma_store_commit();
    tma_store_wait();
  }

  Scores scores_;  // S, then P
  Scores dp_;  // dP - delta, then dS
  float dk_[1][Traits::kND][4];
  float dv_[1][Traits::kND][4];
};

}  // namespace hfc
