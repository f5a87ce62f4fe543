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

// Every kernel is told the same things; what a kernel does not use is null or 0.
struct AttentionParams {
  TensorRef q;                // (batch, seqlen_q, num_heads, head_dim)         varlen: (total_q, num_heads, head_dim)
  TensorRef k;                // (batch, seqlen_k, num_heads_k, head_dim)       varlen: (total_k, num_heads_k, head_dim)
  TensorRef v;                // (batch, seqlen_k, num_heads_k, head_dim_v)     varlen: (total_k, num_heads_k, head_dim_v)
  TensorRef out;              // (batch, seqlen_q, num_heads, head_dim_v)       varlen: (total_q, num_heads, head_dim_v)
  TensorRef dout;             // gradient of the loss by out, out's shape
  TensorRef dq;               // gradients by q, k, v, each of its tensor's shape
  TensorRef dk;
  TensorRef dv;
  TensorRef k_new;            // (batch, seqlen_new, num_heads_k, head_dim): appended to k, a cache
  TensorRef v_new;            // (batch, seqlen_new, num_heads_k, head_dim_v)
  float* lse;                 // (batch, num_heads, seqlen_q), natural log, or null     varlen: (num_heads, total_q)
  const float* dlse;          // gradient of the loss by lse, lse's shape and strides, or null
  float* delta;               // rowsum(dout * out) - dlse, lse's shape and strides
  float* dq_accum;            // fp32 sums of dq: FA2 in the order of dq_accum.cuh (Hopper: of BackwardConsumer::stage), FA1 as
                              // out_accum with head_dim
  int* row_block_keys;        // what rows see, a row block of the FA2 backward pass at a time: see RowBlockKeys
  float* out_accum;           // FA1: O in fp32, (batch, num_heads, seqlen_q, head_dim_v), rows padded to kHeadDimV
  float* row_max;             // m of each row, lse's shape and strides, base 2; or null (FA1: never)
  float* row_sum;             // l of each row, the sum of 2^(score - m)
  float* split_parts;         // decode: what the splits leave to be combined, see SplitParts
  uint32* split_arrivals;     // (tiles): splits that have left their part, 0 before and after; SplitParts says which tile
  const uint8* mask;          // (batch, num_heads, seqlen_q, seqlen_k), non-zero = attend; stride 0 broadcasts
  const int* key_intervals;   // (batch, num_heads, seqlen_q, 2): row i attends lo <= j < hi; stride 0 broadcasts
  const int* cu_seqlens_q;    // (batch + 1), null unless varlen
  const int* cu_seqlens_k;    // (batch + 1), null unless varlen
  const int* cache_seqlens;   // (batch): keys of each entry before seqlen_new are appended; null = all seqlen_k
  const int* cache_batch_idx; // (batch): which entry of k and v is this entry's cache; null = its own
  const int* cache_leftpad;   // (batch): keys at the start of a cache that do not count; null = none
  const int* block_table;     // (batch, seqlen_k / page_size): which page of k and v holds the keys; null unless paged
  const void* bias;           // (batch, num_heads, seqlen_q, seqlen_k), Config::Bias; stride 0 broadcasts
  float* dbias;               // (bias_batch, bias_heads, bias_rows, bias_cols), contiguous: summed over broadcast dimensions
  const float* alibi_slopes;  // (batch, num_heads): -slope * |i + seqlen_k - seqlen_q - j| is added
  const float* sinks;         // (num_heads): one more logit in the denominator, natural log, or null
  const int64* philox;        // {seed, offset} of the dropout's random numbers, in device memory
  int64 lse_batch_stride;
  int64 lse_head_stride;
  int64 mask_batch_stride;
  int64 mask_head_stride;
  int64 mask_row_stride;
  int64 mask_col_stride;
  int64 bias_batch_stride;
  int64 bias_head_stride;
  int64 bias_row_stride;
  int64 bias_col_stride;
  int64 interval_batch_stride;
  int64 interval_head_stride;
  int64 interval_row_stride;
  int64 alibi_batch_stride;
  int64 block_table_stride;
  int64 num_tiles;            // thread blocks with work
  int batch;                  // entries; varlen: one more entry holds the rows beyond the last offset
  int num_heads;
  int num_heads_k;
  int seqlen_q;               // varlen: total_q
  int seqlen_k;               // varlen: total_k
  int head_dim;
  int head_dim_v;
  int num_m_blocks;           // row blocks of one head; packed: of one head over all entries
  int num_n_blocks;           // key blocks of one head; packed: of one head over all entries
  int heads_per_section;      // (batch, head) pairs whose blocks run interleaved, see work_tile
  int num_splits;             // decode: thread blocks that share the keys of a tile of rows
  int seqlen_new;             // keys of k_new and v_new
  int cache_batch;            // entries of k and v; paged: pages
  int page_size;              // keys of a page, a multiple of 16
  int window_left;            // keys to the left of the diagonal a row sees, < 0 = all
  int window_right;           // keys to the right, < 0 = all; causal = 0
  int bias_batch;             // sizes of bias before broadcasting
  int bias_heads;
  int bias_rows;
  int bias_cols;
  float softmax_scale;
  float score_scale_log2;     // softmax_scale * log2(e); with softcap: log2(e)
  float softcap;              // 0 = off
  float softcap_inner;        // softmax_scale / softcap, 0 without softcap
  uint32 dropout_threshold;   // a probability is dropped where its 16 random bits are below
  float dropout_scale;        // 1 / (1 - p), p = dropout_threshold / 65536; 1 without dropout
};

}  // namespace hfc
