// What the key loader tells everybody else of the next tile, in a ring of two: its rows, the lengths of its packed entry, and,
// where rows have key intervals of their own, the blocks of keys that each unit sees.
#pragma once

#include "fa2/forward_sm90_tiles.cuh"

namespace hfc {

// From the interval of every row of a unit; a warp calls. No block where no row sees a key.
template <typename Config>
__device__ __forceinline__ KeyBlocks interval_blocks(const AttentionParams& params, const RowTile<Config>& tile, int first_row) {
  constexpr int kBlockN = Config::kBlockN, kInfinity = 0x7fffffff;
  const SeqlenInfo seqlen = tile.seqlen(params);
  const int* intervals = nullptr;
  if constexpr (Config::kIntervals)
    intervals = params.key_intervals + tile.entry * params.interval_batch_stride + tile.head * params.interval_head_stride;
  KeyInterval all{kInfinity, 0}, common{0, kInfinity};
#pragma unroll 1  // the loading warpgroup has few registers
  for (int row = first_row + lane_id(); row < min(first_row + kUnitRows, seqlen.seqlen_q); row += kWarpSize) {
    const KeyInterval keys = row_interval(params, seqlen, intervals, row);
    common = {max(common.lo, keys.lo), min(common.hi, keys.hi)};
    if (!keys.empty()) all = {min(all.lo, keys.lo), max(all.hi, keys.hi)};
  }
  all = {warp_min(all.lo), -warp_min(-all.hi)};
  common = {-warp_min(-common.lo), warp_min(common.hi)};
  KeyBlocks blocks{all.lo / kBlockN, ceil_div(all.hi, kBlockN), common.lo / kBlockN + (common.lo % kBlockN != 0), 0};
  if constexpr (!Config::kMask) blocks.whole_end = common.hi / kBlockN;
  return blocks;
}

__device__ __forceinline__ void store_record(SharedPtr place, int a, int b, int c, int d) {
  store_shared(place, Chunk{{uint32(a), uint32(b), uint32(c), uint32(d)}});
}
__device__ __forceinline__ KeyBlocks load_blocks(SharedPtr place) {
  const Chunk chunk = load_shared_chunk(place);
  return {int(chunk.words[0]), int(chunk.words[1]), int(chunk.words[2]), int(chunk.words[3])};
}

// Of the blocks of keys of every unit and of the tile; returns the tile's.
template <typename Config>
__device__ __forceinline__ KeyBlocks publish_blocks(const ForwardSm90Params& params, const RowTile<Config>& tile,
                                                    SharedPtr record) {
  const SharedPtr place = record + ForwardSm90Traits<Config>::kBlocks;
  KeyBlocks all{0x7fffffff, 0, 0, 0};
#pragma unroll 1
  for (int w = 0; w < tile.num_units; ++w) {
    const KeyBlocks unit = interval_blocks(params.attention, tile, tile.first_row(params, w));
    if (unit.first < unit.end) all.first = min(all.first, unit.first), all.end = max(all.end, unit.end);
    if (lane_id() == 0) store_record(place + 16 * (1 + w), unit.first, unit.end, unit.whole_first, unit.whole_end);
  }
  if (all.end == 0) all = {0, 1, 0, 0};
  if (lane_id() == 0) store_record(place, all.first, all.end, 0, 0);
  return all;
}

// The key loader's warp calls; returns the blocks of keys that the tile needs.
template <typename Config>
__device__ __forceinline__ KeyBlocks publish_tile(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared,
                                                  Ring<2>& ring, const RowTile<Config>& tile) {
  using Traits = ForwardSm90Traits<Config>;
  const SharedPtr record = shared.tile(ring.slot());
  mbarrier_wait(shared.tile_read(ring.slot()), ring.parity() ^ 1);
  sync_warp();
  KeyBlocks blocks{0, 0, 0, 0};
  if constexpr (Traits::kHoles)
    blocks = publish_blocks(params, tile, record);
  else
    blocks = blocks_of_rows(params, tile);
  if (lane_id() == 0) {
    store_record(record, tile.first_unit, tile.num_units, tile.head, tile.entry);
    if constexpr (Config::kVarlen)
      store_record(record + Traits::kLengths, tile.seqlen_q, tile.seqlen_k, tile.first_q, tile.first_k);
    mbarrier_arrive(shared.tile_known(ring.slot()));
  }
  ring.advance();
  return blocks;
}

template <typename Config>
__device__ __forceinline__ RowTile<Config> load_tile(SharedPtr record) {
  const Chunk rows = load_shared_chunk(record);
  RowTile<Config> tile;
  tile.first_unit = int(rows.words[0]), tile.num_units = int(rows.words[1]);
  tile.head = int(rows.words[2]), tile.entry = int(rows.words[3]);
  if constexpr (Config::kVarlen) {
    const Chunk lengths = load_shared_chunk(record + ForwardSm90Traits<Config>::kLengths);
    tile.seqlen_q = int(lengths.words[0]), tile.seqlen_k = int(lengths.words[1]);
    tile.first_q = int(lengths.words[2]), tile.first_k = int(lengths.words[3]);
  }
  return tile;
}

// The caller arrives at tile_read(slot), once a warp, when it has read what it wants.
template <typename Config>
__device__ __forceinline__ RowTile<Config> known_tile(ForwardSm90Traits<Config> shared, const Ring<2>& ring) {
  mbarrier_wait(shared.tile_known(ring.slot()), ring.parity());
  return load_tile<Config>(shared.tile(ring.slot()));
}

// Blocks of keys that the tile's rows see, and those of one warpgroup's among them. `record`: read while the tile is known.
template <typename Config>
__device__ __forceinline__ KeyBlocks blocks_of_tile(const ForwardSm90Params& params, const RowTile<Config>& tile,
                                                    SharedPtr record) {
  if constexpr (ForwardSm90Traits<Config>::kHoles) return load_blocks(record + ForwardSm90Traits<Config>::kBlocks);
  return blocks_of_rows(params, tile);
}
template <typename Config>
__device__ __forceinline__ KeyBlocks blocks_of_unit(const ForwardSm90Params& params, const RowTile<Config>& tile, int warpgroup,
                                                    SharedPtr record) {
  if constexpr (ForwardSm90Traits<Config>::kHoles) {
    const KeyBlocks unit = load_blocks(record + (ForwardSm90Traits<Config>::kBlocks + 16 * (1 + warpgroup)));
    if (unit.first < unit.end) return unit;
    const int first = blocks_of_tile(params, tile, record).first;
    return {first, first + 1, 0, 0};
  }
  const int first_row = tile.first_row(params, warpgroup);
  return window_blocks<Config>(params.attention, tile.seqlen(params.attention), first_row, first_row + kUnitRows);
}

}  // namespace hfc
