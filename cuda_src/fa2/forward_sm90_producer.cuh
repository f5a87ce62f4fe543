// The warpgroup that loads: one thread the keys and values, in the order in which they are used, and one the queries.
#pragma once

#include "fa2/forward_sm90_tiles.cuh"

namespace hfc {

// All panels of a tile's rows, reported to `loaded`.
template <typename Tile>
__device__ __forceinline__ void load_panels(Tile tile, const TensorMap& map, SharedPtr loaded, int row, int head, int entry) {
  mbarrier_arrive_expect(loaded, Tile::kBytes);  // what lies beyond the tensor counts: it arrives as zeros
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    tma_load(tile.base + panel * Tile::kPanelBytes, map, loaded, panel * kPanelColumns, row, head, entry);
}

// Deals the tiles and loads their keys: K(n-1), K(n-2), V(n-1), K(n-3), V(n-2) … V(0), for a step multiplies with the next K
// before it does with its V.
template <typename Config>
__device__ __forceinline__ void load_keys(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared) {
  const AttentionParams& attention = params.attention;
  const int group = attention.num_heads / attention.num_heads_k;
  Ring<2> tiles;
  Ring<Config::kStages> k_ring, v_ring;
  uint32 index = blockIdx.x;
  for (;;) {
    const RowTile tile = row_tile<Config>(attention, index);
    publish_tile<Config>(shared, tiles, tile);
    if (!tile.exists()) return;
    const int blocks = num_key_blocks<Config>(attention, tile.end_row()), head = tile.head / group;
    for (int n = blocks - 1; n >= -1; --n) {
      if (n == 0) index = claim_tile(params, index);
      if (n >= 0) {
        mbarrier_wait(shared.k_released(k_ring.slot()), k_ring.parity() ^ 1);
        load_panels(shared.k(k_ring.slot()), params.k, shared.k_loaded(k_ring.slot()), n * Config::kBlockN, head, tile.entry);
        k_ring.advance();
      }
      if (n + 1 < blocks) {
        mbarrier_wait(shared.v_released(v_ring.slot()), v_ring.parity() ^ 1);
        load_panels(shared.v(v_ring.slot()), params.v, shared.v_loaded(v_ring.slot()), (n + 1) * Config::kBlockN, head,
                    tile.entry);
        v_ring.advance();
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void load_queries(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared) {
  using Traits = ForwardSm90Traits<Config>;
  Ring<2> tiles;
  Ring<Traits::kQSlots> rings[Config::kWarpgroups];  // a warpgroup without rows keeps its place
  for (;;) {
    const RowTile tile = known_tile<Config>(shared, tiles);
    mbarrier_arrive(shared.tile_read(tiles.slot()));
    tiles.advance();
    if (!tile.exists()) return;
#pragma unroll
    for (int w = 0; w < Config::kWarpgroups; ++w) {
      if (!tile.has_rows(w)) continue;
      mbarrier_wait(shared.q_released(w, rings[w].slot()), rings[w].parity() ^ 1);
      load_panels(shared.q(w, rings[w].slot()), params.q, shared.q_loaded(w, rings[w].slot()), tile.first_row(w), tile.head,
                  tile.entry);
      rings[w].advance();
    }
  }
}

}  // namespace hfc
