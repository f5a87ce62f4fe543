// The end of a tile (Algorithm 1, lines 12-15): a warp's 16 rows, normalised, by way of the queries' place to device memory.
#pragma once

#include "fa2/forward_sm90_softmax.cuh"
#include "fa2/forward_sm90_tiles.cuh"
#include "warpgroup.cuh"
#include "tile/fragment.cuh"

namespace hfc {

template <typename Softmax>
__device__ __forceinline__ void store_statistics(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head,
                                                 const Softmax& softmax) {
  if (params.lse == nullptr || lane_id() % 4 != 0) return;
  const int64 first = seqlen.batch * params.lse_batch_stride + head * params.lse_head_stride + seqlen.first_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + row_of(0, 2 * half);
    if (row >= seqlen.seqlen_q) continue;
    params.lse[first + row] = softmax.lse(half);
    if (params.row_max == nullptr) continue;
    params.row_max[first + row] = softmax.reference[half];  // for the backward pass, as in fa2/forward.cuh
    params.row_sum[first + row] = softmax.sum[half];
  }
}

// `rows`: where the warp's queries were. The copy engine may still read it afterwards, see tma_store_wait_read().
template <typename Config, typename Softmax>
__device__ __forceinline__ void store_rows(const ForwardSm90Params& params, const RowTile<Config>& tile, int warpgroup,
                                           int warp_row, float (&out)[1][Config::kHeadDimV / 8][4], Softmax& softmax,
                                           SharedPtr rows) {
  using Element = typename Config::Element;
  using Traits = ForwardSm90Traits<Config>;
  constexpr int kPanelBytes = Traits::TileQ::kPanelBytes;
  const AttentionParams& attention = params.attention;
  const SeqlenInfo seqlen = tile.seqlen(attention);
  const int first_row = tile.first_row(params, warpgroup) + warp_row, head = tile.query_head(params, warpgroup);
  const bool has_sink = attention.sinks != nullptr && (!Config::kVarlen || tile.entry < attention.batch);
  float factors[2];
  softmax.finish(factors, has_sink ? attention.sinks + head : nullptr);
  store_statistics(attention, seqlen, first_row, head, softmax);
  Softmax::scale_rows(out, factors);
  stage_rows<Element, kPanelBytes>(rows, out[0]);
  fence_async_proxy();
  sync_warp();
  if (Config::kVarlen && first_row + 16 > seqlen.seqlen_q) {
    copy_rows<Element, kPanelBytes, Config::kHeadDimV>(
        rows, seqlen.template rows<Element>(attention.out, seqlen.first_q + first_row, head), attention.out.row_stride,
        max(seqlen.seqlen_q - first_row, 0), attention.head_dim_v);
    sync_warp();
    return;
  }
  if (lane_id() == 0) {
#pragma unroll
    for (int panel = 0; panel < Traits::TileV::kPanels; ++panel)
      tma_store(params.out, rows + panel * kPanelBytes, panel * kPanelColumns, int(seqlen.first_q) + first_row, head,
                seqlen.batch);
    tma_store_commit();
  }
}

}  // namespace hfc
