// The forward pass in numbers: how its warps divide the keys of a block, and what lies where in shared memory.
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
  static constexpr int kBr = Config::kBlockM;
  static constexpr int kBc = Config::kBlockN;
  static constexpr int kWarpKeys = kBc / kNumWarps;
  static constexpr int kSlab = Config::kSlab;  // columns of V whose products are reduced at once
  static constexpr int kSlabs = Config::kHeadDimV / kSlab;
  static constexpr int kM = kBr / 16;        // m-tiles of a row block
  static constexpr int kN = kWarpKeys / 8;   // n-tiles of a warp's keys
  static constexpr int kNV = kSlab / 8;      // n-tiles of a slab
  static_assert(kM * 16 == kBr && kN * 8 * kNumWarps == kBc && kN % 2 == 0 && kN <= 16);
  static_assert(kSlab * kSlabs == Config::kHeadDimV && kNV % 2 == 0);

  using TileQ = SharedTile<Element, kBr, Config::kHeadDim>;
  using TileK = SharedTile<Element, kBc, Config::kHeadDim>;
  using TileV = SharedTile<Element, kBc, kSlab>;
  using WarpK = SharedTile<Element, kWarpKeys, Config::kHeadDim>;
  using WarpV = SharedTile<Element, kWarpKeys, kSlab>;
  using Rows = RowTable<kBr, kNumWarps>;
  using Partials = PartialProducts<kM, kNV, kNumWarps>;

  // Shared memory: q | k | v slabs | partial products | row maxima | row sums
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + TileQ::kBytes + kSharedGap;
  static constexpr int kV = kK + TileK::kBytes + kSharedGap;
  static constexpr int kPartials = kV + kSlabs * TileV::kBytes + kSharedGap;
  static constexpr int kMaxima = kPartials + Partials::kBytes + kSharedGap;
  static constexpr int kSums = kMaxima + Rows::kBytes + kSharedGap;
  static constexpr int kSharedBytes = kSums + Rows::kBytes;
  static_assert(kSharedBytes == Config::kSharedBytes, "fa1.py and this plan disagree");

  SharedPtr base = shared_base();
  int warp = warp_id();
  __device__ __forceinline__ TileQ q() const { return {base + kQ}; }
  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileV v(int slab) const { return {base + (kV + slab * TileV::kBytes)}; }
  __device__ __forceinline__ WarpK warp_k() const { return {base + (kK + warp * WarpK::kBytes)}; }
  __device__ __forceinline__ WarpV warp_v(int slab) const { return {base + (kV + slab * TileV::kBytes + warp * WarpV::kBytes)}; }
  __device__ __forceinline__ Partials partials() const { return {base + kPartials, warp}; }
  __device__ __forceinline__ Rows maxima() const { return {base + kMaxima, warp}; }
  __device__ __forceinline__ Rows sums() const { return {base + kSums, warp}; }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kK, kV, kPartials, kMaxima, kSums}) mark_shared_gap(base + (end - kSharedGap));
  }
};

}  // namespace hfc
