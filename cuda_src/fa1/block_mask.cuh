// Which keys a row block sees. FlashAttention-1's loops ask for any pair of a row block i and a key block j, in any order, and
// every warp asks for all rows of the block at once, since warps split the keys.
#pragma once

#include "attn/mask.cuh"
#include "attn/row_mask.cuh"

namespace hfc {

// Row block i of a head. Key blocks between the first and the last key of `some` are visited, the others are not.
struct RowBlock {
  int i;
  KeyInterval some;   // keys that some row of the block may see
  KeyInterval every;  // keys that every row of the block sees, unless a dense mask or a bias takes them away

  __device__ __forceinline__ bool sees(int first_key, int end_key) const { return first_key < some.hi && end_key > some.lo; }
};

template <typename Config>
class BlockMask {
  static constexpr int kBr = Config::kBlockM;
  static constexpr int kBc = Config::kBlockN;

 public:
  static constexpr bool kHoles = Config::kIntervals || Config::kMask || Config::kBias;  // hidden keys inside `some`

  __device__ __forceinline__ BlockMask(const AttentionParams& params, const SeqlenInfo& seqlen, int head, int entry)
      : params_(params), seqlen_(seqlen) {
    if constexpr (Config::kMask) mask_ = params.mask + entry * params.mask_batch_stride + head * params.mask_head_stride;
    if constexpr (Config::kIntervals)
      intervals_ = params.key_intervals + entry * params.interval_batch_stride + head * params.interval_head_stride;
  }

  // All lanes of a warp call it for the same block.
  __device__ __forceinline__ RowBlock row_block(int i) const {
    const int first = i * kBr, last = min(first + kBr, seqlen_.seqlen_q) - 1;
    if constexpr (Config::kIntervals) return reduce_intervals(i, first, last);
    const KeyInterval top = window_interval(params_, seqlen_, first), bottom = window_interval(params_, seqlen_, last);
    return {i, {top.lo, bottom.hi}, {bottom.lo, top.hi}};
  }

  // The first of row blocks i, i + stride ... that sees key block j; i = num_row_blocks where there is none.
  __device__ __forceinline__ RowBlock next(int i, int j, int num_row_blocks, int stride = 1) const {
    RowBlock block{num_row_blocks, {0, 0}, {0, 0}};
    for (; i < num_row_blocks; i += stride) {
      block = row_block(i);
      if (!block.some.empty() && block.sees(j * kBc, (j + 1) * kBc)) return block;
    }
    block.i = num_row_blocks;
    return block;
  }

  // The keys that the windows leave to some row of the head. What lies outside is loaded as zeros, so that hidden keys cannot
  // reach the result even when they hold NaN.
  __device__ __forceinline__ KeyInterval head_keys() const {
    if (seqlen_.seqlen_q == 0) return {0, 0};
    return {window_interval(params_, seqlen_, 0).lo, window_interval(params_, seqlen_, seqlen_.seqlen_q - 1).hi};
  }

  __device__ __forceinline__ static Visibility visibility(const RowBlock& block, int first_key, int end_key) {
    if (!block.sees(first_key, end_key)) return Visibility::kNone;
    const bool all = !Config::kMask && first_key >= block.every.lo && end_key <= block.every.hi;
    return all ? Visibility::kAll : Visibility::kSome;
  }

  // The keys from `first_key` on that each of the lane's rows from `first_row` on sees: bits as in mask.cuh.
  template <int kM, int kN>
  __device__ __forceinline__ void look(uint32 (&visible)[2 * kM], int first_row, int first_key) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int row = first_row + row_of(i / 2, i % 2 * 2);
      const bool exists = row < seqlen_.seqlen_q;  // of the caller's arrays nothing more is read
      KeyInterval keys{0, 0};
      if (!(Config::kIntervals || Config::kMask) || exists) keys = row_interval(params_, seqlen_, intervals_, row);
      visible[i] = interval_bits<kN>(keys, first_key);
      if constexpr (Config::kMask)
        visible[i] = dense_bits<kN>(params_, mask_ + in_place(row) * params_.mask_row_stride, first_key, visible[i]);
    }
  }

 private:
  __device__ __forceinline__ RowBlock reduce_intervals(int i, int first, int last) const {
    constexpr int kInfinity = 0x7fffffff;
    KeyInterval some{kInfinity, 0}, every{0, kInfinity};
    for (int row = first + lane_id(); row <= last; row += kWarpSize) {
      const KeyInterval keys = row_interval(params_, seqlen_, intervals_, row);
      if (!keys.empty()) some = {min(some.lo, keys.lo), max(some.hi, keys.hi)};
      every = {max(every.lo, keys.lo), min(every.hi, keys.hi)};
    }
    some = {warp_min(some.lo), -warp_min(-some.hi)};
    every = {-warp_min(-every.lo), warp_min(every.hi)};
    return {i, some, every};
  }

  const AttentionParams& params_;
  const SeqlenInfo& seqlen_;
  const uint8* mask_ = nullptr;
  const int* intervals_ = nullptr;
};

}  // namespace hfc
