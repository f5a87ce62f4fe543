// The mask of one thread block's rows: the keys to loop over, and for each block of keys what each warp must hide.
#pragma once

#include "attn/mask.cuh"

namespace hfc {

// What a warp has to do with a block of keys.
enum class Visibility { kNone, kSome, kAll };

template <typename Config>
class RowMask {
  static constexpr int kWarpRows = Config::kBlockM / Config::kNumWarps;
  static constexpr int kRows = kWarpRows / 8;  // of a lane
  static constexpr int kN = Config::kBlockN / 8;

 public:
  static constexpr bool kHoles = Config::kIntervals || Config::kMask;  // keys inside the loop's range that no row may see
  static constexpr int kSharedBytes = Config::kIntervals ? (Config::kBlockM + Config::kNumWarps) * int(sizeof(KeyInterval)) : 0;

  // Synchronises the block when there are key intervals.
  __device__ __forceinline__ RowMask(const AttentionParams& params, const SeqlenInfo& seqlen, int first_row, int head, int entry,
                                     SharedPtr shared)
      : params_(params), seqlen_(seqlen), warp_(warp_id()), first_row_(first_row + warp_ * kWarpRows), shared_(shared) {
    const int end_row = min(first_row_ + kWarpRows, seqlen.seqlen_q);
    if constexpr (Config::kMask) mask_ = params.mask + entry * params.mask_batch_stride + head * params.mask_head_stride;
    if constexpr (Config::kIntervals) {
      const int* intervals = params.key_intervals + entry * params.interval_batch_stride + head * params.interval_head_stride;
      reduce_intervals(intervals, end_row);
    } else {
      const KeyInterval first = window_interval(params, seqlen, first_row_);
      const KeyInterval last = window_interval(params, seqlen, end_row - 1);
      union_ = first_row_ < end_row ? KeyInterval{first.lo, last.hi} : KeyInterval{0, 0};
      common_ = {last.lo, first.hi};
      const int end = min(first_row + Config::kBlockM, seqlen.seqlen_q);
      block_ = {window_interval(params, seqlen, first_row).lo, window_interval(params, seqlen, end - 1).hi};
    }
  }

  // The keys that some row of the block may see.
  __device__ __forceinline__ KeyInterval block_keys() const { return block_; }

  // What the intervals of the warp's rows say of the keys from `first_key`.
  __device__ __forceinline__ Visibility visibility(int first_key) const {
    if (first_key >= union_.hi || first_key + Config::kBlockN <= union_.lo) return Visibility::kNone;
    const bool all = first_key >= common_.lo && first_key + Config::kBlockN <= common_.hi;
    return !Config::kMask && all ? Visibility::kAll : Visibility::kSome;
  }

  // The keys that each of the lane's rows sees: bits as in mask.cuh. Returns whether there are any in this lane.
  __device__ __forceinline__ bool look(uint32 (&visible)[kRows], int first_key) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(i / 2, i % 2 * 2);
      visible[i] = interval_bits<kN>(interval(row), first_key);
      if constexpr (Config::kMask) {
        const bool exists = first_row_ + row < seqlen_.seqlen_q;
        const uint8* mask_row = mask_ + in_place(first_row_ + row) * params_.mask_row_stride;
        visible[i] = exists ? dense_bits<kN>(params_, mask_row, first_key, visible[i]) : 0;
      }
      any |= visible[i] != 0;
    }
    return any;
  }

 private:
  __device__ __forceinline__ KeyInterval interval(int row) const {
    if constexpr (Config::kIntervals) {
      const SharedPtr slot = shared_ + (warp_ * kWarpRows + row) * int(sizeof(KeyInterval));
      return {load_shared_int(slot), load_shared_int(slot + 4)};
    } else {
      return window_interval(params_, seqlen_, first_row_ + row);
    }
  }

  // Every row's interval goes to shared memory; the warp's and the block's unions are kept.
  __device__ __forceinline__ void reduce_intervals(const int* intervals, int end_row) {
    constexpr int kInfinity = 0x7fffffff;
    KeyInterval all{kInfinity, 0};
    common_ = {0, kInfinity};
    for (int row = lane_id(); row < kWarpRows; row += kWarpSize) {
      KeyInterval keys{0, 0};
      if (first_row_ + row < end_row) {
        keys = row_interval(params_, seqlen_, intervals, first_row_ + row);
        common_ = {max(common_.lo, keys.lo), min(common_.hi, keys.hi)};
      }
      if (!keys.empty()) all = {min(all.lo, keys.lo), max(all.hi, keys.hi)};
      const SharedPtr slot = shared_ + (warp_ * kWarpRows + row) * int(sizeof(KeyInterval));
      store_shared(slot, uint32(keys.lo), uint32(keys.hi));
    }
    union_ = {warp_min(all.lo), -warp_min(-all.hi)};
    common_ = {-warp_min(-common_.lo), warp_min(common_.hi)};
    const SharedPtr unions = shared_ + Config::kBlockM * int(sizeof(KeyInterval));
    if (lane_id() == 0) store_shared(unions + warp_ * int(sizeof(KeyInterval)), uint32(union_.lo), uint32(union_.hi));
    sync_threads();
    block_ = {kInfinity, 0};
#pragma unroll
    for (int warp = 0; warp < Config::kNumWarps; ++warp) {
      const SharedPtr slot = unions + warp * int(sizeof(KeyInterval));
      block_ = {min(block_.lo, load_shared_int(slot)), max(block_.hi, load_shared_int(slot + 4))};
    }
    if (block_.empty()) block_ = {0, 0};
  }

  const AttentionParams& params_;
  const SeqlenInfo& seqlen_;
  const uint8* mask_ = nullptr;
  int warp_;
  int first_row_;       // of the warp
  KeyInterval union_;   // keys that some row of the warp sees
  KeyInterval common_;  // keys that every row of the warp sees
  KeyInterval block_;   // keys that some row of the thread block sees
  SharedPtr shared_;
};

}  // namespace hfc
