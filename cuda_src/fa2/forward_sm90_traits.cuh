// What the warpgroups of the Hopper forward share: parameters, shared memory, and the events they wait for.
#pragma once

#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "tile/panels.cuh"
#include "tile/ring.cuh"

namespace hfc {

// hf_flash_cupy/sm90.py mirrors it. The maps' boxes are one panel wide: 64 rows of q, kBlockN of k and v, 16 of out.
struct ForwardSm90Params {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap out;
  AttentionParams attention;
  uint32* tile_counter;  // 0 before the launch and after it; null: tiles are dealt round
  int group;             // kPacksHeads: heads of queries that share a head of keys
  uint32 group_inverse;  // and 2^32 / group, rounded up
  uint8 padding[64 - (sizeof(AttentionParams) + 16) % 64];
};

constexpr int kUnitRows = 64;  // rows of a warpgroup

// Shared memory, from a multiple of 1024 bytes on:
//
//   | q  kQSlots × kWarpgroups × 64 rows (later out) | k  kStages × kBlockN rows | v  kStages × kBlockN rows | tiles | barriers |
//
// Events, one barrier a slot; who waits | who arrives:
//   q_loaded    its warpgroup  | the copy engine               q_released  the query loader | the warpgroup's 4 warps
//   k_loaded    consumers      | the copy engine               k_released  the key loader   | each warp of the consumers
//   v_loaded    consumers      | the copy engine               v_released  the key loader   | each warp of the consumers
//   tile_known  all but it     | the key loader                tile_read   the key loader   | everybody else, once a warp
// With kClears another warp looks at the values before the consumers do:
//   v_landed    that warp      | the copy engine               and v_loaded    consumers    | that warp
template <typename Config>
struct ForwardSm90Traits {
  using Element = typename Config::Element;
  static constexpr int kWarpgroups = Config::kWarpgroups;  // that compute; one more loads
  static constexpr int kWarps = 4 * kWarpgroups;
  static constexpr int kStages = Config::kStages;
  // With two the first scores of a tile are computed beside the last output of the tile before.
  static constexpr int kQSlots = Config::kFused ? 2 : 1;
  static constexpr int kTileSlots = 2;
  static constexpr bool kHoles = Config::kIntervals || Config::kMask;  // keys within a tile's range that no row may see
  static constexpr bool kClears = kHoles || Config::kLeft || Config::kVarlen;  // blocks may hold keys that nobody sees
  static constexpr int kLengths = 16, kBlocks = kLengths + (Config::kVarlen ? 16 : 0);  // parts of a tile's record
  static constexpr int kTileBytes = kBlocks + (kHoles ? 16 * (1 + kWarpgroups) : 0);
  static constexpr int kN = Config::kBlockN / 8;  // n-tiles of a block of keys
  static constexpr int kNV = Config::kHeadDimV / 8;  // n-tiles of the output
  static_assert(Config::kBlockN % 16 == 0 && Config::kHeadDim % 16 == 0 && Config::kHeadDimV % 16 == 0);
  static_assert(Config::kHeadDimV <= Config::kHeadDim, "out is staged where q was");
  // A warpgroup that passes blocks on between two tiles still holds the last v that it needs of the first.
  static_assert(ceil_div((kWarpgroups - 1) * kUnitRows, Config::kBlockN) + (Config::kLeft ? 1 : 0) <= kStages || !Config::kFused);
  static_assert(!(kHoles && Config::kFused), "rows of one tile may see blocks far apart");

  using TileQ = PanelTile<kUnitRows, Config::kHeadDim>;
  using TileK = PanelTile<Config::kBlockN, Config::kHeadDim>;
  using TileV = PanelTile<Config::kBlockN, Config::kHeadDimV>;

  static constexpr int kAlignment = 1024;  // of the swizzle's pattern
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQSlots * kWarpgroups * TileQ::kBytes;
  static constexpr int kV = kK + kStages * TileK::kBytes;
  static constexpr int kTiles = kV + kStages * TileV::kBytes;
  static constexpr int kBarriers = kTiles + kTileSlots * kTileBytes;
  static constexpr int kNumBarriers = 2 * (kQSlots * kWarpgroups + 2 * kStages + kTileSlots) + (kClears ? kStages : 0);
  static constexpr int kSharedBytes = kAlignment + kBarriers + 8 * kNumBarriers;
  static_assert(kSharedBytes == Config::kSharedBytes, "sm90.py and this plan disagree");

  SharedPtr base = align_up(shared_base(), kAlignment);

  __device__ __forceinline__ static int q_offset(int warpgroup, int slot) {
    return kQ + (slot * kWarpgroups + warpgroup) * TileQ::kBytes;
  }
  __device__ __forceinline__ static int k_offset(int slot) { return kK + slot * TileK::kBytes; }
  __device__ __forceinline__ static int v_offset(int slot) { return kV + slot * TileV::kBytes; }

  __device__ __forceinline__ TileQ q(int warpgroup, int slot) const { return {base + q_offset(warpgroup, slot)}; }
  __device__ __forceinline__ TileK k(int slot) const { return {base + k_offset(slot)}; }
  __device__ __forceinline__ TileV v(int slot) const { return {base + v_offset(slot)}; }
  __device__ __forceinline__ SharedPtr tile(int slot) const { return base + (kTiles + slot * kTileBytes); }

  __device__ __forceinline__ SharedPtr q_loaded(int warpgroup, int slot) const { return barrier(warpgroup * kQSlots + slot); }
  __device__ __forceinline__ SharedPtr q_released(int warpgroup, int slot) const {
    return barrier((kWarpgroups + warpgroup) * kQSlots + slot);
  }
  __device__ __forceinline__ SharedPtr k_loaded(int slot) const { return barrier(kRings + slot); }
  __device__ __forceinline__ SharedPtr k_released(int slot) const { return barrier(kRings + kStages + slot); }
  __device__ __forceinline__ SharedPtr v_loaded(int slot) const { return barrier(kRings + 2 * kStages + slot); }
  __device__ __forceinline__ SharedPtr v_released(int slot) const { return barrier(kRings + 3 * kStages + slot); }
  __device__ __forceinline__ SharedPtr tile_known(int slot) const { return barrier(kRings + 4 * kStages + slot); }
  __device__ __forceinline__ SharedPtr tile_read(int slot) const { return barrier(kRings + 4 * kStages + kTileSlots + slot); }
  __device__ __forceinline__ SharedPtr v_landed(int slot) const { return barrier(kRings + 4 * kStages + 2 * kTileSlots + slot); }

  // One thread calls, before any other uses a barrier.
  __device__ __forceinline__ void init_barriers() const {
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup)
      for (int slot = 0; slot < kQSlots; ++slot) {
        mbarrier_init(q_loaded(warpgroup, slot), 1);
        mbarrier_init(q_released(warpgroup, slot), 4);
      }
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(k_loaded(slot), 1);
      mbarrier_init(v_loaded(slot), 1);
      mbarrier_init(k_released(slot), kWarps);
      mbarrier_init(v_released(slot), kWarps);
      if constexpr (kClears) mbarrier_init(v_landed(slot), 1);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      mbarrier_init(tile_known(slot), 1);
      mbarrier_init(tile_read(slot), kWarps + (kClears ? 2 : 1));
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }

 private:
  static constexpr int kRings = 2 * kQSlots * kWarpgroups;
  __device__ __forceinline__ SharedPtr barrier(int index) const { return base + (kBarriers + 8 * index); }
};

}  // namespace hfc
