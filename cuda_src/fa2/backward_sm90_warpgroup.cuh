// What every computing warpgroup of the Hopper backward has, whichever gradients it keeps: its operands in shared memory, the five
// products, what becomes of scores, and dq's way out of the registers. backward_sm90_consumer.cuh and backward_sm90_pair.cuh put
// them in order.
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
class BackwardWarpgroup {
 public:
  using Traits = BackwardSm90Traits<Config>;

  __device__ __forceinline__ BackwardWarpgroup(const BackwardSm90Params& params, const Traits& shared, const WorkTile& keys,
                                               int warpgroup)
      : params_(params.attention),
        launch_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        warp_(warp_id() % 4),
        unit_(Traits::kSharesKeys ? 0 : warpgroup),
        first_key_(keys.m_block * Config::kBlockN + unit_ * kUnitKeys),
        operand_(matrix_descriptor(shared.base)),
        rows_(params.attention, keys) {}

 protected:
  using Element = typename Traits::Element;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileDs = typename Traits::TileDs;
  using Statistics = typename Traits::Statistics;
  static constexpr int kN = Traits::kN;
  static constexpr int kSteps = Config::kBlockM / 16;  // of a product over the rows
  using Operand = uint32[kSteps][4];  // P or dS, as A of a product over the rows
  using Scores = float[1][kN][4];  // keys by rows

  // dS of the block before the first is zero, so that every step begins and ends alike.
  __device__ __forceinline__ void share_zeros() {
    const SharedPtr mine = shared_.base + (Traits::ds_offset(0) + unit_ * TileDs::kPanelBytes);
    for (int offset = thread_id() % kWarpgroupSize * 16; offset < TileDs::kPanelBytes; offset += kWarpgroupSize * 16)
      store_shared(mine + offset, Chunk{});
    fence_async_proxy();
    release(shared_.ds_written(0));
  }

  // Scores of the row block that rows_ is at start from its statistics, which have come with q.
  __device__ __forceinline__ void start_scores(Scores& scores, int slot) {
    start_from(scores[0], shared_.statistics(slot) + Statistics::kScoreStarts);
    if constexpr (Config::kIntervals)
      if (!rows_.whole()) hide_unseen(scores[0], launch_.row_intervals + rows_.record() * (2 * Config::kBlockM), first_key_);
    const Chunk large = load_shared_chunk(shared_.statistics(slot) + Statistics::kLarge);
    large_ = warp_any((large.words[0] | large.words[1] | large.words[2] | large.words[3]) != 0);
  }
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

  // S^T += K Q^T, or dP^T += V dO^T: 64 keys at kK or kV, a row block at q_offset or dout_offset.
  __device__ __forceinline__ void multiply_rows(float (&products)[kN][4], int keys_offset, int rows_offset) const {
    hold_registers(products);
    wgmma_fence();
    const int64 keys = operand(keys_offset + unit_ * (kUnitKeys * kPanelRowBytes)), rows = operand(rows_offset);
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int panel = step / 4, offset = step % 4 * (32 >> 4);  // 16 columns are 32 bytes
      wgmma_shared<Element>(products, keys + (panel * (TileK::kPanelBytes >> 4) + offset),
                            rows + (panel * (TileQ::kPanelBytes >> 4) + offset), true);
    }
    wgmma_commit();
  }
  // dv += P^T dO, or dk += dS^T Q: 64 keys, all columns.
  __device__ __forceinline__ void multiply_columns(float (&sums)[Traits::kND][4], Operand& factors, int rows_offset) const {
    hold_registers(sums);
    hold_registers(factors);
    wgmma_fence();
    const int64 rows = operand(rows_offset) + panel_stride(TileQ::kPanelBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_registers<Element>(sums, factors[step], rows + step * (16 * kPanelRowBytes >> 4));
    wgmma_commit();
  }

  // dq^T = K^T dS^T, of the dS in `slot`: 64 columns, kDqRows rows.
  __device__ __forceinline__ void multiply_dq(float (&dq)[Traits::kNQ][4], int slot, int part = 0) const {
    const int64 keys = operand(Traits::kK + Traits::dq_panel(warpgroup_, part) * TileK::kPanelBytes);
    const int64 ds = operand(Traits::ds_offset(slot) + Traits::dq_first_row(warpgroup_) * kPanelRowBytes);
    wgmma_fence();
    wgmma_columns<Element, false>(dq, keys, ds);
#pragma unroll
    for (int step = 1; step < Config::kBlockN / 16; ++step)
      wgmma_columns<Element, true>(dq, keys + step * (16 * kPanelRowBytes >> 4),
                                   ds + (step / 4 * (TileDs::kPanelBytes >> 4) + step % 4 * (32 >> 4)));
    wgmma_commit();
  }

  // Scores become probabilities: Algorithm 2, line 11.
  __device__ __forceinline__ void become_probabilities(Scores& scores) const {
    if constexpr (!Config::kIntervals) hide_keys(scores);
    const float scale = params_.score_scale_log2;
    for_each_score(scores, [scale](float s) { return exp2_fast<Element>(s * scale); });
  }

  // Where the rounding of lse would show, see probabilities_by_parts(): rows that are large started from 0, the parts of others are.
  __device__ __forceinline__ void start_by_parts(Scores& scores) {
    wgmma_wait<0>();
    hold_registers(scores[0]);
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
          float& score = scores[0][j][e];
          const float logit =
              abs_float(maximum) > kLarge ? multiply(score, scale) - maximum : fused_multiply_add(score, scale, -maximum);
          score = (logit - log2_sum) * inverse_scale;
        }
      }
  }
  // With kIntervals or kSharesKeys there are no registers that could keep all columns' offsets for this rare case.
  __device__ __forceinline__ static int part_of(int j, int column) {
    if constexpr (Config::kIntervals || Traits::kSharesKeys) return in_place(lane_id() % 4 * 2) + (8 * j + column);
    return column_of(j, column);
  }

  // Keys beyond the end, whose lse-scaled zeros could be infinite, and those beyond the diagonal.
  __device__ __forceinline__ void hide_keys(Scores& scores) const {
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
          if (8 * j + e % 2 < hidden) scores[0][j][e] = bits_float(0xff800000u);  // -inf
    }
  }

  __device__ __forceinline__ static void pack(Operand& operand, const float (&values)[kN][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) to_operand<Element>(operand[k], values, k);
  }

  // This warp's part of dS beside the other warps'.
  __device__ __forceinline__ void write_ds(const Operand& ds, int slot) const {
    const SharedPtr place = transposed_place(shared_.base + (Traits::ds_offset(slot) + unit_ * TileDs::kPanelBytes), warp_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) stmatrix_transposed(place + 16 * k * kPanelRowBytes, ds[k]);
    fence_async_proxy();
    release(shared_.ds_written(slot));
  }

  // The last block's dq.
  __device__ __forceinline__ void finish_dq() {
    const int late = ds_slots_.slot();
    mbarrier_wait(shared_.ds_written(late), ds_slots_.parity());
#pragma unroll
    for (int part = 0; part < Traits::kDqParts; ++part) {
      float dq[Traits::kNQ][4];
      multiply_dq(dq, late, part);
      wgmma_wait<0>();
      hold_registers(dq);
      stage(dq);
    }
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

  const AttentionParams& params_;
  const BackwardSm90Params& launch_;
  const Traits shared_;
  const int warpgroup_;
  const int warp_;  // of the warpgroup
  const int unit_;  // of the thread block's keys: those of the warpgroup's products
  const int first_key_;  // of them
  const int64 operand_;  // the start of shared memory as a descriptor: addresses in units of 16 bytes
  RowBlocks<Config> rows_;
  typename Traits::RowRing row_slots_;
  Ring<Traits::kDsSlots> ds_slots_;  // of the block before
  Ring<1> staged_;
  bool large_ = false;  // some row of the block is
};

}  // namespace hfc
