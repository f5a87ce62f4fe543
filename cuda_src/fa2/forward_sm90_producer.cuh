// The warpgroup that loads: one warp deals the tiles and loads their keys and values in the order in which they are used, one the
// queries. One thread of a warp gives the copies.
#pragma once

#include "fa2/forward_sm90_record.cuh"
#include "warpgroup.cuh"

namespace hfc {

// Which tile a thread block takes next, for a warp.
template <typename Config>
class TileDealer {
 public:
  __device__ __forceinline__ explicit TileDealer(const ForwardSm90Params& params)
      : params_(params), num_tiles_(uint32(params.attention.num_tiles)), index_(block_index()) {
    if constexpr (Config::kVarlen) {  // only the device knows
      of_class_ = tiles_of_classes<Config>(params);
      num_tiles_ = uint32(warp_sum(of_class_)) * num_dealt_heads<Config>(params.attention);
    }
  }

  __device__ __forceinline__ RowTile<Config> tile() const {
    if (index_ >= num_tiles_) return none();
    if constexpr (Config::kVarlen) return packed_row_tile<Config>(params_, of_class_, index_);
    return row_tile<Config>(params_, index_);
  }

  // Late, when the last keys of this one are on their way, so that a thread block with long tiles takes fewer. The counter wraps
  // to 0 when every tile has been asked for, which each is once: the next launch finds it as this one did, without anybody
  // resetting it.
  __device__ __forceinline__ void claim() {
    if (params_.tile_counter == nullptr) {
      index_ += num_blocks();
      return;
    }
    uint32 claimed = 0;
    if (lane_id() == 0) claimed = atomic_increment(params_.tile_counter, num_tiles_ - 1);
    index_ = num_blocks() + broadcast(claimed, 0);
  }

 private:
  __device__ __forceinline__ static RowTile<Config> none() {
    RowTile<Config> tile{};
    tile.first_unit = -1;
    return tile;
  }

  const ForwardSm90Params& params_;
  uint32 num_tiles_;
  uint32 index_;
  int of_class_ = 0;  // tiles_of_classes() of packed sequences
};

// K(n-1), K(n-2), V(n-1), K(n-3), V(n-2) … V(0), for a step multiplies with the next K before it does with its V. A warp calls.
template <typename Config>
__device__ __forceinline__ void load_keys(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared) {
  const AttentionParams& attention = params.attention;
  const int group = Config::kPacksHeads ? 1 : attention.num_heads / attention.num_heads_k;
  Ring<2> tiles;
  Ring<Config::kStages> k_ring, v_ring;
  TileDealer<Config> dealer(params);
  for (;;) {
    const RowTile<Config> tile = dealer.tile();
    const KeyBlocks blocks = publish_tile(params, shared, tiles, tile);
    if (!tile.exists()) return;
    const SeqlenInfo seqlen = tile.seqlen(attention);
    const int head = tile.head / group, first_k = int(seqlen.first_k);
    for (int n = blocks.end - 1; n >= blocks.first - 1; --n) {
      if (n == blocks.first) dealer.claim();
      if (n >= blocks.first) {
        const int slot = k_ring.slot();
        if (lane_id() == 0) {
          mbarrier_wait(shared.k_released(slot), k_ring.parity() ^ 1);
          load_panels(shared.k(slot), params.k, shared.k_loaded(slot), first_k + n * Config::kBlockN, head, seqlen.batch);
        }
        k_ring.advance();
      }
      if (n + 1 < blocks.end) {
        const int slot = v_ring.slot();
        const SharedPtr loaded = ForwardSm90Traits<Config>::kClears ? shared.v_landed(slot) : shared.v_loaded(slot);
        if (lane_id() == 0) {
          mbarrier_wait(shared.v_released(slot), v_ring.parity() ^ 1);
          load_panels(shared.v(slot), params.v, loaded, first_k + (n + 1) * Config::kBlockN, head, seqlen.batch);
        }
        v_ring.advance();
      }
    }
  }
}

// One thread calls.
template <typename Config>
__device__ __forceinline__ void load_queries(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared) {
  using Traits = ForwardSm90Traits<Config>;
  Ring<2> tiles;
  Ring<Traits::kQSlots> rings[Config::kWarpgroups];  // a warpgroup without rows keeps its place
  for (;;) {
    const RowTile<Config> tile = known_tile<Config>(shared, tiles);
    mbarrier_arrive(shared.tile_read(tiles.slot()));
    tiles.advance();
    if (!tile.exists()) return;
    const SeqlenInfo seqlen = tile.seqlen(params.attention);
#pragma unroll
    for (int w = 0; w < Config::kWarpgroups; ++w) {
      if (!tile.has_rows(w)) continue;
      const int slot = rings[w].slot();
      mbarrier_wait(shared.q_released(w, slot), rings[w].parity() ^ 1);
      load_panels(shared.q(w, slot), params.q, shared.q_loaded(w, slot), int(seqlen.first_q) + tile.first_row(params, w),
                  tile.query_head(params, w), seqlen.batch);
      rings[w].advance();
    }
  }
}

}  // namespace hfc
