// The fp32 sums of dq that the thread blocks of all key blocks add to. A private order: each row block is one contiguous tile
// in which every thread's values lie where one warp's neighbouring lanes add to neighbouring addresses.
#pragma once

#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "common/params.cuh"
#include "isa.cuh"
#include "tile/fragment.cuh"

namespace hfc {

// The tile of one row block, or one of its kChunks parts by columns: a warp owns kM m-tiles and every kColumnWarps-th pair of
// n-tiles. What would take too many registers is multiplied in kParts by columns, kN n-tiles each.
template <typename Config>
struct DqTile {
  static constexpr int kThreads = Config::kNumWarps * kWarpSize;
  static constexpr int kWidth = Config::kHeadDim / Config::kChunks;
  static constexpr int kElements = Config::kBlockM * kWidth;
  static constexpr int kColumnWarps = Config::kNumWarps / Config::kRowWarps;
  static constexpr int kM = Config::kBlockM / Config::kRowWarps / 16;
  static constexpr int kAllN = kWidth / kColumnWarps / 8;
  static constexpr int kMost = kWidth > 128 ? 32 : 64;  // registers of a lane: dk and dv leave fewer beside wide rows
  static constexpr int kParts = kM * kAllN * 4 > kMost ? kM * kAllN * 4 / kMost : 1;
  static constexpr int kN = kAllN / kParts;
  static_assert(kM * 16 * Config::kRowWarps == Config::kBlockM && kAllN * 8 * kColumnWarps == kWidth);
  static_assert(kN % 2 == 0 && kN * kParts == kAllN);

  float* data;

  // Packed entries: an entry's row blocks follow those of the entries before, each of which may end in one that is not full.
  __device__ __forceinline__ DqTile(const AttentionParams& params, const SeqlenInfo& seqlen, int m_block, int head, int entry,
                                    int chunk)
      : data(params.dq_accum) {
    const int64 pair = Config::kVarlen ? head : int64(entry) * params.num_heads + head;
    int64 block = pair * num_row_blocks<Config>(params) + m_block;
    if constexpr (Config::kVarlen) block += seqlen.first_q / Config::kBlockM + entry;
    data += (block * Config::kChunks + chunk) * kElements;
  }

  __device__ __forceinline__ static int first_row() { return warp_id() / kColumnWarps * kM * 16; }
  __device__ __forceinline__ static int first_column(int part) {
    return part * (kWidth / kParts) + warp_id() % kColumnWarps * 16;
  }

  __device__ __forceinline__ void add(int part, const float (&values)[kM][kN][4]) const {
    for_each(part, [&](float* target, int i, int j, int e) {
      float group[kReduceWidth];
#pragma unroll
      for (int x = 0; x < kReduceWidth; ++x) group[x] = values[i][j][e + x];
      reduce_add(target, group);
    });
  }
  __device__ __forceinline__ void load(int part, float (&values)[kM][kN][4]) const {
    for_each(part, [&](float* source, int i, int j, int e) {
#pragma unroll
      for (int x = 0; x < kReduceWidth; ++x) values[i][j][e + x] = source[x];
    });
  }
  __device__ __forceinline__ void clear() const {
    for (int i = thread_id() * 4; i < kElements; i += kThreads * 4) store_global_chunk(data + i, Chunk{});
  }

 private:
  // Visits every group of kReduceWidth values of this thread.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int part, Visit visit) const {
    float* address = data + part * (kElements / kParts) + thread_id() * kReduceWidth;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; e += kReduceWidth) {
          visit(address, i, j, e);
          address += kThreads * kReduceWidth;
        }
  }
};

}  // namespace hfc
