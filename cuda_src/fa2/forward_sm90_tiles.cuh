// Which rows a thread block works on next. Rows are dealt in units of 64, one a warpgroup, so that a head whose rows do not fill
// its last tile costs its first tiles a unit each (under a causal mask the cheapest) instead of the last a whole tile.
#pragma once

#include "common/math.cuh"
#include "fa2/forward_sm90_traits.cuh"
#include "isa/ptx/atomic.cuh"

namespace hfc {

// Rows of one (head, entry) that the warpgroups of a thread block share: warpgroup w has unit first_unit + w.
struct RowTile {
  int first_unit;  // negative: there are no more tiles
  int num_units;
  int head;
  int entry;

  __device__ __forceinline__ bool exists() const { return first_unit >= 0; }
  __device__ __forceinline__ bool has_rows(int warpgroup) const { return exists() && warpgroup < num_units; }
  __device__ __forceinline__ int first_row(int warpgroup) const { return (first_unit + warpgroup) * kUnitRows; }
  __device__ __forceinline__ int end_row() const { return (first_unit + num_units) * kUnitRows; }
};

// Tile `index` of the launch. Late row tiles first: under a causal mask they have the most keys, and what starts last should be
// short. The tiles of `heads_per_section` (batch, head) pairs run interleaved, few enough that their keys stay in the L2 cache.
template <typename Config>
__device__ __forceinline__ RowTile row_tile(const AttentionParams& params, uint32 index) {
  if (index >= uint32(params.num_tiles)) return {-1, 0, 0, 0};
  const uint32 tiles = params.num_m_blocks, most_pairs = params.heads_per_section, heads = params.num_heads;
  const uint32 section = index / (tiles * most_pairs), first_pair = section * most_pairs;
  const uint32 pairs = min(most_pairs, params.batch * heads - first_pair);
  const uint32 within = index - first_pair * tiles, m_from_last = within / pairs;
  const uint32 pair = first_pair + (within - m_from_last * pairs), entry = pair / heads;
  const int m = int(tiles - 1 - m_from_last), units = ceil_div(params.seqlen_q, kUnitRows);
  const int missing = Config::kWarpgroups * int(tiles) - units;
  auto first_unit = [&](int tile) { return min(Config::kWarpgroups * tile - min(tile, missing), units); };
  return {first_unit(m), first_unit(m + 1) - first_unit(m), int(pair - entry * heads), int(entry)};
}

// The tile after `index`: claimed late, when the last keys of that one are on their way, so that a thread block with long tiles
// takes fewer. The counter wraps to 0 when every tile has been asked for, which each is once: the next launch finds it as this
// one did, without anybody resetting it.
__device__ __forceinline__ uint32 claim_tile(const ForwardSm90Params& params, uint32 index) {
  if (params.tile_counter == nullptr) return index + gridDim.x;
  return gridDim.x + atomic_increment(params.tile_counter, uint32(params.attention.num_tiles) - 1);
}

// Blocks of keys that the rows before `end_row` see, the first ones. At least one, so that rows that see none need no other road.
template <typename Config>
__device__ __forceinline__ int num_key_blocks(const AttentionParams& params, int end_row) {
  int keys = params.seqlen_k;
  if constexpr (Config::kCausal) keys = max(min(keys, end_row + params.seqlen_k - params.seqlen_q + params.window_right), 1);
  return ceil_div(keys, Config::kBlockN);
}

// A ring of two: what the key loader writes, everybody else reads.
template <typename Config>
__device__ __forceinline__ void publish_tile(ForwardSm90Traits<Config> shared, Ring<2>& ring, RowTile tile) {
  mbarrier_wait(shared.tile_read(ring.slot()), ring.parity() ^ 1);
  store_shared(shared.tile(ring.slot()),
               Chunk{{uint32(tile.first_unit), uint32(tile.num_units), uint32(tile.head), uint32(tile.entry)}});
  mbarrier_arrive(shared.tile_known(ring.slot()));
  ring.advance();
}

// The caller arrives at tile_read(slot), once a warp.
template <typename Config>
__device__ __forceinline__ RowTile known_tile(ForwardSm90Traits<Config> shared, const Ring<2>& ring) {
  mbarrier_wait(shared.tile_known(ring.slot()), ring.parity());
  const Chunk chunk = load_shared_chunk(shared.tile(ring.slot()));
  return {int(chunk.words[0]), int(chunk.words[1]), int(chunk.words[2]), int(chunk.words[3])};
}

}  // namespace hfc
