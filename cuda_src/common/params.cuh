// Kernel parameters, one struct by value. hf_flash_cupy/params.py mirrors each field; every generated unit asserts it.
#pragma once

#include "common/types.cuh"

namespace hfc {

// A (batch, seqlen, heads, head_dim) tensor whose last dimension is contiguous. Strides in elements.
struct TensorRef {
  void* data;
  int64 batch_stride;
  int64 row_stride;
  int64 head_stride;
};

struct ForwardParams {
  TensorRef q;                // (batch, seqlen_q, num_heads, head_dim)         varlen: (total_q, num_heads, head_dim)
  TensorRef k;                // (batch, seqlen_k, num_heads_k, head_dim)       varlen: (total_k, num_heads_k, head_dim)
  TensorRef v;                // (batch, seqlen_k, num_heads_k, head_dim_v)     varlen: (total_k, num_heads_k, head_dim_v)
  TensorRef out;              // (batch, seqlen_q, num_heads, head_dim_v)       varlen: (total_q, num_heads, head_dim_v)
  float* lse;                 // (batch, num_heads, seqlen_q), natural log, or null     varlen: (num_heads, total_q)
  const uint8* mask;          // (batch, num_heads, seqlen_q, seqlen_k), non-zero = attend; stride 0 broadcasts
  const int* key_intervals;   // (batch, num_heads, seqlen_q, 2): row i attends lo <= j < hi; stride 0 broadcasts
  const int* cu_seqlens_q;    // (batch + 1), null unless varlen
  const int* cu_seqlens_k;    // (batch + 1), null unless varlen
  int64 lse_batch_stride;
  int64 lse_head_stride;
  int64 mask_batch_stride;
  int64 mask_head_stride;
  int64 mask_row_stride;
  int64 mask_col_stride;
  int64 interval_batch_stride;
  int64 interval_head_stride;
  int64 interval_row_stride;
  int64 num_tiles;            // row blocks of all heads and batch entries = thread blocks with work
  int batch;                  // entries; varlen: one more entry holds the rows beyond the last offset
  int num_heads;
  int num_heads_k;
  int seqlen_q;               // varlen: total_q
  int seqlen_k;               // varlen: total_k
  int head_dim;
  int head_dim_v;
  int num_m_blocks;           // row blocks of one head; packed: of one head over all entries
  int heads_per_section;      // (batch, head) pairs whose row blocks run interleaved, see work_tile
  int window_left;            // keys to the left of the diagonal a row sees, < 0 = all
  int window_right;           // keys to the right, < 0 = all; causal = 0
  float score_scale_log2;     // softmax_scale * log2(e); with softcap: log2(e)
  float softcap;              // 0 = off
  float softcap_inner;        // softmax_scale / softcap, 0 without softcap
};

}  // namespace hfc
