// The backward pass in numbers: how its warps divide each product, and what lies where in shared memory.
#pragma once

#include "common/math.cuh"
#include "fa1/block_mask.cuh"
#include "isa.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

// The largest power of two that divides `number` and is at most `most`.
constexpr int common_power_of_two(int number, int most) {
  int power = 1;
  while (2 * power <= most && number % (2 * power) == 0) power *= 2;
  return power;
}

// Warp w belongs to key group w / kColumnWarps, which owns kWarpKeys keys:
//   scores, dp (rows x keys)       the group's first kScoreWarps warps by rows; probabilities and ds go through shared memory
//   dk, dv     (keys x head_dim)   the group's warps by columns
//   dq         (rows x head_dim)   kRowWarps by rows, kDqColumnWarps by columns, of all keys
template <typename Config>
struct Fa1BackwardTraits {
  using Element = typename Config::Element;
  static constexpr int kNumWarps = Config::kNumWarps;
  static constexpr int kThreads = kNumWarps * kWarpSize;
  static constexpr int kBr = Config::kBlockM;
  static constexpr int kBc = Config::kBlockN;
  static constexpr int kStages = Config::kStages;  // row blocks of q and dout in shared memory
  static constexpr bool kHoles = BlockMask<Config>::kHoles;

  static constexpr int kWarpKeys = Config::kWarpKeys;
  static constexpr int kKeyWarps = kBc / kWarpKeys;
  static constexpr int kColumnWarps = kNumWarps / kKeyWarps;
  static_assert(kKeyWarps * kWarpKeys == kBc && kColumnWarps * kKeyWarps == kNumWarps && kWarpKeys % 16 == 0);

  static constexpr int kScoreWarps = min(kColumnWarps, kBr / 16);
  static constexpr int kScoreRows = kBr / kScoreWarps;
  static constexpr int kM = kScoreRows / 16;
  static constexpr int kN = kWarpKeys / 8;
  static_assert(kM * 16 * kScoreWarps == kBr && kN <= 16);

  static constexpr int kKeyM = kWarpKeys / 16;                       // m-tiles of dk and dv
  static constexpr int kKeyN = Config::kHeadDim / kColumnWarps / 8;  // n-tiles of dk
  static constexpr int kKeyNV = Config::kHeadDimV / kColumnWarps / 8;
  static_assert(kKeyN % 2 == 0 && kKeyN * 8 * kColumnWarps == Config::kHeadDim);
  static_assert(kKeyNV % 2 == 0 && kKeyNV * 8 * kColumnWarps == Config::kHeadDimV);

  static constexpr int kRowWarps = min(kNumWarps, kBr / 16);
  static constexpr int kDqColumnWarps = common_power_of_two(Config::kHeadDim / 16, kNumWarps / kRowWarps);
  static constexpr int kDqM = kBr / kRowWarps / 16;
  static constexpr int kDqN = Config::kHeadDim / kDqColumnWarps / 8;
  static_assert(kDqM * 16 * kRowWarps == kBr && kDqN % 2 == 0);

  using TileK = SharedTile<Element, kBc, Config::kHeadDim>;
  using TileV = SharedTile<Element, kBc, Config::kHeadDimV>;
  using TileQ = SharedTile<Element, kBr, Config::kHeadDim>;
  using TileDout = SharedTile<Element, kBr, Config::kHeadDimV>;
  using TileP = SharedTile<Element, kBr, kBc>;

  // Shared memory: k | v | q stages | dout stages | p | ds | lse and delta stages | seen keys
  static constexpr int kK = 0;
  static constexpr int kV = kK + TileK::kBytes + kSharedGap;
  static constexpr int kQ = kV + TileV::kBytes + kSharedGap;
  static constexpr int kDout = kQ + kStages * TileQ::kBytes + kSharedGap;
  static constexpr int kP = kDout + kStages * TileDout::kBytes + kSharedGap;
  static constexpr int kDs = kP + TileP::kBytes + kSharedGap;
  static constexpr int kStatistics = kDs + TileP::kBytes + kSharedGap;
  static constexpr int kStatisticsBytes = 2 * kBr * int(sizeof(float));
  static constexpr int kSeen = kStatistics + kStages * kStatisticsBytes + kSharedGap;
  static constexpr int kSharedBytes = kSeen + (kHoles ? kNumWarps * 16 : 0);
  static_assert(kSharedBytes == Config::kSharedBytes, "fa1.py and this plan disagree");

  SharedPtr base = shared_base();
  int warp = warp_id();
  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileV v() const { return {base + kV}; }
  __device__ __forceinline__ TileQ q(int stage) const { return {base + (kQ + stage * TileQ::kBytes)}; }
  __device__ __forceinline__ TileDout dout(int stage) const { return {base + (kDout + stage * TileDout::kBytes)}; }
  __device__ __forceinline__ TileP p() const { return {base + kP}; }
  __device__ __forceinline__ TileP ds() const { return {base + kDs}; }
  __device__ __forceinline__ SharedPtr lse(int stage) const { return base + (kStatistics + stage * kStatisticsBytes); }
  __device__ __forceinline__ SharedPtr delta(int stage) const { return lse(stage) + kBr * int(sizeof(float)); }

  // Which of its keys some row of a warp's scores sees: bits as in mask.cuh, one word for each of a quad's lanes.
  __device__ __forceinline__ SharedPtr seen(int key_group, int score_warp) const {
    return base + (kSeen + ((key_group * kScoreWarps + score_warp) * 4 + lane_id() % 4) * 4);
  }
  __device__ __forceinline__ void mark_gaps() const {
    for (int end : {kV, kQ, kDout, kP, kDs, kStatistics, kSeen}) mark_shared_gap(base + (end - kSharedGap));
  }

  // Addresses that follow from these are computed anew from here on: kept across the loop they would take 40 registers.
  __device__ __forceinline__ void forget() {
    base = in_place(base);
    warp = in_place(warp);
  }

  __device__ __forceinline__ int key_group() const { return warp / kColumnWarps; }
  __device__ __forceinline__ int group_warp() const { return warp % kColumnWarps; }  // this warp inside its key group
  __device__ __forceinline__ int first_warp_key() const { return key_group() * kWarpKeys; }
  __device__ __forceinline__ int first_column() const { return group_warp() * 16; }  // of dk and dv, see pair_column
  __device__ __forceinline__ bool has_scores() const { return group_warp() < kScoreWarps; }
  __device__ __forceinline__ int first_score_row() const { return group_warp() * kScoreRows; }
  __device__ __forceinline__ bool has_dq() const { return warp < kRowWarps * kDqColumnWarps; }
  __device__ __forceinline__ int first_dq_row() const { return warp / kDqColumnWarps * kDqM * 16; }
  __device__ __forceinline__ int first_dq_column() const { return warp % kDqColumnWarps * 16; }
};

}  // namespace hfc
