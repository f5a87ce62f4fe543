// FlashAttention-2, backward pass (Dao 2023, Algorithm 2). One thread block owns kBlockN keys of one head of k and v of one
// batch entry: it keeps their gradients dk, dv in registers, walks over the row blocks of every query head that shares them,
// recomputes the probabilities from lse, and adds its part of dq to sums in device memory.
//
// Three divisions of work among the warps, one for each shape of product:
//   scores, dp (rows x keys)       kScoreWarps by rows, the others by keys; probabilities and ds go through shared memory
//   dk, dv     (keys x head_dim)   kKeyWarps by keys, the others by columns
//   dq         (rows x head_dim)   kRowWarps by rows, the others by columns
// Head sizes whose gradients outgrow the registers are divided into kChunks thread blocks by columns, each of which recomputes
// the scores.
#pragma once

#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "fa2/dq_accum.cuh"
#include "fa2/row_walk.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct BackwardTraits {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kScoreColumnWarps = Config::kNumWarps / Config::kScoreWarps;
  static constexpr int kScoreRows = Config::kBlockM / Config::kScoreWarps;        // of a warp
  static constexpr int kScoreKeys = Config::kBlockN / kScoreColumnWarps;          // of a warp
  static constexpr int kM = kScoreRows / 16;
  static constexpr int kN = kScoreKeys / 8;
  static constexpr int kColumnWarps = Config::kNumWarps / Config::kKeyWarps;
  static constexpr int kKeyM = Config::kBlockN / Config::kKeyWarps / 16;          // m-tiles of dk and dv
  static constexpr int kWidth = Config::kHeadDim / Config::kChunks;               // columns of dk
  static constexpr int kWidthV = Config::kHeadDimV / Config::kChunks;             // columns of dv
  static constexpr int kKeyN = kWidth / kColumnWarps / 8;                         // n-tiles of dk
  static constexpr int kKeyNV = kWidthV / kColumnWarps / 8;                       // n-tiles of dv
  static_assert(kM * 16 * Config::kScoreWarps == Config::kBlockM && kN * 8 * kScoreColumnWarps == Config::kBlockN);
  static_assert(kKeyM * 16 * Config::kKeyWarps == Config::kBlockN && kN % 2 == 0 && kKeyN % 2 == 0 && kKeyNV % 2 == 0);

  using TileQ = SharedTile<Element, Config::kBlockM, Config::kHeadDim>;
  using TileDout = SharedTile<Element, Config::kBlockM, Config::kHeadDimV>;
  using TileK = SharedTile<Element, Config::kBlockN, Config::kHeadDim>;
  using TileV = SharedTile<Element, Config::kBlockN, Config::kHeadDimV>;
  using TileDk = SharedTile<Element, Config::kBlockN, kWidth>;   // at the end, where k was
  using TileDv = SharedTile<Element, Config::kBlockN, kWidthV>;  // at the end, where v was
  using TileP = SharedTile<Element, Config::kBlockM, Config::kBlockN>;

  // Shared memory: k | v | q stages | dout stages | p | ds | lse and delta stages | seen keys
  static constexpr int kK = 0;
  static constexpr int kV = kK + TileK::kBytes + kSharedGap;
  static constexpr int kQ = kV + TileV::kBytes + kSharedGap;
  static constexpr int kDout = kQ + Config::kStages * TileQ::kBytes + kSharedGap;
  static constexpr int kP = kDout + Config::kStages * TileDout::kBytes + kSharedGap;
  static constexpr int kDs = kP + TileP::kBytes + kSharedGap;
  static constexpr int kStatistics = kDs + TileP::kBytes + kSharedGap;
  static constexpr int kStatisticsBytes = 2 * Config::kBlockM * int(sizeof(float));
  static constexpr int kSeen = kStatistics + Config::kStages * kStatisticsBytes + kSharedGap;
  static constexpr int kSharedBytes = kSeen + (kHasHoles<Config> ? Config::kNumWarps * 16 : 0);
  static_assert(kSharedBytes == Config::kSharedBytes, "fa2_backward.py and this plan disagree");

  SharedPtr base = shared_base();
  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileV v() const { return {base + kV}; }
  __device__ __forceinline__ TileDk dk() const { return {base + kK}; }
  __device__ __forceinline__ TileDv dv() const { return {base + kV}; }
  __device__ __forceinline__ TileQ q(int stage) const { return {base + (kQ + stage * TileQ::kBytes)}; }
  __device__ __forceinline__ TileDout dout(int stage) const { return {base + (kDout + stage * TileDout::kBytes)}; }
  __device__ __forceinline__ TileP p() const { return {base + kP}; }
  __device__ __forceinline__ TileP ds() const { return {base + kDs}; }
  __device__ __forceinline__ SharedPtr lse(int stage) const { return base + (kStatistics + stage * kStatisticsBytes); }
  __device__ __forceinline__ SharedPtr delta(int stage) const { return lse(stage) + Config::kBlockM * int(sizeof(float)); }
  __device__ __forceinline__ SharedPtr seen() const { return base + kSeen; }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kV, kQ, kDout, kP, kDs, kStatistics, kSeen}) mark_shared_gap(base + (end - kSharedGap));
  }
};

// Loads a row block of q and dout with lse and delta.
template <typename Config>
__device__ __forceinline__ void load_row_block(const BackwardTraits<Config>& shared, const AttentionParams& params,
                                               const SeqlenInfo& seqlen, RowStep step, int stage) {
  using Traits = BackwardTraits<Config>;
  using Element = typename Config::Element;
  const int first_row = step.m_block * Config::kBlockM;
  const RowRange rows{0, seqlen.seqlen_q - first_row};
  const int64 first = seqlen.first_q + first_row;
  load_tile<Config::kVector, Traits::kThreads>(shared.q(stage), seqlen.template rows<Element>(params.q, first, step.head),
                                               params.q.row_stride, rows, params.head_dim);
  load_tile<Config::kVector, Traits::kThreads>(shared.dout(stage), seqlen.template rows<Element>(params.dout, first, step.head),
                                               params.dout.row_stride, rows, params.head_dim_v);
  const int64 statistics = seqlen.batch * params.lse_batch_stride + step.head * params.lse_head_stride + first;
  for (int row = thread_id(); row < Config::kBlockM; row += Traits::kThreads) {
    copy_async_word(shared.lse(stage) + row * 4, params.lse + statistics + row, row < rows.end);
    copy_async_word(shared.delta(stage) + row * 4, params.delta + statistics + row, row < rows.end);
  }
}

template <int kRows>
__device__ __forceinline__ void load_statistics(float (&values)[kRows], SharedPtr rows, int first_row) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) values[i] = bits_float(load_shared(rows + (first_row + row_of(i / 2, i % 2 * 2)) * 4));
}

template <typename Config>
__device__ __forceinline__ void backward_tile(const AttentionParams& params, const SeqlenInfo& seqlen, int n_block, int head_k,
                                              int entry, int chunk) {
  using Traits = BackwardTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  const Traits shared;
  shared.mark_gaps();
  const int warp = warp_id();
  const int score_row = warp / Traits::kScoreColumnWarps * Traits::kScoreRows;
  const int score_key = warp % Traits::kScoreColumnWarps * Traits::kScoreKeys;
  const int grad_key = warp / Traits::kColumnWarps * Traits::kKeyM * 16;
  const int grad_column = warp % Traits::kColumnWarps * 16;
  const int first_key = n_block * Config::kBlockN;

  RowWalk<Config> walk(params, seqlen, first_key, head_k, entry);
  const KeyInterval keys = walk.keys();  // that some row sees; the others arrive as zeros, even if they hold NaN
  const RowRange key_range{keys.lo - first_key, keys.hi - first_key};
  load_tile<Config::kVector, Traits::kThreads>(
      shared.k(), seqlen.template rows<Element>(params.k, seqlen.first_k, head_k) + first_key * params.k.row_stride,
      params.k.row_stride, key_range, params.head_dim);
  load_tile<Config::kVector, Traits::kThreads>(
      shared.v(), seqlen.template rows<Element>(params.v, seqlen.first_k, head_k) + first_key * params.v.row_stride,
      params.v.row_stride, key_range, params.head_dim_v);
  RowStep step = walk.next();
  if (step.exists()) load_row_block<Config>(shared, params, seqlen, step, 0);
  copy_async_commit();

  float dk[Traits::kKeyM][Traits::kKeyN][4], dv[Traits::kKeyM][Traits::kKeyNV][4];
  clear(dk);
  clear(dv);
  for (int stage = 0; step.exists(); stage = (stage + 1) % Config::kStages) {
    copy_async_wait<0>();
    sync_threads();  // the row block has come, and every warp has left the one before
    const RowStep next = walk.next();
    if (Config::kStages > 1) {
      if (next.exists()) load_row_block<Config>(shared, params, seqlen, next, (stage + 1) % Config::kStages);
      copy_async_commit();
    }

    const int first_row = step.m_block * Config::kBlockM + score_row;
    float p[kM][kN][4];
    gemm_transposed<Multiply>(p, shared.q(stage), score_row, shared.k(), score_key);
    ScoreGradient<Config, kM, kN> gradient(params, seqlen, {first_row, first_key + score_key, step.head, entry});
    const float scale = gradient.modify(p);
    uint32 visible[2 * kM];
    if (walk.look(visible, step, first_row, first_key + score_key) != Visibility::kAll) hide(p, visible);
    if constexpr (kHasHoles<Config>) walk.share_seen(shared.seen(), warp, seen_columns(p));
    float statistics[2 * kM];  // of this lane's rows: lse, then delta
    load_statistics(statistics, shared.lse(stage), score_row);
    probabilities_from<Config, false>(p, statistics, scale, params, [&] {
      const int64 first_of_head =
          seqlen.batch * in_place(params.lse_batch_stride) + step.head * in_place(params.lse_head_stride) + seqlen.first_q;
      return StatisticRows{first_of_head + first_row, seqlen.seqlen_q - first_row};
    });

    float ds[kM][kN][4];
    gemm_transposed<Multiply>(ds, shared.dout(stage), score_row, shared.v(), score_key);
    load_statistics(statistics, shared.delta(stage), score_row);
    gradient.finish(ds, p, statistics, params.softmax_scale);
    store_accumulator(shared.p(), score_row, p, score_key);
    store_accumulator(shared.ds(), score_row, ds, score_key);
    sync_threads();  // p and ds are whole

    gemm_shared<Multiply, Traits::kColumnWarps>(
        dv, shared.dout(stage), chunk * Traits::kWidthV + grad_column,
        [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared.p(), k, grad_key, 16 * i); }, [](int, uint32(&)[2]) {});
    if constexpr (Config::kAccumulateDq) {
      const DqTile<Config> dq_tile(params, seqlen, step.m_block, step.head, entry, chunk);
      float dq[DqTile<Config>::kM][DqTile<Config>::kN][4];
      clear(dq);
      const uint32 seen = kHasHoles<Config> ? walk.seen(shared.seen()) : 0;
      gemm_shared<Multiply, DqTile<Config>::kColumnWarps>(
          dq, shared.k(), chunk * Traits::kWidth + dq_tile.first_column(),
          [&](uint32(&a)[4], int i, int k) { load_factor_rows(a, shared.ds(), dq_tile.first_row(), 16 * i, k); },
          [&](int k, uint32(&words)[2]) {
            if constexpr (kHasHoles<Config>) keep_columns<Element>(seen, k, words);
          });
      dq_tile.add(dq);
    }
    gemm_shared<Multiply, Traits::kColumnWarps>(
        dk, shared.q(stage), chunk * Traits::kWidth + grad_column,
        [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared.ds(), k, grad_key, 16 * i); }, [](int, uint32(&)[2]) {});

    if (Config::kStages == 1 && next.exists()) {
      sync_threads();
      load_row_block<Config>(shared, params, seqlen, next, 0);
      copy_async_commit();
    }
    step = next;
  }

  copy_async_wait<0>();
  sync_threads();  // every warp has left k and v, where dk and dv go
  if constexpr (Config::kDropout) for_each_score(dv, [&](float x) { return x * params.dropout_scale; });
  store_accumulator<Traits::kColumnWarps>(shared.dk(), grad_key, dk, grad_column);
  store_accumulator<Traits::kColumnWarps>(shared.dv(), grad_key, dv, grad_column);
  sync_threads();
  const int num_keys = min(Config::kBlockN, seqlen.seqlen_k - first_key);
  const int64 first = seqlen.first_k + first_key;
  store_tile<Config::kVector, Traits::kThreads>(shared.dk(),
                                                seqlen.template rows<Element>(params.dk, first, head_k) + chunk * Traits::kWidth,
                                                params.dk.row_stride, num_keys, params.head_dim - chunk * Traits::kWidth);
  store_tile<Config::kVector, Traits::kThreads>(shared.dv(),
                                                seqlen.template rows<Element>(params.dv, first, head_k) + chunk * Traits::kWidthV,
                                                params.dv.row_stride, num_keys, params.head_dim_v - chunk * Traits::kWidthV);
}

template <typename Config>
__device__ __forceinline__ void fa2_backward(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return;
  const int64 tile = block_id() / Config::kChunks;
  const int chunk = int(block_id() % Config::kChunks);
  WorkTile work;
  if constexpr (Config::kVarlen)
    work = packed_key_work_tile<Config::kBlockN>(params, tile);
  else
    work = key_work_tile(params, tile);
  if (work.m_block < 0) return;
  backward_tile<Config>(params, SeqlenInfo(params, work.entry), work.m_block, work.head, work.entry, chunk);
}

}  // namespace hfc
