// What the backward pass does row by row before and after its main kernel: delta, the keys that row blocks see, and dq from its
// fp32 sums.
#pragma once

#include "attn/delta.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "fa2/dq_accum.cuh"
#include "fa2/row_block_keys.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

// Algorithm 2, line 4: delta = rowsum(dout * out), less the gradient that lse itself has; and dq's sums start at 0.
template <typename Config>
__device__ __forceinline__ void fa2_backward_prepare(const AttentionParams& params) {
  using Element = typename Config::Element;
  constexpr int kRows = max(1, min(kDeltaRows, Config::kBlockM * kDeltaLanes / (Config::kNumWarps * kWarpSize)));
  const WorkTile work = row_work_tile<Config>(params);
  if (work.m_block < 0) return;
  const SeqlenInfo seqlen(params, work.entry);
  if constexpr (Config::kAccumulateDq)
    for (int chunk = 0; chunk < Config::kChunks; ++chunk)
      DqTile<Config>(params, seqlen, work.m_block, work.head, work.entry, chunk).clear();
  if constexpr (Config::kIntervals) note_keys<Config>(params, seqlen, work, [](int, KeyInterval) {});
  const int first_row = work.m_block * Config::kBlockM;
  const int64 first = seqlen.first_q + first_row;
  const Element* dout = seqlen.template rows<Element>(params.dout, first, work.head);
  const Element* out = seqlen.template rows<Element>(params.out, first, work.head);
  const int64 statistics = seqlen.batch * params.lse_batch_stride + work.head * params.lse_head_stride + first;
  compute_deltas<Config, kRows>(params, dout, out, statistics, Config::kBlockM, seqlen.seqlen_q - first_row,
                                [](int, float, float) {});
}

// dq in the element type from its sums.
template <typename Config>
__device__ __forceinline__ void fa2_backward_finish(const AttentionParams& params) {
  using Element = typename Config::Element;
  using Dq = DqTile<Config>;
  const WorkTile work = row_work_tile<Config>(params);
  if (work.m_block < 0) return;
  const SeqlenInfo seqlen(params, work.entry);
  const SharedTile<Element, Config::kBlockM, Config::kHeadDim> tile{shared_base()};
  static_assert(tile.kBytes == Config::kSharedBytes, "fa2_backward.py and this plan disagree");
  for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
    const Dq sums(params, seqlen, work.m_block, work.head, work.entry, chunk);
    for (int part = 0; part < Dq::kParts; ++part) {
      float dq[Dq::kM][Dq::kN][4];
      sums.load(part, dq);
      store_accumulator<Dq::kColumnWarps>(tile, Dq::first_row(), dq, chunk * Dq::kWidth + Dq::first_column(part));
    }
  }
  sync_threads();
  const int first_row = work.m_block * Config::kBlockM;
  store_tile<Config::kVector, Dq::kThreads>(tile, seqlen.template rows<Element>(params.dq, seqlen.first_q + first_row, work.head),
                                            params.dq.row_stride, min(Config::kBlockM, seqlen.seqlen_q - first_row),
                                            params.head_dim);
}

}  // namespace hfc
