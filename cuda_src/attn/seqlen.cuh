// Where one batch entry's rows lie. Packed sequences (varlen) are known here and nowhere else.
#pragma once

#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

struct SeqlenInfo {
  int seqlen_q;
  int seqlen_k;
  int64 first_q;  // rows before this entry in a packed tensor
  int64 first_k;
  int batch;      // index for batch strides: 0 in a packed tensor

  __device__ __forceinline__ SeqlenInfo(const AttentionParams& params, int entry)
      : seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k), first_q(0), first_k(0), batch(entry) {
    if (params.cu_seqlens_q == nullptr) return;
    batch = 0;
    // Offsets are the caller's data: clamped, so that no value of theirs can lead outside the tensors.
    const bool tail = entry == params.batch;  // the rows beyond the last offset attend nothing
    const int begin_q = clamp(params.cu_seqlens_q[entry], params.seqlen_q);
    const int begin_k = tail ? 0 : clamp(params.cu_seqlens_k[entry], params.seqlen_k);
    const int end_q = tail ? params.seqlen_q : clamp(params.cu_seqlens_q[entry + 1], params.seqlen_q);
    const int end_k = tail ? 0 : clamp(params.cu_seqlens_k[entry + 1], params.seqlen_k);
    first_q = begin_q;
    first_k = begin_k;
    seqlen_q = max(end_q - begin_q, 0);
    seqlen_k = max(end_k - begin_k, 0);
  }

  // An entry that was looked up before.
  __device__ __forceinline__ SeqlenInfo(int seqlen_q, int seqlen_k, int first_q, int first_k, int batch)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k), first_q(first_q), first_k(first_k), batch(batch) {}

  template <typename Element>
  __device__ __forceinline__ Element* rows(const TensorRef& tensor, int64 first, int head) const {
    return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
           first * tensor.row_stride;
  }

 private:
  __device__ __forceinline__ static int clamp(int offset, int total) { return min(max(offset, 0), total); }
};

}  // namespace hfc
