// dq alone, the same bits in every run: where the main kernel adds to sums in whatever order thread blocks come, here one
// thread block owns kBlockM rows and walks over the keys, each warp its own rows, as in the forward pass. Two of the five
// products are computed a second time; no sums in device memory are needed. kChunks as in the main kernel.
#pragma once

#include "attn/gradient.cuh"
#include "attn/row_mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct DqTraits {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kWarpRows = Config::kBlockM / Config::kNumWarps;
  static constexpr int kM = kWarpRows / 16;
  static constexpr int kN = Config::kBlockN / 8;
  static constexpr int kWidth = Config::kHeadDim / Config::kChunks;  // columns of dq
  static constexpr int kND = kWidth / 8;                             // n-tiles of dq
  static_assert(kM * 16 * Config::kNumWarps == Config::kBlockM && kN % 2 == 0 && kND % 2 == 0);

  using TileQ = SharedTile<Element, Config::kBlockM, Config::kHeadDim>;
  using TileDq = SharedTile<Element, Config::kBlockM, kWidth>;  // at the end, where q was
  using TileDout = SharedTile<Element, Config::kBlockM, Config::kHeadDimV>;
  using TileK = SharedTile<Element, Config::kBlockN, Config::kHeadDim>;
  using TileV = SharedTile<Element, Config::kBlockN, Config::kHeadDimV>;

  // Shared memory: q | dout | k stages | v stages | row intervals
  static constexpr int kQ = 0;
  static constexpr int kDout = kQ + TileQ::kBytes + kSharedGap;
  static constexpr int kK = kDout + TileDout::kBytes + kSharedGap;
  static constexpr int kV = kK + Config::kStages * TileK::kBytes + kSharedGap;
  static constexpr int kIntervals = kV + Config::kStages * TileV::kBytes + kSharedGap;
  static constexpr int kSharedBytes = kIntervals + RowMask<Config>::kSharedBytes;
  static_assert(kSharedBytes == Config::kSharedBytes, "fa2_backward.py and this plan disagree");

  SharedPtr base = shared_base();
  __device__ __forceinline__ TileQ q() const { return {base + kQ}; }
  __device__ __forceinline__ TileDq dq() const { return {base + kQ}; }
  __device__ __forceinline__ TileDout dout() const { return {base + kDout}; }
  __device__ __forceinline__ TileK k(int block) const { return {base + (kK + block % Config::kStages * TileK::kBytes)}; }
  __device__ __forceinline__ TileV v(int block) const { return {base + (kV + block % Config::kStages * TileV::kBytes)}; }
  __device__ __forceinline__ SharedPtr intervals() const { return base + kIntervals; }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kDout, kK, kV, kIntervals}) mark_shared_gap(base + (end - kSharedGap));
  }
};

template <typename Config>
__device__ __forceinline__ void dq_tile(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head,
                                        int entry, int chunk) {
  using Traits = DqTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  const Traits shared;
  shared.mark_gaps();
  const int head_k = head / (params.num_heads / params.num_heads_k);
  const Element* k_rows = seqlen.template rows<Element>(params.k, seqlen.first_k, head_k);  // (seqlen_k, head_dim)
  const Element* v_rows = seqlen.template rows<Element>(params.v, seqlen.first_k, head_k);  // (seqlen_k, head_dim_v)
  const int num_rows = min(Config::kBlockM, seqlen.seqlen_q - first_row);
  const int64 first = seqlen.first_q + first_row;
  load_tile<Config::kVector, Traits::kThreads>(shared.q(), seqlen.template rows<Element>(params.q, first, head),
                                               params.q.row_stride, RowRange{0, num_rows}, params.head_dim);
  load_tile<Config::kVector, Traits::kThreads>(shared.dout(), seqlen.template rows<Element>(params.dout, first, head),
                                               params.dout.row_stride, RowRange{0, num_rows}, params.head_dim_v);
  const RowMask<Config> mask(params, seqlen, first_row, head, entry, shared.intervals());
  const KeyInterval keys = mask.block_keys();
  const int first_block = keys.lo / Config::kBlockN, last_block = ceil_div(keys.hi, Config::kBlockN) - 1;
  auto load = [&](int n) {
    const int first_key = n * Config::kBlockN;
    const RowRange range{keys.lo - first_key, keys.hi - first_key};  // hidden keys arrive as zeros, even if they hold NaN
    load_tile<Config::kVector, Traits::kThreads>(shared.k(n), k_rows + first_key * params.k.row_stride, params.k.row_stride,
                                                 range, params.head_dim);
    load_tile<Config::kVector, Traits::kThreads>(shared.v(n), v_rows + first_key * params.v.row_stride, params.v.row_stride,
                                                 range, params.head_dim_v);
  };
  if (first_block <= last_block) load(last_block);
  copy_async_commit();

  const int warp_row = warp_id() * Traits::kWarpRows;
  const int64 statistics = seqlen.batch * params.lse_batch_stride + head * params.lse_head_stride + first + warp_row;
  float lse[2 * kM], delta[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int row = row_of(i / 2, i % 2 * 2);
    const bool exists = warp_row + row < num_rows;
    lse[i] = exists ? params.lse[statistics + row] : 0.0f;
    delta[i] = exists ? params.delta[statistics + row] : 0.0f;
  }
  float dq[kM][Traits::kND][4];
  clear(dq);
  for (int n = last_block; n >= first_block; --n) {
    copy_async_wait<0>();
    sync_threads();  // block n has come, and every warp has left block n + 1
    if (Config::kStages > 1 && n > first_block) load(n - 1);
    copy_async_commit();

    const int first_key = n * Config::kBlockN;
    uint32 visible[2 * kM];
    Visibility visibility = mask.visibility(first_key);
    if (visibility == Visibility::kSome && !warp_any(mask.look(visible, first_key))) visibility = Visibility::kNone;
    if (visibility != Visibility::kNone) {
      float p[kM][kN][4], ds[kM][kN][4];
      gemm_transposed<Multiply>(p, shared.q(), warp_row, shared.k(n));
      ScoreGradient<Config, kM, kN> gradient(params, seqlen, {first_row + warp_row, first_key, head, entry});
      const float scale = gradient.modify(p);
      if (visibility == Visibility::kSome) hide(p, visible);
      const uint32 seen = kHasHoles<Config> ? seen_columns(p) : 0;
      probabilities_from<Config, false>(p, lse, scale, params, [&] { return StatisticRows{statistics, num_rows - warp_row}; });
      gemm_transposed<Multiply>(ds, shared.dout(), warp_row, shared.v(n));
      gradient.finish(ds, p, delta, params.softmax_scale);
      gemm_accumulator<Multiply>(
          dq, ds, shared.k(n),
          [&](int k, uint32(&words)[2]) {
            if constexpr (kHasHoles<Config>) keep_columns<Element>(seen, k, words);
          },
          chunk * Traits::kWidth);
    }
    if (Config::kStages == 1 && n > first_block) {
      sync_threads();
      load(n - 1);
      copy_async_commit();
    }
  }

  copy_async_wait<0>();
  sync_threads();  // every warp has left q
  store_accumulator(shared.dq(), warp_row, dq);
  sync_threads();
  store_tile<Config::kVector, Traits::kThreads>(shared.dq(),
                                                seqlen.template rows<Element>(params.dq, first, head) + chunk * Traits::kWidth,
                                                params.dq.row_stride, num_rows, params.head_dim - chunk * Traits::kWidth);
}

template <typename Config>
__device__ __forceinline__ void fa2_backward_dq(const AttentionParams& params) {
  const WorkTile work = row_work_tile<Config>(params);
  if (work.m_block < 0) return;
  dq_tile<Config>(params, SeqlenInfo(params, work.entry), work.m_block * Config::kBlockM, work.head, work.entry,
                  int(block_id() % Config::kChunks));
}

}  // namespace hfc
