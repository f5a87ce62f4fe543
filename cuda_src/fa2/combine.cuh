// Split keys ("Flash-Decoding"): every split of the keys leaves, for each row, its maximum m, its sum l and its output O, not
// normalised; together they are the row's: m = max m_s, l = Σ 2^(m_s − m) l_s, O = Σ 2^(m_s − m) O_s / l.
#pragma once

#include "attn/online_softmax.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "isa.cuh"
#include "tile/copy.cuh"

namespace hfc {

// What a row knows of the keys it has seen: their maximum m (base 2; any reference will do) and sum l.
struct RowStatistics {
  float maximum = -kFloatMax;
  float sum = 0.0f;
};

// A 16-byte chunk of a row's output, in fp32.
template <typename Element>
struct RowChunk {
  static constexpr int kColumns = 16 / sizeof(Element);
  float values[kColumns] = {};

  __device__ __forceinline__ void add(float factor, Chunk (&chunks)[kColumns / 4]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = fused_multiply_add(factor, bits_float(chunks[i / 4].words[i % 4]), values[i]);
  }
};

// A chunk of a row that has seen all its keys: normalised and, with its lse, written. The sink joins here, once.
template <typename Config>
__device__ __forceinline__ void store_row(const AttentionParams& params, int entry, int head, int row, int column,
                                          RowChunk<typename Config::Element> chunk, RowStatistics seen) {
  using Element = typename Config::Element;
  constexpr int kColumns = RowChunk<Element>::kColumns;
  float factor = 1.0f;
  if (params.sinks != nullptr) {
    const float logit = sink_score(params.sinks[head]);
    const float raised = max_float(seen.maximum, logit);
    factor = exp2_fast<Element>(seen.maximum - raised);
    seen.sum = fused_multiply_add(seen.sum, factor, exp2_fast<Element>(logit - raised));
    seen.maximum = raised;
  }
  if (params.lse != nullptr && column == 0) {
    const int64 index = entry * params.lse_batch_stride + head * params.lse_head_stride + row;
    const float lse = fused_multiply_add(seen.maximum, kLn2, natural_log(seen.sum));
    params.lse[index] = seen.sum == 0.0f ? bits_float(0xff800000u) : lse;
    if (params.row_max != nullptr) {
      params.row_max[index] = seen.maximum;
      params.row_sum[index] = seen.sum;
    }
  }
  if (column >= params.head_dim_v) return;
  factor = seen.sum == 0.0f ? 0.0f : factor / seen.sum;
  Chunk packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 2)
      packed.words[i] = pack2<Element>(chunk.values[2 * i] * factor, chunk.values[2 * i + 1] * factor);
    else
      packed.words[i] = float_bits(chunk.values[i] * factor);
  }
  Element* out = static_cast<Element*>(params.out.data) + entry * params.out.batch_stride + row * params.out.row_stride +
                 head * params.out.head_stride + column;
  if constexpr (Config::kVector)
    store_global_chunk(out, packed);
  else
    store_elements(out, packed, min(kColumns, params.head_dim_v - column));
}

// One thread block a row: each warp's lanes take the chunks of the row, its threads beyond them other splits.
template <typename Config>
__device__ __forceinline__ void fa2_combine(const AttentionParams& params) {
  using Element = typename Config::Element;
  constexpr int kColumns = RowChunk<Element>::kColumns;
  constexpr int kThreads = Config::kNumWarps * kWarpSize;
  constexpr int kChunks = Config::kHeadDimV / kColumns;                // of a row
  constexpr int kGroups = kThreads / kChunks;                          // of threads, each with its part of the splits
  constexpr int kPartBytes = Config::kHeadDimV * int(sizeof(float));   // of a group's sums in shared memory
  static_assert(kGroups >= 1 && Config::kSharedBytes == kGroups * kPartBytes);
  if (block_id() >= params.num_tiles) return;
  const int64 num_rows = int64(params.batch) * params.num_heads * params.seqlen_q;  // of one split
  const int64 row_index = block_id();

  RowStatistics seen;
  const float* maxima = params.split_max + row_index;
  const float* sums = params.split_sum + row_index;
  for (int split = lane_id(); split < params.num_splits; split += kWarpSize)
    seen.maximum = max_float(seen.maximum, maxima[split * num_rows]);
  seen.maximum = warp_max(seen.maximum);
  for (int split = lane_id(); split < params.num_splits; split += kWarpSize)
    seen.sum = fused_multiply_add(exp2_fast<Element>(maxima[split * num_rows] - seen.maximum), sums[split * num_rows], seen.sum);
  seen.sum = group_sum<kWarpSize>(seen.sum);

  const int group = thread_id() / kChunks, column = thread_id() % kChunks * kColumns;
  RowChunk<Element> chunk;
  if (group < kGroups) {
    const float* out = params.split_out + row_index * Config::kHeadDimV + column;
#pragma unroll 4
    for (int split = group; split < params.num_splits; split += kGroups) {
      if (sums[split * num_rows] == 0.0f) continue;  // it had no keys and wrote nothing
      Chunk part[kColumns / 4];
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) part[i] = load_global_chunk(out + split * num_rows * Config::kHeadDimV + 4 * i);
      chunk.add(exp2_fast<Element>(maxima[split * num_rows] - seen.maximum), part);
    }
    const SharedPtr mine = shared_base() + (group * kPartBytes + column * int(sizeof(float)));
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      Chunk values;
#pragma unroll
      for (int j = 0; j < 4; ++j) values.words[j] = float_bits(chunk.values[4 * i + j]);
      store_shared(mine + 16 * i, values);
    }
  }
  sync_threads();
  if (group > 0) return;
  for (int other = 1; other < kGroups; ++other) {
    Chunk part[kColumns / 4];
    const SharedPtr theirs = shared_base() + (other * kPartBytes + column * int(sizeof(float)));
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) part[i] = load_shared_chunk(theirs + 16 * i);
    chunk.add(1.0f, part);
  }
  const DivMod row = divmod(row_index, params.seqlen_q);
  const DivMod head = divmod(row.quotient, params.num_heads);
  store_row<Config>(params, int(head.quotient), int(head.remainder), int(row.remainder), column, chunk, seen);
}

}  // namespace hfc
