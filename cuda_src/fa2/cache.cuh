// Where the keys of one batch entry lie: in a row of a cache, whole or filled up to some length, or in pages.
#pragma once

#include "attn/seqlen.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

constexpr int kPageUnit = 16;  // keys that always lie in one page, one after the other

// Lengths, entries and pages are the caller's data, on the device: clamped, so that none leads outside the tensors.
template <typename Config>
class CacheRows {
 public:
  __device__ __forceinline__ CacheRows(const AttentionParams& params, int entry) : params_(params), entry_(entry) {
    if constexpr (Config::kPaged) pages_ = params.block_table + entry * params.block_table_stride;
    if (params.cache_batch_idx != nullptr) entry_ = min(max(params.cache_batch_idx[entry], 0), params.cache_batch - 1);
    if (params.cache_leftpad != nullptr) first_ = min(max(params.cache_leftpad[entry], 0), params.seqlen_k);
    length_ = params.seqlen_k;
    if (params.cache_seqlens != nullptr) {
      absent_ = params.cache_seqlens[entry] < 0;
      length_ = min(max(params.cache_seqlens[entry], 0), params.seqlen_k);
    }
  }

  // Whether the entry only fills up the batch: it has no keys, and gets none.
  __device__ __forceinline__ bool absent() const { return absent_; }

  // Keys of the cache before those of k_new, from its beginning.
  __device__ __forceinline__ int length() const { return length_; }

  // The rows and keys of the entry, those of k_new among them; key 0 is the first that counts.
  __device__ __forceinline__ SeqlenInfo seqlen(int entry) const {
    SeqlenInfo seqlen(params_, entry);
    const int end = absent_ ? 0 : min<int64>(int64(length_) + params_.seqlen_new, params_.seqlen_k);
    seqlen.first_k = first_;
    seqlen.seqlen_k = max(end - first_, 0);
    return seqlen;
  }

  // Key `index` of the cache's row, which exists; up to kPageUnit from a multiple of it follow at the row stride.
  template <typename Element>
  __device__ __forceinline__ Element* row(const TensorRef& tensor, int head, int index) const {
    Element* data = static_cast<Element*>(tensor.data) + head * tensor.head_stride;
    if constexpr (Config::kPaged) {
      const int page = index / params_.page_size;
      const int64 place = min(max(pages_[page], 0), params_.cache_batch - 1);
      return data + place * tensor.batch_stride + (index - page * params_.page_size) * tensor.row_stride;
    } else {
      return data + entry_ * tensor.batch_stride + index * tensor.row_stride;
    }
  }

 private:
  const AttentionParams& params_;
  int64 entry_;
  int first_ = 0;
  int length_;
  bool absent_ = false;
  const int* pages_ = nullptr;
};

}  // namespace hfc
