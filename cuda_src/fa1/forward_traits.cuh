// The forward pass in numbers: how its warps divide row blocks and the keys of a block, and what lies where in shared memory.
#pragma once

#include "fa1/exchange.cuh"
#include "isa.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

template <typename Config>
struct Fa1ForwardTraits {
  using Element = typename Config::Element;
  static constexpr int kNumWarps = Config::kNumWarps;
  static constexpr int kThreads = kNumWarps * kWarpSize;
  // A group of warps walks row blocks of its own past the key block that all share.
  static constexpr int kGroups = Config::kGroups;
  static constexpr int kGroupWarps = kNumWarps / kGroups;
  static constexpr int kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kBr = Config::kBlockM;
  static constexpr int kBc = Config::kBlockN;
  static constexpr int kWarpKeys = kBc / kGroupWarps;
  static constexpr int kSlab = Config::kSlab;  // columns of V whose products are reduced at once
  static constexpr int kSlabs = Config::kHeadDimV / kSlab;
  static constexpr int kM = kBr / 16;        // m-tiles of a row block
  static constexpr int kN = kWarpKeys / 8;   // n-tiles of a warp's keys
  static constexpr int kNV = kSlab / 8;      // n-tiles of a slab
  static_assert(kGroupWarps * kGroups == kNumWarps && kGroups < 16, "each group has a named barrier, 1 to 15");
  static_assert(kM * 16 == kBr && kN * 8 * kGroupWarps == kBc && kN % 2 == 0 && kN <= 16);
  static_assert(kSlab * kSlabs == Config::kHeadDimV && kNV % 2 == 0);

  using TileQ = SharedTile<Element, kBr, Config::kHeadDim>;
  using TileK = SharedTile<Element, kBc, Config::kHeadDim>;
  using TileV = SharedTile<Element, kBc, kSlab>;
  using WarpK = SharedTile<Element, kWarpKeys, Config::kHeadDim>;
  using WarpV = SharedTile<Element, kWarpKeys, kSlab>;
  using Rows = RowTable<kBr, kGroupWarps>;
  using Partials = PartialProducts<kM, kNV, kGroupWarps>;

  // Shared memory: k and v slabs of all; q, partial products, row maxima and row sums of each group
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kGroups * TileQ::kBytes + kSharedGap;
  static constexpr int kV = kK + TileK::kBytes + kSharedGap;
  static constexpr int kPartials = kV + kSlabs * TileV::kBytes + kSharedGap;
  static constexpr int kMaxima = kPartials + kGroups * Partials::kBytes + kSharedGap;
  static constexpr int kSums = kMaxima + kGroups * Rows::kBytes + kSharedGap;
  static constexpr int kSharedBytes = kSums + kGroups * Rows::kBytes;
  static_assert(kSharedBytes == Config::kSharedBytes, "fa1.py and this plan disagree");

  SharedPtr base = shared_base();
  int group = warp_id() / kGroupWarps;
  int warp = warp_id() % kGroupWarps;  // of its group
  __device__ __forceinline__ TileQ q() const { return {base + (kQ + group * TileQ::kBytes)}; }
  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileV v(int slab) const { return {base + (kV + slab * TileV::kBytes)}; }
  __device__ __forceinline__ WarpK warp_k() const { return {base + (kK + warp * WarpK::kBytes)}; }
  __device__ __forceinline__ WarpV warp_v(int slab) const { return {base + (kV + slab * TileV::kBytes + warp * WarpV::kBytes)}; }
  __device__ __forceinline__ Partials partials() const { return {base + (kPartials + group * Partials::kBytes), warp}; }
  __device__ __forceinline__ Rows maxima() const { return {base + (kMaxima + group * Rows::kBytes), warp}; }
  __device__ __forceinline__ Rows sums() const { return {base + (kSums + group * Rows::kBytes), warp}; }

  __device__ __forceinline__ int group_thread() const { return thread_id() % kGroupThreads; }
  // Waits for the warps of the group alone: one group's exchange and its way to device memory hide behind another's products.
  __device__ __forceinline__ void sync_group() const { named_barrier_sync(1 + group, kGroupThreads); }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kK, kV, kPartials, kMaxima, kSums}) mark_shared_gap(base + (end - kSharedGap));
  }
};

}  // namespace hfc
