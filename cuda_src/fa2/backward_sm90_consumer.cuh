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

#include "attn/gradient.cuh"
#include "fa2/backward_sm90_blocks.cuh"
#include "fa2/backward_sm90_hidden.cuh"
#include "fa2/backward_sm90_traits.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
#include "tile/fragment.cuh"

namespace hfc {

template <typename Config>
class BackwardConsumer {
  using Traits = BackwardSm90Traits<Config>;
  using Element = typename Traits::Element;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileDs = typename Traits::TileDs;
  using Statistics = typename Traits::Statistics;
  static constexpr int kN = Traits::kN;
  static constexpr int kSteps = Config::kBlockM / 16;  // of a product over the rows
  using Operand = uint32[kSteps][4];  // P or dS, as A of a product over the rows
  // Beside dk += dS Q there are registers for the starts of S and dP; of longer row blocks only for those of S.
  static constexpr bool kBothEarly = Config::kBlockM <= 64;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardSm90Params& params, const Traits& shared, const WorkTile& keys,
                                              int warpgroup)
      : params_(params.attention),
        launch_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        warp_(warp_id() % 4),
        first_key_(keys.m_block * Config::kBlockN + warpgroup * kUnitKeys),
        operand_(matrix_descriptor(shared.base)),
        rows_(params.attention, keys) {}

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
    multiply_scores(slot);
    if constexpr (!kBothEarly) await_dout();
    if (large_) start_by_parts(slot);
    multiply_dp(slot);
    wgmma_wait<1>();
    hold_registers(scores_[0]);
    become_probabilities();
    Operand p, ds;
    pack(p, scores_[0]);
    multiply_dv(p, slot);
    wgmma_wait<1>();
    hold_registers(dp_[0]);
    become_ds();
    pack(ds, dp_[0]);
    const int late = share(ds);
    float dq[Traits::kNQ][4];
    multiply_dq(dq, late);
    multiply_dk(ds, slot);
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

  // dS of the block before the first is zero, so that every step begins and ends alike.
  __device__ __forceinline__ void share_zeros() {
    const SharedPtr mine = shared_.base + (Traits::ds_offset(0) + warpgroup_ * TileDs::kPanelBytes);
    for (int offset = thread_id() % kWarpgroupSize * 16; offset < TileDs::kPanelBytes; offset += kWarpgroupSize * 16)
      store_shared(mine + offset, Chunk{});
    fence_async_proxy();
    release(shared_.ds_written(0));
  }

  // Rows of the next block: S and dP start from their statistics. Without `arriving`, after the last, from what lies there: loads
  // under a condition take twice the registers.
  __device__ __forceinline__ void await_q(bool arriving = true) {
    const int slot = row_slots_.slot();
    if (arriving) mbarrier_wait(shared_.q_loaded(slot), row_slots_.parity());
    start_from(scores_[0], shared_.statistics(slot) + Statistics::kScoreStarts);
    if constexpr (Config::kIntervals)
      if (!rows_.whole()) hide_unseen(scores_[0], launch_.row_intervals + rows_.record() * (2 * Config::kBlockM), first_key_);
    const Chunk large = load_shared_chunk(shared_.statistics(slot) + Statistics::kLarge);
    large_ = warp_any((large.words[0] | large.words[1] | large.words[2] | large.words[3]) != 0);
  }
  __device__ __forceinline__ void await_dout(bool arriving = true) {
    const int slot = row_slots_.slot();
    if (arriving) mbarrier_wait(shared_.dout_loaded(slot), row_slots_.parity());
    start_dp(slot);
  }
  __device__ __forceinline__ void start_dp(int slot) { start_from(dp_[0], shared_.statistics(slot) + Statistics::kDpStarts); }
  // One number a column, the same in all rows.
  __device__ __forceinline__ static void start_from(float (&products)[kN][4], SharedPtr starts) {
    const SharedPtr columns = starts + column_of(0, 0) * 4;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      load_shared(columns + 8 * j * 4, products[j][0], products[j][1]);
      products[j][2] = products[j][0];
      products[j][3] = products[j][1];
    }
  }

  __device__ __forceinline__ int64 operand(int offset) const { return operand_ + (offset >> 4); }

  // S^T += K Q^T, and dP^T += V dO^T: 64 keys, a row block.
  __device__ __forceinline__ void multiply_scores(int slot) {
    hold_registers(scores_[0]);
    wgmma_fence();
    multiply_rows(scores_[0], Traits::kK, Traits::q_offset(slot));
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_dp(int slot) {
    hold_registers(dp_[0]);
    wgmma_fence();
    multiply_rows(dp_[0], Traits::kV, Traits::dout_offset(slot));
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_rows(float (&products)[kN][4], int keys_offset, int rows_offset) const {
    const int64 keys = operand(keys_offset + warpgroup_ * (kUnitKeys * kPanelRowBytes)), rows = operand(rows_offset);
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int panel = step / 4, offset = step % 4 * (32 >> 4);  // 16 columns are 32 bytes
      wgmma_shared<Element>(products, keys + (panel * (TileK::kPanelBytes >> 4) + offset),
                            rows + (panel * (TileQ::kPanelBytes >> 4) + offset), true);
    }
  }

  // dv += P^T dO, and dk += dS^T Q: 64 keys, all columns.
  __device__ __forceinline__ void multiply_dv(Operand& p, int slot) {
    hold_registers(dv_[0]);
    hold_registers(p);
    wgmma_fence();
    multiply_columns(dv_[0], p, Traits::dout_offset(slot));
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_dk(Operand& ds, int slot) {
    hold_registers(dk_[0]);
    hold_registers(ds);
    wgmma_fence();
    multiply_columns(dk_[0], ds, Traits::q_offset(slot));
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_columns(float (&sums)[Traits::kND][4], const Operand& factors, int rows_offset) const {
    const int64 rows = operand(rows_offset) + panel_stride(TileQ::kPanelBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_registers<Element>(sums, factors[step], rows + step * (16 * kPanelRowBytes >> 4));
  }

  // dq^T = K^T dS^T, of the dS in `slot`: 64 columns, kDqRows rows.
  __device__ __forceinline__ void multiply_dq(float (&dq)[Traits::kNQ][4], int slot) const {
    const int panel = Traits::kDqPanels == 1 ? 0 : warpgroup_;
    const int first_row = Traits::kDqPanels == 1 ? warpgroup_ * Traits::kDqRows : 0;
    const int64 keys = operand(Traits::kK + panel * TileK::kPanelBytes);
    const int64 ds = operand(Traits::ds_offset(slot) + first_row * kPanelRowBytes);
    wgmma_fence();
    wgmma_columns<Element, false>(dq, keys, ds);
#pragma unroll
    for (int step = 1; step < Config::kBlockN / 16; ++step)
      wgmma_columns<Element, true>(dq, keys + step * (16 * kPanelRowBytes >> 4),
                                   ds + (step / 4 * (TileDs::kPanelBytes >> 4) + step % 4 * (32 >> 4)));
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_dq() {
    const int late = ds_slots_.slot();
    mbarrier_wait(shared_.ds_written(late), ds_slots_.parity());
    float dq[Traits::kNQ][4];
    multiply_dq(dq, late);
    wgmma_wait<0>();
    hold_registers(dq);
    stage(dq);
  }

  // Scores become probabilities: Algorithm 2, line 11.
  __device__ __forceinline__ void become_probabilities() {
    if constexpr (!Config::kIntervals) hide_keys();
    const float scale = params_.score_scale_log2;
    for_each_score(scores_, [scale](float s) { return exp2_fast<Element>(s * scale); });
  }

  // Where the rounding of lse would show, see probabilities_by_parts(): rows that are large started from 0, the parts of others are.
  // dP's starts are read again, so that their registers are free in between.
  __device__ __forceinline__ void start_by_parts(int slot) {
    wgmma_wait<0>();
    hold_registers(scores_[0]);
    constexpr float kLarge = 16777216.0f;  // 2^24: where the forward pass scales first, too
    const float scale = params_.score_scale_log2, inverse_scale = reciprocal_fast(scale);
    const float* parts = launch_.row_statistics + (rows_.place() * Statistics::kBytes + Statistics::kMaxima) / 4;
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float maximum = parts[part_of(j, column)], log2_sum = parts[Config::kBlockM + part_of(j, column)];
#pragma unroll
        for (int e = column; e < 4; e += 2) {
          float& score = scores_[0][j][e];
          const float logit =
              abs_float(maximum) > kLarge ? multiply(score, scale) - maximum : fused_multiply_add(score, scale, -maximum);
          score = (logit - log2_sum) * inverse_scale;
        }
      }
    start_dp(slot);
  }
  // With kIntervals there are no registers that could keep all columns' offsets for this rare case.
  __device__ __forceinline__ static int part_of(int j, int column) {
    if constexpr (Config::kIntervals) return in_place(lane_id() % 4 * 2) + (8 * j + column);
    return column_of(j, column);
  }

  // Keys beyond the end, whose lse-scaled zeros could be infinite, and those beyond the diagonal.
  __device__ __forceinline__ void hide_keys() {
    const int first_row = rows_.m_block() * Config::kBlockM;
    const int diagonal = params_.seqlen_k - params_.seqlen_q + params_.window_right;  // row i sees keys up to i + diagonal
    bool some = first_key_ + kUnitKeys > params_.seqlen_k;
    if constexpr (Config::kCausal) some = some || first_row + diagonal < first_key_ + kUnitKeys - 1;
    if (!some) return;
    const int thread = in_place(thread_id()) % kWarpgroupSize;  // here, rather than in registers of every step
    const int row = thread / kWarpSize * 16 + thread % kWarpSize / 4, column = thread % 4 * 2;  // row_of, column_of
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key_ + row + 8 * half;
      int hidden = Config::kCausal ? key - diagonal - first_row : 0;  // rows of the block that do not see the key
      if (key >= params_.seqlen_k) hidden = Config::kBlockM;
      hidden -= column;
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          if (8 * j + e % 2 < hidden) scores_[0][j][e] = bits_float(0xff800000u);  // -inf
    }
  }

  // dP - delta becomes dS: line 14.
  __device__ __forceinline__ void become_ds() {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp_[0][j][e] *= scores_[0][j][e];
        if constexpr (kScalesDs<Element>) dp_[0][j][e] *= params_.softmax_scale;
      }
  }
  __device__ __forceinline__ static void pack(Operand& operand, const float (&values)[kN][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) to_operand<Element>(operand[k], values, k);
  }

  // Writes this warp's part of dS beside the other warps'; returns the slot of the block before, which all have written.
  __device__ __forceinline__ int share(const Operand& ds) {
    const int late = ds_slots_.slot();
    mbarrier_wait(shared_.ds_written(late), ds_slots_.parity());  // who writes on has also left the block before that one
    ds_slots_.advance();
    const int slot = ds_slots_.slot();
    const SharedPtr place = transposed_place(shared_.base + (Traits::ds_offset(slot) + warpgroup_ * TileDs::kPanelBytes), warp_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) stmatrix_transposed(place + 16 * k * kPanelRowBytes, ds[k]);
    fence_async_proxy();
    release(shared_.ds_written(slot));
    return late;
  }

  // To shared memory as the accumulators are: the sums in device memory have that order, which fa2_backward_sm90_finish undoes.
  __device__ __forceinline__ void stage(const float (&dq)[Traits::kNQ][4]) {
    mbarrier_wait(shared_.dq_read(warpgroup_), staged_.parity() ^ 1);
    staged_.advance();
    const SharedPtr mine = shared_.dq(warpgroup_) + in_place(thread_id()) % kWarpgroupSize * 16;
#pragma unroll
    for (int j = 0; j < Traits::kNQ; ++j) {
      const Chunk four{{float_bits(dq[j][0]), float_bits(dq[j][1]), float_bits(dq[j][2]), float_bits(dq[j][3])}};
      store_shared(mine + j * (kWarpgroupSize * 16), four);
    }
    fence_async_proxy();
    release(shared_.dq_staged(warpgroup_));
  }

  // Once a warp, when all of its lanes are done.
  __device__ __forceinline__ static void release(SharedPtr barrier) {
    sync_warp();
    if (lane_id() == 0) mbarrier_arrive(barrier);
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

  const AttentionParams& params_;
  const BackwardSm90Params& launch_;
  const Traits shared_;
  const int warpgroup_;
  const int warp_;  // of the warpgroup
  const int first_key_;  // of the warpgroup
  const int64 operand_;  // the start of shared memory as a descriptor: addresses in units of 16 bytes
  RowBlocks<Config> rows_;
  Ring<Traits::kRowSlots> row_slots_;
  Ring<Traits::kDsSlots> ds_slots_;  // of the block before
  Ring<1> staged_;
  bool large_ = false;  // some row of the block is
  float scores_[1][kN][4];  // S, then P: keys by rows
  float dp_[1][kN][4];  // dP - delta, then dS
  float dk_[1][Traits::kND][4];
  float dv_[1][Traits::kND][4];
};

}  // namespace hfc
