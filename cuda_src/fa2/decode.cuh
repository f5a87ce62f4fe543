// FlashAttention-2's forward pass for few rows against many keys: memory's bandwidth is the limit, not the products. The rows
// of all heads that share a head of keys are one tile (packed_rows.cuh); thread blocks divide the keys among them
// (combine.cuh), and inside a block each warp takes keys of its own, with its own stages of copies on their way, so that no
// warp waits for another until the end.
#pragma once

#include "attn/online_softmax.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "fa2/cache.cuh"
#include "fa2/combine.cuh"
#include "fa2/packed_rows.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct DecodeTraits {
  using Element = typename Config::Element;
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kWarpKeys = Config::kBlockN / Config::kNumWarps;  // keys of one step of a warp
  static constexpr int kM = Config::kBlockM / 16;
  static constexpr int kN = kWarpKeys / 8;
  static constexpr int kNV = Config::kHeadDimV / 8;
  static_assert(kWarpKeys % kPageUnit == 0 && kN <= 16 && kNV % 2 == 0 && Config::kStages >= 2);

  using TileQ = SharedTile<Element, Config::kBlockM, Config::kHeadDim>;
  using TileK = SharedTile<Element, kWarpKeys, Config::kHeadDim>;
  using TileV = SharedTile<Element, kWarpKeys, Config::kHeadDimV>;
  using TilePart = SharedTile<float, Config::kBlockM, Config::kHeadDimV>;  // a warp's output

  // Shared memory: q | each warp's stages of k and v, later its output | each warp's statistics of the rows
  static constexpr int kWarpBytes = Config::kStages * (TileK::kBytes + TileV::kBytes);
  static constexpr int kQ = 0;
  static constexpr int kKeys = kQ + TileQ::kBytes + kSharedGap;
  static constexpr int kStatistics = kKeys + Config::kNumWarps * max(kWarpBytes, TilePart::kBytes) + kSharedGap;
  static constexpr int kSharedBytes = kStatistics + Config::kNumWarps * Config::kBlockM * int(sizeof(RowStatistics));
  static_assert(kSharedBytes == Config::kSharedBytes, "decode.py and this plan disagree");

  SharedPtr base = shared_base();
  __device__ __forceinline__ TileQ q() const { return {base + kQ}; }
  __device__ __forceinline__ TileK k(int warp, int stage) const {
    return {base + (kKeys + warp * kWarpBytes + stage * TileK::kBytes)};
  }
  __device__ __forceinline__ TileV v(int warp, int stage) const {
    return {base + (kKeys + warp * kWarpBytes + Config::kStages * TileK::kBytes + stage * TileV::kBytes)};
  }
  __device__ __forceinline__ TilePart part(int warp) const { return {base + (kKeys + warp * TilePart::kBytes)}; }
  __device__ __forceinline__ SharedPtr statistics(int warp, int row) const {
    return base + (kStatistics + (warp * Config::kBlockM + row) * int(sizeof(RowStatistics)));
  }
  __device__ __forceinline__ void mark_gaps() const {
    mark_shared_gap(base + (kKeys - kSharedGap));
    mark_shared_gap(base + (kStatistics - kSharedGap));
  }
};

// The tile of q: rows that do not exist are zeros.
template <typename Config>
__device__ __forceinline__ void load_packed_rows(typename DecodeTraits<Config>::TileQ tile, const AttentionParams& params,
                                                 const SeqlenInfo& seqlen, int first_row, int head_k) {
  using Element = typename Config::Element;
  using Tile = typename DecodeTraits<Config>::TileQ;
#pragma unroll 1
  for (int index = thread_id(); index < Config::kBlockM * Tile::kChunks; index += DecodeTraits<Config>::kThreads) {
    const int row = index / Tile::kChunks, chunk = index % Tile::kChunks, column = chunk * Tile::kElementsPerChunk;
    const PackedRow packed(params, head_k, first_row + row);
    const bool valid = packed.row < seqlen.seqlen_q && column < params.head_dim;
    const Element* source = seqlen.template rows<Element>(params.q, valid ? packed.row : 0, packed.head) + column;
    if constexpr (Config::kVector)
      copy_async(tile.at(row, chunk), source, valid);
    else
      store_shared(tile.at(row, chunk), load_elements(source, valid ? params.head_dim - column : 0));
  }
}

// A warp's keys (or values) from `first_key`: those outside of `keys` become zeros and are not read.
template <typename Config, typename Tile>
__device__ __forceinline__ void load_warp_keys(Tile tile, const CacheRows<Config>& cache, const SeqlenInfo& seqlen,
                                               const TensorRef& tensor, int head, int first_column, KeyInterval keys,
                                               int first_key, int columns) {
  using Element = typename Tile::Element;
  using Unit = SharedTile<Element, kPageUnit, Tile::kColumns>;
#pragma unroll
  for (int unit = 0; unit < Tile::kRows / kPageUnit; ++unit) {
    const int key = first_key + unit * kPageUnit;
    const bool exists = key < keys.hi && key + kPageUnit > keys.lo;
    const Element* rows = cache.template row<Element>(tensor, head, exists ? int(seqlen.first_k) + key : 0) + first_column;
    load_tile<Config::kVector, kWarpSize, kPageUnit>(Unit{tile.base + unit * Unit::kBytes}, rows, tensor.row_stride,
                                                     RowRange{keys.lo - key, keys.hi - key}, columns, lane_id());
  }
}

// The keys of blocks [first, end) of one split.
struct BlockRange {
  int first;
  int end;
};

template <typename Config>
__device__ __forceinline__ BlockRange split_blocks(const AttentionParams& params, KeyInterval keys, int split) {
  const int first = keys.lo / Config::kBlockN, end = ceil_div(keys.hi, Config::kBlockN);
  const int share = ceil_div(end - first, params.num_splits);
  return {min(first + split * share, end), min(first + (split + 1) * share, end)};
}

// One thread block's work: rows of one head of keys, some columns of their output, one split of their keys.
struct DecodeTile {
  int first_row;
  int head_k;
  int entry;
  int split;
  int first_column;
};

// What the warps found becomes the block's: written as the output, or as one split's part of it, which the last of the splits
// combines.
template <typename Config>
__device__ __forceinline__ void store_packed_rows(const DecodeTraits<Config>& shared, const AttentionParams& params,
                                                  const DecodeTile& tile) {
  using Traits = DecodeTraits<Config>;
  using Chunks = RowChunk<typename Config::Element>;
  constexpr int kColumns = Chunks::kColumns, kPerRow = Config::kHeadDimV / kColumns;
  const int group = params.num_heads / params.num_heads_k;
  const int num_rows = min<int>(Config::kBlockM, group * params.seqlen_q - tile.first_row);
  const SplitParts<Config> parts(params, tile.entry, tile.split);
  auto store = [&](int tile_row, int column, const Chunks& chunk, RowStatistics seen) {
    const PackedRow packed(params, tile.head_k, tile.first_row + tile_row);
    store_row<Config>(params, tile.entry, packed.head, packed.row, tile.first_column + column, chunk, seen);
  };
#pragma unroll 1
  for (int index = thread_id(); index < num_rows * kPerRow; index += Traits::kThreads) {
    const int tile_row = index / kPerRow, column = index % kPerRow * kColumns;
    RowStatistics found[Config::kNumWarps], seen;
#pragma unroll
    for (int warp = 0; warp < Config::kNumWarps; ++warp) {
      const SharedPtr statistics = shared.statistics(warp, tile_row);
      found[warp] = {bits_float(load_shared(statistics)), bits_float(load_shared(statistics + 4))};
      seen.maximum = max_float(seen.maximum, found[warp].maximum);
    }
    Chunks chunk;
#pragma unroll
    for (int warp = 0; warp < Config::kNumWarps; ++warp) {
      const float factor = exp2_fast<typename Config::Element>(found[warp].maximum - seen.maximum);
      seen.sum = fused_multiply_add(factor, found[warp].sum, seen.sum);
      Chunk part[kColumns / 4];
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) part[i] = load_shared_chunk(shared.part(warp).at(tile_row, column / 4 + i));
      chunk.add(factor, part);
    }
    if (params.num_splits == 1) {
      store(tile_row, column, chunk, seen);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kColumns; i += 4)
      store_global_chunk(parts.out(tile.split, tile_row) + column + i,
                         {float_bits(chunk.values[i]), float_bits(chunk.values[i + 1]), float_bits(chunk.values[i + 2]),
                          float_bits(chunk.values[i + 3])});
    if (column == 0) store_global_pair(parts.statistics(tile.split, tile_row), seen.maximum, seen.sum);
  }
  if (params.num_splits > 1 && is_last_split(params, parts, shared.base)) combine_splits(shared, params, parts, num_rows, store);
}

template <typename Config>
__device__ __forceinline__ void decode_tile(const AttentionParams& params, const DecodeTile& tile) {
  using Traits = DecodeTraits<Config>;
  using Element = typename Config::Element;
  using Multiply = typename Config::Multiply;
  constexpr int kM = Traits::kM, kN = Traits::kN, kNV = Traits::kNV, kStages = Config::kStages;
  const Traits shared;
  shared.mark_gaps();

  const CacheRows<Config> cache(params, tile.entry);
  const SeqlenInfo seqlen = cache.seqlen(tile.entry);
  const TileKeys tile_keys = hfc::tile_keys<Config>(params, seqlen, tile.first_row, tile.head_k, tile.entry);
  const KeyInterval keys = tile_keys.any;
  const BlockRange blocks = split_blocks<Config>(params, keys, tile.split);
  const int warp = warp_id(), warp_key = warp * Traits::kWarpKeys;
  const int num_columns = min(Config::kHeadDimV, params.head_dim_v - tile.first_column);

  auto load = [&](int n, int stage) {
    const int key = n * Config::kBlockN + warp_key;
    load_warp_keys<Config>(shared.k(warp, stage), cache, seqlen, params.k, tile.head_k, 0, keys, key, params.head_dim);
    load_warp_keys<Config>(shared.v(warp, stage), cache, seqlen, params.v, tile.head_k, tile.first_column, keys, key,
                           num_columns);
  };
  load_packed_rows<Config>(shared.q(), params, seqlen, tile.first_row, tile.head_k);
  copy_async_commit();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (blocks.first + stage < blocks.end) load(blocks.first + stage, stage);
    copy_async_commit();
  }
  const PackedRows<Config> rows(params, seqlen, tile.first_row, tile.head_k, tile.entry, tile_keys);
  copy_async_wait<kStages - 1>();
  sync_threads();  // q has come

  float out[kM][kNV][4];  // of this warp's keys, not normalised
  clear(out);
  OnlineSoftmax<Element, 2 * kM> softmax;
  int stage = 0;
  for (int n = blocks.first; n < blocks.end; ++n, stage = stage + 1 == kStages ? 0 : stage + 1) {
    copy_async_wait<kStages - 2>();
    sync_warp();  // block n has come, and every lane has left block n - 1, whose place is the next to fill
    if (n + kStages - 1 < blocks.end) load(n + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    copy_async_commit();

    const int first_key = n * Config::kBlockN + warp_key;
    const Visibility visibility = rows.visibility(first_key);
    if (visibility == Visibility::kNone) continue;
    uint32 visible[2 * kM];
    uint32 columns = ~0u;  // keys that some row sees
    if (visibility == Visibility::kSome && !warp_any(rows.look(visible, params, first_key))) continue;
    float scores[kM][kN][4];
    gemm_transposed<Multiply>(scores, shared.q(), 0, shared.k(warp, stage));
    const float scale = modify_scores<Config>(scores, params, seqlen, PackedTile<Config>{rows, first_key});
    if (visibility == Visibility::kSome) hide(scores, visible);
    if constexpr (Config::kBias || PackedRows<Config>::kHoles) columns = seen_columns(scores);
    softmax.update(scores, out, scale);
    gemm_accumulator<Multiply>(out, scores, shared.v(warp, stage), [&](int k, uint32(&words)[2]) {
      if constexpr (Config::kBias || PackedRows<Config>::kHoles) keep_columns<Element>(columns, k, words);
    });
  }

  quad_sum(softmax.sum);
  sync_threads();  // every warp has left its keys
  store_accumulator(shared.part(warp), 0, out);
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i)
    if (lane_id() % 4 == 0)
      store_shared(shared.statistics(warp, row_of(i / 2, i % 2 * 2)), float_bits(softmax.reference[i]),
                   float_bits(softmax.sum[i]));
  sync_threads();
  store_packed_rows<Config>(shared, params, tile);
}

template <typename Config>
__device__ __forceinline__ void fa2_decode(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return;
  // Neighbours read the same keys: the columns of the output, then the row blocks of a head.
  const DivMod chunk = divmod(block_id(), Config::kVChunks);
  const DivMod block = divmod(chunk.quotient, params.num_m_blocks);
  const DivMod head = divmod(block.quotient, params.num_heads_k);
  const DivMod split = divmod(head.quotient, params.num_splits);
  decode_tile<Config>(params, {int(block.remainder) * Config::kBlockM, int(head.remainder), int(split.quotient),
                               int(split.remainder), int(chunk.remainder) * Config::kHeadDimV});
}

}  // namespace hfc
