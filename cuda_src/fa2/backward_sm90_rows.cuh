// What the Hopper backward does row by row before and after its main kernel: as fa2/backward_rows.cuh, in the main kernel's orders.
#pragma once

#include "attn/delta.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "fa2/backward_sm90_blocks.cuh"
#include "fa2/backward_sm90_traits.cuh"
#include "fa2/row_block_keys.cuh"
#include "tile/copy.cuh"

namespace hfc {

// What the products of row `row` of a block start from; returns whether its lse is_large(). `index`: its place in lse's layout.
template <typename Config>
__device__ __forceinline__ bool note_row(const AttentionParams& params, float* starts, int row, int64 index, float lse,
                                         float delta) {
  using Statistics = RowStatistics<Config::kBlockM>;
  const bool large = is_large<typename Config::Element>(lse);
  const bool sees_none = lse == bits_float(0xff800000u);
  starts[Statistics::kScoreStarts / 4 + row] = large ? 0.0f : sees_none ? lse : -(lse * (1.0f / kLn2)) / params.score_scale_log2;
  starts[Statistics::kDpStarts / 4 + row] = -delta;
  starts[Statistics::kMaxima / 4 + row] = large ? params.row_max[index] : 0.0f;
  starts[Statistics::kMaxima / 4 + Config::kBlockM + row] = large ? natural_log(params.row_sum[index]) * (1.0f / kLn2) : 0.0f;
  return large;
}

// Algorithm 2, lines 3 and 4: dq's sums start at 0; delta = rowsum(dout * out), less the gradient that lse itself has. And what the
// products of the row block start from; with kIntervals, the keys that its rows see.
template <typename Config>
__device__ __forceinline__ void fa2_backward_sm90_prepare(const BackwardSm90Params& launch) {
  using Element = typename Config::Element;
  using Statistics = RowStatistics<Config::kBlockM>;
  static_assert(Config::kNumWarps == 4, "a word of kLarge a warp");
  const AttentionParams& params = launch.attention;
  const WorkTile work = row_work_tile<Config>(params);
  if (work.m_block < 0) return;
  const SeqlenInfo seqlen(params, work.entry);
  const int64 block = row_block_place(params, work.entry, work.head, work.m_block);
  if constexpr (Config::kIntervals) {
    // Rows that do not exist are not told: their scores start from -inf in any case.
    const int64 record = RowBlockKeys::first<Config>(params, work.entry, work.head) + work.m_block;
    int* pairs = launch.row_intervals + record * (2 * Config::kBlockM);
    note_keys<Config>(params, seqlen, work, [pairs](int row, KeyInterval seen) {
      pairs[2 * row] = seen.lo;
      pairs[2 * row + 1] = seen.hi;
    });
  }
  float* sums = params.dq_accum + block * (Config::kBlockM * Config::kHeadDim);
  for (int i = thread_id() * 4; i < Config::kBlockM * Config::kHeadDim; i += Config::kNumWarps * kWarpSize * 4)
    store_global_chunk(sums + i, Chunk{});

  constexpr int kTurns = BackwardSm90Traits<Config>::kWarpgroups;
  if (Config::kDeterministic && thread_id() < kTurns)
    launch.dq_turns[block * kTurns + thread_id()] = first_to_add<Config>(params, work);

  float* starts = launch.row_statistics + block * (Statistics::kBytes / 4);
  const int first_row = work.m_block * Config::kBlockM;
  const Element* dout = seqlen.template rows<Element>(params.dout, first_row, work.head);
  const Element* out = seqlen.template rows<Element>(params.out, first_row, work.head);
  const int64 statistics = work.entry * params.lse_batch_stride + work.head * params.lse_head_stride + first_row;
  bool some_large = false;
  compute_deltas<Config, kDeltaRows>(params, dout, out, statistics, Config::kBlockM, params.seqlen_q - first_row,
                                     [&](int row, float lse, float delta) {
                                       some_large |= note_row<Config>(params, starts, row, statistics + row, lse, delta);
                                     });
  some_large = warp_any(some_large);
  if (lane_id() == 0) starts[Statistics::kLarge / 4 + warp_id()] = bits_float(some_large);
}

// dq in the element type from its sums, which lie as BackwardWarpgroup::stage() had them: transposed accumulators.
template <typename Config>
__device__ __forceinline__ void fa2_backward_sm90_finish(const BackwardSm90Params& launch) {
  using Element = typename Config::Element;
  using Traits = BackwardSm90Traits<Config>;
  using TileQ = typename Traits::TileQ;
  static_assert(Config::kSharedBytes == TileQ::kBytes, "sm90_backward.py and this plan disagree");
  const AttentionParams& params = launch.attention;
  const WorkTile work = row_work_tile<Config>(params);
  if (work.m_block < 0) return;
  const TileQ tile{shared_base()};
  const int64 block = row_block_place(params, work.entry, work.head, work.m_block);
  const int warpgroup = warpgroup_id(), warp = warp_id() % 4;
  const float scale = kScalesDs<Element> ? 1.0f : params.softmax_scale;
#pragma unroll
  for (int part = 0; part < Traits::kDqParts; ++part) {
    const float* sums = params.dq_accum + Traits::dq_place(block, warpgroup, part) + thread_id() % kWarpgroupSize * 4;
    float dq[Traits::kNQ][4];
#pragma unroll
    for (int j = 0; j < Traits::kNQ; ++j) {
      const Chunk four = load_global_chunk(sums + j * (kWarpgroupSize * 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[j][e] = bits_float(four.words[e]) * scale;
    }
    const int panel = Traits::dq_panel(warpgroup, part), first_row = Traits::dq_first_row(warpgroup);
    const SharedPtr place = transposed_place(tile.base + (panel * TileQ::kPanelBytes + first_row * kPanelRowBytes), warp);
#pragma unroll
    for (int k = 0; k < Traits::kNQ / 2; ++k) {
      uint32 operand[4];
      to_operand<Element>(operand, dq, k);
      stmatrix_transposed(place + 16 * k * kPanelRowBytes, operand);
    }
  }
  sync_threads();
  const SeqlenInfo seqlen(params, work.entry);
  for (int row = 16 * warp_id(); row < Config::kBlockM; row += 16 * Config::kNumWarps) {
    const int first = work.m_block * Config::kBlockM + row;
    copy_rows<Element, TileQ::kPanelBytes, Config::kHeadDim>(
        tile.base + row * kPanelRowBytes, seqlen.template rows<Element>(params.dq, first, work.head), params.dq.row_stride,
        min(16, params.seqlen_q - first), params.head_dim);
  }
}

}  // namespace hfc
