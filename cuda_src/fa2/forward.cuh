// FlashAttention-2, forward pass (Dao 2023, Algorithm 1). One thread block owns kBlockM rows of one head of one batch entry,
// each warp its own kBlockM / kNumWarps rows ("split-Q": warps never exchange results), and walks over blocks of keys.
#pragma once

#include "attn/dropout.cuh"
#include "attn/online_softmax.cuh"
#include "attn/row_mask.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct ForwardTraits {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kWarpRows = Config::kBlockM / Config::kNumWarps;
  static constexpr int kUnroll = Config::kIntervals ? 16 : kCopyUnroll;  // there the registers of short loops are missed
  static constexpr int kM = kWarpRows / 16;           // m-tiles of a warp
  static constexpr int kN = Config::kBlockN / 8;      // n-tiles of a block of keys
  static constexpr int kNV = Config::kHeadDimV / 8;   // n-tiles of the output
  static_assert(kM * 16 * Config::kNumWarps == Config::kBlockM && kN % 2 == 0 && kN <= 16 && kNV % 2 == 0);

  using TileQ = SharedTile<Element, Config::kBlockM, Config::kHeadDim>;
  using TileK = SharedTile<Element, Config::kBlockN, Config::kHeadDim>;
  using TileV = SharedTile<Element, Config::kBlockN, Config::kHeadDimV>;
  using TileOut = SharedTile<Element, Config::kBlockM, Config::kHeadDimV>;

  // Shared memory: q (later out) | k stages | v stages | row intervals
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + max(TileQ::kBytes, TileOut::kBytes) + kSharedGap;
  static constexpr int kV = kK + Config::kStages * TileK::kBytes + kSharedGap;
  static constexpr int kIntervals = kV + Config::kStages * TileV::kBytes + kSharedGap;
  static constexpr int kSharedBytes = kIntervals + RowMask<Config>::kSharedBytes;
  static_assert(kSharedBytes == Config::kSharedBytes, "tiles.py and this plan disagree");

  SharedPtr base = shared_base();
  __device__ __forceinline__ TileQ q() const { return {base + kQ}; }
  __device__ __forceinline__ TileOut out() const { return {base + kQ}; }
  __device__ __forceinline__ TileK k(int block) const { return {base + (kK + block % Config::kStages * TileK::kBytes)}; }
  __device__ __forceinline__ TileV v(int block) const { return {base + (kV + block % Config::kStages * TileV::kBytes)}; }
  __device__ __forceinline__ SharedPtr intervals() const { return base + kIntervals; }
  __device__ __forceinline__ void mark_gaps() const {
    mark_shared_gap(base + (kK - kSharedGap));
    mark_shared_gap(base + (kV - kSharedGap));
    mark_shared_gap(base + (kIntervals - kSharedGap));
  }
};

// Loads the part of a block of keys (or values) that some row of the thread block sees; the rest becomes zeros, so that
// hidden keys cannot reach the result even when they hold NaN.
template <typename Config, typename Tile>
__device__ __forceinline__ void load_block(Tile tile, const typename Tile::Element* rows, int64 row_stride, KeyInterval keys,
                                           int block, int columns) {
  const int first_key = block * Tile::kRows;
  load_tile<Config::kVector, ForwardTraits<Config>::kThreads, ForwardTraits<Config>::kUnroll>(
      tile, rows + first_key * row_stride, row_stride, RowRange{keys.lo - first_key, keys.hi - first_key}, columns);
}

template <typename Config>
__device__ __forceinline__ void forward_tile(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head,
                                             int entry, int first_column) {
  using Traits = ForwardTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  constexpr int kM = Traits::kM, kN = Traits::kN, kNV = Traits::kNV;
  const Traits shared;
  shared.mark_gaps();

  const int head_k = head / (params.num_heads / params.num_heads_k);
  const Element* k_rows = seqlen.template rows<Element>(params.k, seqlen.first_k, head_k);  // (seqlen_k, head_dim)
  const Element* v_rows = seqlen.template rows<Element>(params.v, seqlen.first_k, head_k) + first_column;  // (seqlen_k, …)
  const int num_columns = Config::kVChunks == 1 ? params.head_dim_v : min(Config::kHeadDimV, params.head_dim_v - first_column);
  const int num_rows = min(Config::kBlockM, seqlen.seqlen_q - first_row);

  load_tile<Config::kVector, Traits::kThreads, Traits::kUnroll>(
      shared.q(), seqlen.template rows<Element>(params.q, seqlen.first_q + first_row, head), params.q.row_stride,
      RowRange{0, num_rows}, params.head_dim);
  const RowMask<Config> mask(params, seqlen, first_row, head, entry, shared.intervals());
  const KeyInterval keys = mask.block_keys();
  const int first_block = keys.lo / Config::kBlockN, last_block = ceil_div(keys.hi, Config::kBlockN) - 1;

  auto load_k = [&](int n) { load_block<Config>(shared.k(n), k_rows, params.k.row_stride, keys, n, params.head_dim); };
  auto load_v = [&](int n) { load_block<Config>(shared.v(n), v_rows, params.v.row_stride, keys, n, num_columns); };
  if (first_block <= last_block) load_k(last_block);
  if (Config::kStages > 1 && first_block <= last_block) load_v(last_block);
  copy_async_commit();

  float out[kM][kNV][4];  // this warp's rows of the output, not yet normalised
  clear(out);
  OnlineSoftmax<Element, 2 * kM> softmax;
  const int warp_row = warp_id() * Traits::kWarpRows;
  // From the right: the blocks that a causal mask cuts come first, and the last block is a whole one.
  for (int n = last_block; n >= first_block; --n) {
    copy_async_wait<0>();
    sync_threads();  // block n has come, and every warp has left block n + 1
    if constexpr (Config::kStages == 1) {
      load_v(n);
    } else if (n > first_block) {
      load_k(n - 1);
      load_v(n - 1);
    }
    copy_async_commit();

    uint32 visible[2 * kM];  // bits of the keys each row sees
    Visibility visibility = mask.visibility(n * Config::kBlockN);
    if (RowMask<Config>::kHoles && visibility == Visibility::kSome && !warp_any(mask.look(visible, n * Config::kBlockN)))
      visibility = Visibility::kNone;
    float scores[kM][kN][4];
    if (visibility != Visibility::kNone) gemm_transposed<Multiply>(scores, shared.q(), warp_row, shared.k(n));

    if constexpr (Config::kStages == 1) {
      copy_async_wait<0>();
      sync_threads();  // v has come, and every warp has left k
      if (n > first_block) load_k(n - 1);
      copy_async_commit();
    }
    if (visibility == Visibility::kNone) continue;

    const ScoreTile tile{first_row + warp_row, n * Config::kBlockN, head, entry};
    const float scale = modify_scores<Config>(scores, params, seqlen, tile);
    if (visibility == Visibility::kSome) {
      if (!RowMask<Config>::kHoles) mask.look(visible, n * Config::kBlockN);  // only now: the registers were the product's
      hide(scores, visible);
    }
    uint32 columns = ~0u;  // keys that some row of the warp sees
    if constexpr (Config::kBias) columns = seen_columns(scores);
    softmax.update(scores, out, scale);
    if (!Config::kBias && RowMask<Config>::kHoles && visibility == Visibility::kSome) {
      columns = 0;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) columns |= visible[i];
      columns = column_or(columns);
    }
    if constexpr (Config::kDropout) {  // the sum has every probability
      uint32 kept[2 * kM];
      kept_bits<Config, kM, kN>(kept, params, seqlen, tile);
      replace_unset(scores, kept, 0.0f);
    }
    gemm_accumulator<Multiply>(out, scores, shared.v(n), [&](int k, uint32(&words)[2]) {
      if constexpr (RowMask<Config>::kHoles || Config::kBias) keep_columns<Element>(columns, k, words);
    });
  }

  const bool has_sink = params.sinks != nullptr && (!Config::kVarlen || entry < params.batch);  // rows of no entry have none
  softmax.finish(out, has_sink ? params.sinks + head : nullptr, Config::kDropout ? params.dropout_scale : 1.0f);
  copy_async_wait<0>();  // without keys to wait for, q is still on its way to where out goes
  sync_threads();        // every warp has left q
  store_accumulator(shared.out(), warp_row, out);
  if (params.lse != nullptr && first_column == 0 && lane_id() % 4 == 0) {
    const int64 first = seqlen.batch * params.lse_batch_stride + head * params.lse_head_stride + seqlen.first_q;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int row = first_row + warp_row + row_of(i / 2, i % 2 * 2);
      if (row >= seqlen.seqlen_q) continue;
      params.lse[first + row] = softmax.lse(i);
      if (params.row_max == nullptr) continue;
      params.row_max[first + row] = softmax.reference[i];  // the parts that lse, one number, rounds: for the backward pass
      params.row_sum[first + row] = softmax.sum[i];
    }
  }
  sync_threads();
  Element* out_rows = seqlen.template rows<Element>(params.out, seqlen.first_q + first_row, head) + first_column;
  store_tile<Config::kVector, Traits::kThreads, Traits::kUnroll>(shared.out(), out_rows, params.out.row_stride, num_rows,
                                                                 num_columns);
}

template <typename Config>
__device__ __forceinline__ void fa2_forward(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return;
  // The thread blocks of one row block's output columns are neighbours: they read the same keys at the same time.
  const int64 tile = block_id() / Config::kVChunks;
  const int first_column = int(block_id() % Config::kVChunks) * Config::kHeadDimV;
  WorkTile work;
  if constexpr (Config::kVarlen)
    work = packed_work_tile<Config::kBlockM>(params, tile);
  else
    work = work_tile(params, tile);
  if (work.m_block < 0) return;
  const SeqlenInfo seqlen(params, work.entry);
  forward_tile<Config>(params, seqlen, work.m_block * Config::kBlockM, work.head, work.entry, first_column);
}

}  // namespace hfc
