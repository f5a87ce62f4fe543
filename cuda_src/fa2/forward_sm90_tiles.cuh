// Which rows a thread block works on next, and which blocks of keys they see. Rows are dealt in units of 64, one a warpgroup, so
// that a head whose rows do not fill its last tile costs its first tiles a unit each (under a causal mask the cheapest) instead
// of the last a whole tile.
#pragma once

#include "attn/mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/math.cuh"
#include "fa2/forward_sm90_traits.cuh"
#include "atomic.cuh"
#include "warpgroup.cuh"

namespace hfc {

// Blocks of keys, [first, end): all that some of a group of rows see, at least one block, so that rows that see none need no
// other road. Every row sees those of [whole_first, whole_end) whole.
struct KeyBlocks {
  int first;
  int end;
  int whole_first;
  int whole_end;

  __device__ __forceinline__ bool whole(int block) const { return block >= whole_first && block < whole_end; }
};

// Rows of one entry that the warpgroups of a thread block share: warpgroup w has unit first_unit + w, of one head. With
// kPacksHeads the units of all heads that share a head of keys are one list, in which those of the same rows are neighbours: rows
// of several heads then fill a tile together, and see the same keys.
template <typename Config>
struct RowTile {
  int first_unit;  // negative: there are no more tiles
  int num_units;
  int head;  // with kPacksHeads of the keys
  int entry;
  int seqlen_q, seqlen_k, first_q, first_k;  // of the entry, in a packed tensor; elsewhere nobody reads them

  __device__ __forceinline__ bool exists() const { return first_unit >= 0; }
  __device__ __forceinline__ bool has_rows(int warpgroup) const { return exists() && warpgroup < num_units; }
  __device__ __forceinline__ int first_row(const ForwardSm90Params& params, int warpgroup) const {
    const int unit = first_unit + warpgroup;
    if constexpr (Config::kPacksHeads)
      return int(kUnitRows * high_product(uint32(unit), params.group_inverse));  // wraps for none
    return kUnitRows * unit;
  }
  __device__ __forceinline__ int end_row(const ForwardSm90Params& params) const {
    return first_row(params, num_units - 1) + kUnitRows;
  }
  // Of the queries of a warpgroup.
  __device__ __forceinline__ int query_head(const ForwardSm90Params& params, int warpgroup) const {
    if constexpr (!Config::kPacksHeads) return head;
    const int unit = first_unit + warpgroup, row_unit = int(high_product(uint32(unit), params.group_inverse));
    return head * params.group + unit - row_unit * params.group;
  }
  __device__ __forceinline__ SeqlenInfo seqlen(const AttentionParams& params) const {
    if constexpr (Config::kVarlen) return SeqlenInfo(seqlen_q, seqlen_k, first_q, first_k, 0);
    return SeqlenInfo(params.seqlen_q, params.seqlen_k, 0, 0, entry);
  }
};

// Units of a head (kPacksHeads: of the heads that share its keys), and the heads whose units are dealt apart from each other.
template <typename Config>
__device__ __forceinline__ int num_units(const ForwardSm90Params& params, int seqlen_q) {
  return ceil_div(seqlen_q, kUnitRows) * (Config::kPacksHeads ? params.group : 1);
}
template <typename Config>
__device__ __forceinline__ uint32 num_dealt_heads(const AttentionParams& params) {
  return Config::kPacksHeads ? params.num_heads_k : params.num_heads;
}

// Units of tile `m` of a head with `units` in `tiles` tiles.
template <typename Config>
__device__ __forceinline__ RowTile<Config> units_of_tile(int m, int tiles, int units) {
  const int missing = Config::kWarpgroups * tiles - units;
  auto first_unit = [&](int tile) { return min(Config::kWarpgroups * tile - min(tile, missing), units); };
  RowTile<Config> tile;
  tile.first_unit = first_unit(m);
  tile.num_units = first_unit(m + 1) - tile.first_unit;
  return tile;
}

// Tile `index` of the launch. Late row tiles first: under a causal mask they have the most keys, and what starts last should be
// short. The tiles of `heads_per_section` (batch, head) pairs run interleaved, few enough that their keys stay in the L2 cache.
template <typename Config>
__device__ __forceinline__ RowTile<Config> row_tile(const ForwardSm90Params& launch, uint32 index) {
  const AttentionParams& params = launch.attention;
  const uint32 tiles = params.num_m_blocks, most_pairs = params.heads_per_section, heads = num_dealt_heads<Config>(params);
  const uint32 section = index / (tiles * most_pairs), first_pair = section * most_pairs;
  const uint32 pairs = min(most_pairs, params.batch * heads - first_pair);
  const uint32 within = index - first_pair * tiles, m_from_last = within / pairs;
  const uint32 pair = first_pair + (within - m_from_last * pairs), entry = pair / heads;
  const int units = num_units<Config>(launch, params.seqlen_q);
  RowTile<Config> tile = units_of_tile<Config>(int(tiles - 1 - m_from_last), int(tiles), units);
  tile.head = int(pair - entry * heads);
  tile.entry = int(entry);
  return tile;
}

// Packed sequences whose numbers of keys have the same number of bits are one class, the longest first, so that what starts last
// is short. 0 to 31.
__device__ __forceinline__ int length_class(const SeqlenInfo& seqlen) { return min(leading_zeros(uint32(seqlen.seqlen_k)), 31); }

// Tiles of a head in all entries of a class: lane c of the warp learns those of class c.
template <typename Config>
__device__ __forceinline__ int tiles_of_classes(const ForwardSm90Params& launch) {
  const AttentionParams& params = launch.attention;
  int of_class = 0;
#pragma unroll 1
  for (int first = 0; first <= params.batch; first += kWarpSize) {  // the last entry: the rows beyond the last offset
    const int entry = first + lane_id();
    int tiles = 0, length = 0;
    if (entry <= params.batch) {
      const SeqlenInfo seqlen(params, entry);
      tiles = ceil_div(num_units<Config>(launch, seqlen.seqlen_q), Config::kWarpgroups);
      length = length_class(seqlen);
    }
    for (uint32 left = warp_ballot(tiles > 0); left != 0;) {
      const int current = int(broadcast(uint32(length), first_bit(left)));
      const bool same = tiles > 0 && length == current;
      const int sum = warp_sum(same ? tiles : 0);
      if (lane_id() == current) of_class += sum;
      left &= ~warp_ballot(same);
    }
  }
  return of_class;
}

// Tile `index` of packed sequences, for a warp: the heads of one tile of rows are neighbours, the tiles of an entry run from the
// last. `of_class` as above.
template <typename Config>
__device__ __forceinline__ RowTile<Config> packed_row_tile(const ForwardSm90Params& launch, int of_class, uint32 index) {
  const AttentionParams& params = launch.attention;
  const uint32 heads = num_dealt_heads<Config>(params);
  const int slot = int(index / heads), end = warp_inclusive_sum(of_class);
  const int length = first_bit(warp_ballot(end > slot));
  const int before = int(broadcast(uint32(end - of_class), length));
  const WorkTile work = packed_tile<Config::kWarpgroups>(params, 0x7fffffff, slot - before, [&](const SeqlenInfo& seqlen) {
    return length_class(seqlen) == length ? num_units<Config>(launch, seqlen.seqlen_q) : 0;
  });
  const SeqlenInfo seqlen(params, work.entry);
  const int units = num_units<Config>(launch, seqlen.seqlen_q);
  RowTile<Config> tile = units_of_tile<Config>(work.m_block, ceil_div(units, Config::kWarpgroups), units);
  tile.head = int(index - uint32(slot) * heads);
  tile.entry = work.entry;
  tile.seqlen_q = seqlen.seqlen_q, tile.seqlen_k = seqlen.seqlen_k;
  tile.first_q = int(seqlen.first_q), tile.first_k = int(seqlen.first_k);
  return tile;
}

// From what the first and the last row of a group see. Without key intervals those of the rows between lie in between.
template <typename Config>
__device__ __forceinline__ KeyBlocks window_blocks(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row,
                                                   int end_row) {
  constexpr int kBlockN = Config::kBlockN;
  const KeyInterval first = window_interval(params, seqlen, first_row), last = window_interval(params, seqlen, end_row - 1);
  KeyBlocks blocks{0, ceil_div(seqlen.seqlen_k, kBlockN), 0, seqlen.seqlen_k / kBlockN};
  if constexpr (Config::kCausal) blocks.end = ceil_div(last.hi, kBlockN), blocks.whole_end = max(first.hi, 0) / kBlockN;
  if constexpr (Config::kCausal || Config::kVarlen) blocks.end = max(blocks.end, 1);
  if constexpr (Config::kLeft) {
    blocks.first = min(first.lo / kBlockN, blocks.end - 1);
    blocks.whole_first = ceil_div(last.lo, kBlockN);
  }
  return blocks;
}
template <typename Config>
__device__ __forceinline__ KeyBlocks blocks_of_rows(const ForwardSm90Params& params, const RowTile<Config>& tile) {
  return window_blocks<Config>(params.attention, tile.seqlen(params.attention), tile.first_row(params, 0), tile.end_row(params));
}

}  // namespace hfc
