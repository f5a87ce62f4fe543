// A warpgroup that computes at head size 256, where dk and dv of 64 keys would take all of its registers: two of them have the same
// 64 keys. The first has S, P and dv, the second dP, dS and dk, and each half of dq's columns, so that no product is computed twice.
// P goes from the first to the second in float32, thread to thread. A step of each, and what it gives the tensor cores meanwhile:
//
//   the first                         the second                             the tensor cores, in order
//                                                                            S(i) or dP(i), dq(i-1) of 64 columns
//   wait for S                        wait for dP and P(i)
//   P = exp(S), mask; share P(i)      dS = P (dP - delta); share dS(i)
//   wait for dq, stage it for the adder                                      dv += P dO or dk += dS Q
//   wait for dv or dk; statistics of i+1                                     dq(i-1) of the other 64
//   wait for dq, stage it
//
// The first is ahead by P: by less than a step, for it multiplies dS(i-1), too, before it shares P(i). So P and dO have one place
// each, which is all that shared memory has left, and even so dq is staged by halves.
//
// An estimate of what limits: the tensor cores take 2,560 cycles a step, but shared memory is read or written in 4,030 (S, dP, dq
// 512 each, dv, dk 256 each, loads 512, dq's way out 1,024, P 256, the rest 190). Were S and dP computed by both warpgroups, for
// 128 columns of dk and of dv each, it would be 3,584 and 4,930.
#pragma once

#include "fa2/backward_sm90_warpgroup.cuh"

namespace hfc {

template <typename Config, bool kHasScores>
class BackwardPairConsumer : BackwardWarpgroup<Config> {
  using Base = BackwardWarpgroup<Config>;
  using Base::become_probabilities, Base::finish_dq, Base::multiply_columns, Base::multiply_dq, Base::multiply_rows, Base::pack,
      Base::release, Base::share_zeros, Base::stage, Base::start_by_parts, Base::start_from, Base::start_scores, Base::write_ds;
  using Base::ds_slots_, Base::large_, Base::launch_, Base::params_, Base::row_slots_, Base::rows_, Base::shared_,
      Base::warpgroup_, Base::kN;
  using typename Base::Element, typename Base::Operand, typename Base::Scores, typename Base::Statistics, typename Base::TileK,
      typename Base::Traits;
  static_assert(Traits::kSharesKeys && Traits::kDqParts == 2 && Traits::kDoutSlots == 1);

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    clear(sums_);
    mbarrier_wait(shared_.k_loaded(), 0);
    if (!Config::kIntervals || rows_.count() > 0) walk();  // the last row sees all keys, where only the diagonal hides any
    store();
  }

 private:
  __device__ __forceinline__ void walk() {
    if constexpr (!kHasScores) mbarrier_wait(shared_.v_loaded(), 0);
    if constexpr (Config::kIntervals) clear_hidden_keys<Config>(launch_, shared_, warpgroup_);
    if constexpr (kHasScores) share_zeros();  // the second multiplies them, and thereby k, when they are there
    await_rows();
    for (int left = rows_.count(); left > 0; --left) step(left > 1);
    finish_dq();
    const int last = ds_slots_.slot();
    release(shared_.ds_read(last));
    if constexpr (!kHasScores) mbarrier_wait(shared_.ds_read(last), ds_slots_.parity());
  }

  __device__ __forceinline__ void step(bool more) {
    const int slot = row_slots_.slot(), late = ds_slots_.slot();
    multiply_rows(products_[0], kHasScores ? Traits::kK : Traits::kV, rows_offset(slot));
    if (kHasScores && large_) start_by_parts(products_);
    mbarrier_wait(shared_.ds_written(late), ds_slots_.parity());
    ds_slots_.advance();
    float dq[Traits::kNQ][4];
    multiply_dq(dq, late, 0);
    wgmma_wait<1>();
    hold_registers(products_[0]);
    Operand factors;
    if constexpr (kHasScores)
      share_p(factors, slot);
    else
      share_ds(factors);
    multiply_columns(sums_[0], factors, columns_offset(slot));
    wgmma_wait<1>();
    hold_registers(dq);
    stage(dq);
    multiply_dq(dq, late, 1);
    wgmma_wait<1>();
    hold_registers(sums_[0]);
    hold_registers(factors);
    release(kHasScores ? shared_.dout_released(0) : shared_.q_released(slot));
    row_slots_.advance();
    rows_.advance();
    await_rows(more);
    wgmma_wait<0>();
    hold_registers(dq);
    release(shared_.ds_read(late));
    stage(dq);
  }

  // The first warpgroup's scores are over the columns of q, and dv over the rows of dO; the second's dP and dk the other way round.
  __device__ __forceinline__ static int rows_offset(int slot) {
    return kHasScores ? Traits::q_offset(slot) : Traits::dout_offset(0);
  }
  __device__ __forceinline__ static int columns_offset(int slot) {
    return kHasScores ? Traits::dout_offset(0) : Traits::q_offset(slot);
  }
  __device__ __forceinline__ void await_q() const { mbarrier_wait(shared_.q_loaded(row_slots_.slot()), row_slots_.parity()); }
  __device__ __forceinline__ void await_dout() const { mbarrier_wait(shared_.dout_loaded(0), Traits::dout_parity(row_slots_)); }

  // Rows of the next block: S or dP starts from their statistics. Without `arriving`, after the last, from what lies there.
  __device__ __forceinline__ void await_rows(bool arriving = true) {
    if constexpr (kHasScores) {
      if (arriving) await_q();
      start_scores(products_, row_slots_.slot());
    } else {
      if (arriving) await_dout();
      start_from(products_[0], shared_.statistics(0) + Statistics::kDpStarts);
    }
  }

  // Where this thread leaves chunk j of P, or finds it.
  __device__ __forceinline__ SharedPtr place_of_p(int j) const {
    return shared_.p() + in_place(thread_id()) % kWarpgroupSize * 16 + j * (kWarpgroupSize * 16);
  }
  // S is there: it becomes P, which the second warpgroup is given; dO will be wanted. The P before has been read: dS(i-1) is there.
  __device__ __forceinline__ void share_p(Operand& p, int slot) {
    release(shared_.q_released(slot));
    become_probabilities(products_);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const float (&four)[4] = products_[0][j];
      store_shared(place_of_p(j), Chunk{{float_bits(four[0]), float_bits(four[1]), float_bits(four[2]), float_bits(four[3])}});
    }
    release(shared_.p_written());
    pack(p, products_[0]);
    await_dout();
  }
  // dP - delta is there: it becomes dS, which both warpgroups multiply for dq; q will be wanted.
  __device__ __forceinline__ void share_ds(Operand& ds) {
    release(shared_.dout_released(0));
    mbarrier_wait(shared_.p_written(), Traits::single_parity(row_slots_));
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const Chunk p = load_shared_chunk(place_of_p(j));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        products_[0][j][e] *= bits_float(p.words[e]);
        if constexpr (kScalesDs<Element>) products_[0][j][e] *= params_.softmax_scale;
      }
    }
    pack(ds, products_[0]);
    const int slot = ds_slots_.slot();
    mbarrier_wait(shared_.ds_read(slot), ds_slots_.parity() ^ 1);
    write_ds(ds, slot);
    await_q();
  }

  // dv or dk by way of the place of v or k: line 18. Nobody reads v since the last dS was written, nor k since it was read.
  __device__ __forceinline__ void store() {
    const int row = in_place(thread_id()) % kWarpgroupSize / kWarpSize * 16;  // of the warp
    if constexpr (!kHasScores && !kScalesDs<Element>) {
      const float scale = params_.softmax_scale;
      for_each_score(sums_, [scale](float x) { return x * scale; });
    }
    const SharedPtr rows = (kHasScores ? shared_.v() : shared_.k()).base + row * kPanelRowBytes;
    stage_rows<Element, TileK::kPanelBytes>(rows, sums_[0]);
    fence_async_proxy();
    sync_warp();
    if (lane_id() != 0) return;
    const WorkTile keys = ordered_key_tile<Config>(params_, in_place(block_id()));
#pragma unroll
    for (int panel = 0; panel < TileK::kPanels; ++panel)
      tma_store(kHasScores ? launch_.dv : launch_.dk, rows + panel * TileK::kPanelBytes, panel * kPanelColumns,
                keys.m_block * Config::kBlockN + row, keys.head, keys.entry);
    tma_store_commit();
    tma_store_wait();
  }

  Scores products_;  // S, then P; or dP - delta, then dS
  float sums_[1][Traits::kND][4];  // dv or dk
};

}  // namespace hfc
