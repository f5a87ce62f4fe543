// The gradient of an additive bias: the gradient of the scores, summed over every dimension that the bias broadcasts along.
// One thread block owns a tile of the bias and walks over all tiles of scores that share it, in a fixed order: sums stay in
// registers, the same bits in every run, nothing larger than the bias itself is stored.
#pragma once

#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct BiasTraits {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kM = Config::kBlockM / Config::kNumWarps / 16;
  static constexpr int kN = Config::kBlockN / 8;
  static_assert(kM * 16 * Config::kNumWarps == Config::kBlockM && kN % 2 == 0);

  using TileQ = SharedTile<Element, Config::kBlockM, Config::kHeadDim>;
  using TileDout = SharedTile<Element, Config::kBlockM, Config::kHeadDimV>;
  using TileK = SharedTile<Element, Config::kBlockN, Config::kHeadDim>;
  using TileV = SharedTile<Element, Config::kBlockN, Config::kHeadDimV>;
  using TileSums = SharedTile<float, Config::kBlockM, Config::kBlockN>;

  // Shared memory: q | dout | k | v | sums
  static constexpr int kQ = 0;
  static constexpr int kDout = kQ + TileQ::kBytes + kSharedGap;
  static constexpr int kK = kDout + TileDout::kBytes + kSharedGap;
  static constexpr int kV = kK + TileK::kBytes + kSharedGap;
  static constexpr int kSums = kV + TileV::kBytes + kSharedGap;
  static constexpr int kSharedBytes = kSums + TileSums::kBytes;
  static_assert(kSharedBytes == Config::kSharedBytes, "fa2_backward.py and this plan disagree");

  SharedPtr base = shared_base();
  __device__ __forceinline__ TileQ q() const { return {base + kQ}; }
  __device__ __forceinline__ TileDout dout() const { return {base + kDout}; }
  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileV v() const { return {base + kV}; }
  __device__ __forceinline__ TileSums sums() const { return {base + kSums}; }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kDout, kK, kV, kSums}) mark_shared_gap(base + (end - kSharedGap));
  }
};

// Along one dimension: the indices that share element `index` of the bias are [first, last].
struct BroadcastRange {
  int first;
  int last;

  __device__ __forceinline__ BroadcastRange(int bias_size, int index, int size)
      : first(bias_size == 1 ? 0 : index), last(bias_size == 1 ? size - 1 : index) {}
};

// Adds the gradient of one tile of scores to the warp's sums.
template <typename Config>
__device__ __forceinline__ void add_score_tile(float (&sums)[BiasTraits<Config>::kM][BiasTraits<Config>::kN][4],
                                               const AttentionParams& params, const SeqlenInfo& seqlen, ScoreTile tile) {
  using Traits = BiasTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  const Traits shared;
  const int end_row = min(tile.first_row + Config::kBlockM, seqlen.seqlen_q);
  if (tile.first_key >= window_interval(params, seqlen, end_row - 1).hi ||
      tile.first_key + Config::kBlockN <= window_interval(params, seqlen, tile.first_row).lo)
    return;  // no row sees any of these keys

  const int head_k = tile.head / (params.num_heads / params.num_heads_k);
  auto load = [&](auto shared_tile, const TensorRef& tensor, int head, int first, int end, int columns) {
    load_tile<Config::kVector, Traits::kThreads>(shared_tile, seqlen.template rows<Element>(tensor, first, head),
                                                 tensor.row_stride, RowRange{0, end - first}, columns);
  };
  sync_threads();  // every warp has left the tiles before
  load(shared.q(), params.q, tile.head, tile.first_row, seqlen.seqlen_q, params.head_dim);
  load(shared.dout(), params.dout, tile.head, tile.first_row, seqlen.seqlen_q, params.head_dim_v);
  load(shared.k(), params.k, head_k, tile.first_key, seqlen.seqlen_k, params.head_dim);
  load(shared.v(), params.v, head_k, tile.first_key, seqlen.seqlen_k, params.head_dim_v);
  copy_async_commit();
  copy_async_wait<0>();
  sync_threads();

  const int warp_row = warp_id() * kM * 16;
  tile.first_row += warp_row;
  float p[kM][kN][4], ds[kM][kN][4];
  gemm_transposed<Multiply>(p, shared.q(), warp_row, shared.k());
  ScoreGradient<Config, kM, kN> gradient(params, seqlen, tile);
  const float scale = gradient.modify(p);
  uint32 visible[2 * kM];
  visible_bits<Config, kM, kN>(visible, params, seqlen, tile.entry, tile.head, tile.first_row, tile.first_key);
  hide(p, visible);
  float lse[2 * kM], delta[2 * kM];
  const int64 statistics = tile.entry * params.lse_batch_stride + tile.head * params.lse_head_stride;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int row = tile.first_row + row_of(i / 2, i % 2 * 2);
    lse[i] = row < seqlen.seqlen_q ? params.lse[statistics + row] : 0.0f;
    delta[i] = row < seqlen.seqlen_q ? params.delta[statistics + row] : 0.0f;
  }
  probabilities_from<Config, false>(p, lse, scale, params,
                                    [&] { return StatisticRows{statistics + tile.first_row, seqlen.seqlen_q - tile.first_row}; });
  gemm_transposed<Multiply>(ds, shared.dout(), warp_row, shared.v());
  gradient.template finish<false>(ds, p, delta, 1.0f);
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] += ds[i][j][e];
}

// Writes the tile of sums to dbias, whose rows or columns may be one that all share.
template <typename Config>
__device__ __forceinline__ void store_bias_tile(const AttentionParams& params, float* dbias, int first_row, int first_key) {
  using Traits = BiasTraits<Config>;
  const Traits shared;
  const int rows = params.bias_rows == 1 ? 1 : min(Config::kBlockM, params.bias_rows - first_row);
  const int cols = params.bias_cols == 1 ? 1 : min(Config::kBlockN, params.bias_cols - first_key);
  for (int index = thread_id(); index < rows * cols; index += Traits::kThreads) {
    const int row = index / cols, col = index % cols;
    float sum = 0.0f;
    for (int i = row; i < (params.bias_rows == 1 ? Config::kBlockM : row + 1); ++i)
      for (int j = col; j < (params.bias_cols == 1 ? Config::kBlockN : col + 1); ++j)
        sum += bits_float(load_shared(shared.sums().element(i, j)));
    dbias[int64(first_row + row) * params.bias_cols + first_key + col] = sum;
  }
}

template <typename Config>
__device__ __forceinline__ void fa2_backward_bias(const AttentionParams& params) {
  using Traits = BiasTraits<Config>;
  if (block_id() >= params.num_tiles) return;
  const Traits shared;
  shared.mark_gaps();
  const int m_blocks = ceil_div(params.seqlen_q, Config::kBlockM), n_blocks = ceil_div(params.seqlen_k, Config::kBlockN);
  const DivMod columns = divmod(block_id(), params.bias_cols == 1 ? 1 : n_blocks);
  const DivMod rows = divmod(columns.quotient, params.bias_rows == 1 ? 1 : m_blocks);
  const DivMod heads = divmod(rows.quotient, params.bias_heads);  // quotient: of bias_batch
  const BroadcastRange entry_range(params.bias_batch, int(heads.quotient), params.batch);
  const BroadcastRange head_range(params.bias_heads, int(heads.remainder), params.num_heads);
  const BroadcastRange m_range(params.bias_rows, int(rows.remainder), m_blocks);
  const BroadcastRange n_range(params.bias_cols, int(columns.remainder), n_blocks);

  float sums[Traits::kM][Traits::kN][4];
  clear(sums);
  for (int entry = entry_range.first; entry <= entry_range.last; ++entry) {
    const SeqlenInfo seqlen(params, entry);
    for (int head = head_range.first; head <= head_range.last; ++head)
      for (int m = m_range.first; m <= m_range.last; ++m)
        for (int n = n_range.first; n <= n_range.last; ++n)
          add_score_tile<Config>(sums, params, seqlen, {m * Config::kBlockM, n * Config::kBlockN, head, entry});
  }
  store_accumulator(shared.sums(), warp_id() * Traits::kM * 16, sums);
  sync_threads();
  const int64 plane = int64(params.bias_rows) * params.bias_cols;
  store_bias_tile<Config>(params, params.dbias + (heads.quotient * params.bias_heads + heads.remainder) * plane,
                          params.bias_rows == 1 ? 0 : m_range.first * Config::kBlockM,
                          params.bias_cols == 1 ? 0 : n_range.first * Config::kBlockN);
}

}  // namespace hfc
