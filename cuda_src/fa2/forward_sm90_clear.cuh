// Hidden keys may hold anything. Where a value is NaN or infinite, a probability of 0 does not remove it; so a warp of the loading
// warpgroup looks at the blocks of which some keys may be seen by no row of the tile, and sets such values to 0.
#pragma once

#include "fa2/forward_sm90_record.cuh"
#include "tile/finite.cuh"
#include "warpgroup.cuh"

namespace hfc {

// Whether the rows of a tile see a key, each lane asking for some of the rows.
template <typename Config>
class TileView {
 public:
  __device__ __forceinline__ TileView(const ForwardSm90Params& launch, const RowTile<Config>& tile)
      : params_(launch.attention),
        seqlen_(tile.seqlen(params_)),
        first_(tile.first_row(launch, 0)),
        end_(min(tile.end_row(launch), seqlen_.seqlen_q)) {
    if constexpr (Config::kIntervals)
      intervals_ = params_.key_intervals + tile.entry * params_.interval_batch_stride + tile.head * params_.interval_head_stride;
    if constexpr (Config::kMask)
      mask_ = params_.mask + tile.entry * params_.mask_batch_stride + tile.head * params_.mask_head_stride;
  }

  // Whether one row sees all keys of [first, end): nothing of them is hidden then.
  __device__ __forceinline__ bool one_sees_all(int first, int end) const {
    if constexpr (Config::kMask) return false;
    if constexpr (!Config::kVarlen) end = min(end, seqlen_.seqlen_k);  // beyond the tensor there are zeros
    return any_row([&](int, KeyInterval keys) { return keys.lo <= first && keys.hi >= end; });
  }
  __device__ __forceinline__ bool any_sees(int key) const {
    return any_row([&](int row, KeyInterval keys) {
      bool sees = keys.lo <= key && key < keys.hi;
      if constexpr (Config::kMask) sees = sees && mask_[row * params_.mask_row_stride + key * params_.mask_col_stride] != 0;
      return sees;
    });
  }

 private:
  template <typename Predicate>
  __device__ __forceinline__ bool any_row(Predicate predicate) const {
    bool any = false;
#pragma unroll 1  // the loading warpgroup has few registers
    for (int row = first_ + lane_id(); row < end_; row += kWarpSize)
      any |= predicate(row, row_interval(params_, seqlen_, intervals_, row));
    return warp_any(any);
  }

  const AttentionParams& params_;
  const SeqlenInfo seqlen_;
  const int first_, end_;  // rows
  const int* intervals_ = nullptr;
  const uint8* mask_ = nullptr;
};

// A block's values from key `first_key` on that no row sees and that are not finite become 0.
template <typename Config, typename Tile>
__device__ __forceinline__ void clear_hidden(Tile tile, const TileView<Config>& view, int first_key) {
  bool cleared = false;
#pragma unroll 1
  for (int first = 0; first < Tile::kRows; first += kWarpSize) {
    const int row = first + lane_id();
    const bool suspicious = row < Tile::kRows && row_reaches<typename Config::Element, 1>(tile, row);
    for (uint32 rows = warp_ballot(suspicious); rows != 0; rows &= rows - 1) {
      const int suspect = first + first_bit(rows);
      if (view.any_sees(first_key + suspect)) continue;
      clear_row(tile, suspect);
      cleared = true;
    }
  }
  if (cleared) fence_async_proxy();
}

// A warp calls: between the copy engine and the consumers.
template <typename Config>
__device__ __forceinline__ void clear_values(const ForwardSm90Params& params, ForwardSm90Traits<Config> shared) {
  Ring<2> tiles;
  Ring<Config::kStages> ring;
  for (;;) {
    const RowTile<Config> tile = known_tile<Config>(shared, tiles);
    const KeyBlocks blocks = tile.exists() ? blocks_of_tile(params, tile, shared.tile(tiles.slot())) : KeyBlocks{0, 0, 0, 0};
    sync_warp();
    if (lane_id() == 0) mbarrier_arrive(shared.tile_read(tiles.slot()));
    tiles.advance();
    if (!tile.exists()) return;
    const TileView<Config> view(params, tile);
    for (int n = blocks.end - 1; n >= blocks.first; --n) {
      const int first_key = n * Config::kBlockN;
      mbarrier_wait(shared.v_landed(ring.slot()), ring.parity());
      if (!view.one_sees_all(first_key, first_key + Config::kBlockN)) clear_hidden(shared.v(ring.slot()), view, first_key);
      sync_warp();
      if (lane_id() == 0) mbarrier_arrive(shared.v_loaded(ring.slot()));
      ring.advance();
    }
  }
}

// Rows of a packed tensor before the first offset are no entry's: out is 0 and lse -inf. (Those behind the last one have tiles.)
// A warp calls.
template <typename Config>
__device__ __forceinline__ void clear_rows(const AttentionParams& params) {
  using Element = typename Config::Element;
  const SeqlenInfo first(params, 0);
  for (int64 row = block_index(); row < first.first_q; row += num_blocks())
    for (int head = 0; head < params.num_heads; ++head) {
      Element* out = first.template rows<Element>(params.out, row, head);
      for (int column = lane_id(); column < params.head_dim_v; column += kWarpSize) out[column] = Element{};
      if (lane_id() != 0 || params.lse == nullptr) continue;
      const int64 place = head * params.lse_head_stride + row;
      params.lse[place] = bits_float(0xff800000u);  // -inf
      if (params.row_max != nullptr) params.row_max[place] = params.row_sum[place] = 0.0f;
    }
}

}  // namespace hfc
