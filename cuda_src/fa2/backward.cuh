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

// Where a row block lies, and its part of shared memory.
template <typename Config>
struct RowBlockLoader {
  using Traits = BackwardTraits<Config>;
  using Element = typename Config::Element;

  const Traits& shared;
  const AttentionParams& params;
  const SeqlenInfo& seqlen;

  __device__ __forceinline__ void q_and_lse(RowStep step, int stage) const {
    load_rows(shared.q(stage), params.q, step, params.head_dim);
    load_statistics(shared.lse(stage), params.lse, step);
  }
  __device__ __forceinline__ void dout_and_delta(RowStep step, int stage) const {
    load_rows(shared.dout(stage), params.dout, step, params.head_dim_v);
    load_statistics(shared.delta(stage), params.delta, step);
  }

 private:
  __device__ __forceinline__ int64 first(RowStep step) const { return seqlen.first_q + step.m_block * Config::kBlockM; }
  __device__ __forceinline__ int count(RowStep step) const { return seqlen.seqlen_q - step.m_block * Config::kBlockM; }

  template <typename Tile, typename Rows>
  __device__ __forceinline__ void load_rows(Tile tile, const Rows& rows, RowStep step, int columns) const {
    load_tile<Config::kVector, Traits::kThreads>(tile, seqlen.template rows<Element>(rows, first(step), step.head),
                                                 rows.row_stride, RowRange{0, count(step)}, columns);
  }
  __device__ __forceinline__ void load_statistics(SharedPtr target, const float* source, RowStep step) const {
    source += seqlen.batch * params.lse_batch_stride + step.head * params.lse_head_stride + first(step);
    for (int row = thread_id(); row < Config::kBlockM; row += Traits::kThreads)
      copy_async_word(target + row * 4, source + row, row < count(step));
  }
};

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
  constexpr bool kOneStage = Config::kStages == 1;
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
  const RowBlockLoader<Config> load{shared, params, seqlen};
  if (step.exists()) load.q_and_lse(step, 0);
  copy_async_commit();
  if (step.exists()) load.dout_and_delta(step, 0);
  copy_async_commit();

  float dk[Traits::kKeyM][Traits::kKeyN][4], dv[Traits::kKeyM][Traits::kKeyNV][4];
  clear(dk);
  clear(dv);
  for (int stage = 0; step.exists(); stage = (stage + 1) % Config::kStages) {
    copy_async_wait<kOneStage ? 1 : 0>();
    sync_threads();  // the row block has come (of one stage: its q), and every warp has left the one before
    const RowStep next = walk.next();
    if constexpr (!kOneStage) {
      if (next.exists()) {
        load.q_and_lse(next, (stage + 1) % Config::kStages);
        load.dout_and_delta(next, (stage + 1) % Config::kStages);
      }
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

    if constexpr (kOneStage) {
      copy_async_wait<0>();
      sync_threads();  // its dout, too
    }
    float ds[kM][kN][4];
    gemm_transposed<Multiply>(ds, shared.dout(stage), score_row, shared.v(), score_key);
    load_statistics(statistics, shared.delta(stage), score_row);
    gradient.finish(ds, p, statistics, params.softmax_scale);
    store_accumulator(shared.p(), score_row, p, score_key);
    store_accumulator(shared.ds(), score_row, ds, score_key);
    sync_threads();  // p and ds are whole

    auto multiply_dv = [&] {
      gemm_shared<Multiply, Traits::kColumnWarps>(
          dv, shared.dout(stage), chunk * Traits::kWidthV + grad_column,
          [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared.p(), k, grad_key, 16 * i); },
          [](int, uint32(&)[2]) {});
    };
    auto multiply_dk = [&] {
      gemm_shared<Multiply, Traits::kColumnWarps>(
          dk, shared.q(stage), chunk * Traits::kWidth + grad_column,
          [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared.ds(), k, grad_key, 16 * i); },
          [](int, uint32(&)[2]) {});
    };
    auto add_dq = [&] {
      if constexpr (!Config::kAccumulateDq) return;
      using Dq = DqTile<Config>;
      const Dq sums(params, seqlen, step.m_block, step.head, entry, chunk);
      const uint32 seen = kHasHoles<Config> ? walk.seen(shared.seen()) : 0;
#pragma unroll
      for (int part = 0; part < Dq::kParts; ++part) {
        float dq[Dq::kM][Dq::kN][4];
        clear(dq);
        gemm_shared<Multiply, Dq::kColumnWarps>(
            dq, shared.k(), chunk * Traits::kWidth + sums.first_column(part),
            [&](uint32(&a)[4], int i, int k) { load_factor_rows(a, shared.ds(), sums.first_row(), 16 * i, k); },
            [&](int k, uint32(&words)[2]) {
              if constexpr (kHasHoles<Config>) keep_columns<Element>(seen, k, words);
            });
        sums.add(part, dq);
      }
    };
    if constexpr (kOneStage) {  // the next rows come while what no longer needs their places is multiplied
      multiply_dk();
      sync_threads();  // every warp has left q
      if (next.exists()) load.q_and_lse(next, 0);
      copy_async_commit();
      multiply_dv();
      sync_threads();  // every warp has left dout
      if (next.exists()) load.dout_and_delta(next, 0);
      copy_async_commit();
      add_dq();
    } else {
      multiply_dv();
      add_dq();
      multiply_dk();
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
