// Split keys ("Flash-Decoding"): every split of the keys leaves, for each row, its maximum m, its sum l and its output O, not
// normalised; together they are the row's: m = max m_s, l = Σ 2^(m_s − m) l_s, O = Σ 2^(m_s − m) O_s / l. The thread block
// that is the last of a tile's to leave its part does this, so that no other kernel has to start and nobody waits.
#pragma once

#include "arrival.cuh"
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

// The parts of a tile: one tile's thread blocks, each with its split of the keys, are `step_` apart in the grid.
template <typename Config>
class SplitParts {
 public:
  __device__ __forceinline__ SplitParts(const AttentionParams& params, int entry, int split)
      : rows_(min<int>(Config::kBlockM, params.num_heads / params.num_heads_k * params.seqlen_q)),
        step_(int64(params.num_heads_k) * params.num_m_blocks * Config::kVChunks),
        first_(block_id() - split * step_),
        outs_(params.split_parts),
        statistics_(params.split_parts + params.num_tiles * rows_ * Config::kHeadDimV),
        arrivals_(params.split_arrivals + (first_ - int64(entry) * (params.num_splits - 1) * step_)) {}

  // Of a row of the tile: its kHeadDimV columns; its maximum and sum.
  __device__ __forceinline__ float* out(int split, int row) const { return outs_ + place(split, row) * Config::kHeadDimV; }
  __device__ __forceinline__ float* statistics(int split, int row) const { return statistics_ + place(split, row) * 2; }

  // How many of the tile's thread blocks have left their parts; 0 again after the last.
  __device__ __forceinline__ uint32* arrivals() const { return arrivals_; }

 private:
  __device__ __forceinline__ int64 place(int split, int row) const { return (first_ + split * step_) * rows_ + row; }

  int rows_;  // of a full tile
  int64 step_;
  int64 first_;
  float* outs_;
  float* statistics_;
  uint32* arrivals_;
};

// Whether this thread block, whose part is written, is its tile's last. `flag`: a word of shared memory.
template <typename Config>
__device__ __forceinline__ bool is_last_split(const AttentionParams& params, const SplitParts<Config>& parts, SharedPtr flag) {
  const uint32 last = uint32(params.num_splits - 1);
  sync_threads();
  if (thread_id() == 0) store_shared(flag, count_arrival(parts.arrivals(), last));
  sync_threads();
  return load_shared(flag) == last;
}

// A row's statistics over all splits, to all lanes of a warp.
template <typename Config>
__device__ __forceinline__ RowStatistics combined_statistics(const AttentionParams& params, const SplitParts<Config>& parts,
                                                             int row) {
  RowStatistics seen;
  for (int split = lane_id(); split < params.num_splits; split += kWarpSize)
    seen.maximum = max_float(seen.maximum, parts.statistics(split, row)[0]);
  seen.maximum = warp_max(seen.maximum);
  for (int split = lane_id(); split < params.num_splits; split += kWarpSize) {
    const float* part = parts.statistics(split, row);
    seen.sum = fused_multiply_add(exp2_fast<typename Config::Element>(part[0] - seen.maximum), part[1], seen.sum);
  }
  seen.sum = group_sum<kWarpSize>(seen.sum);
  return seen;
}

// The sum of the groups' chunks, in their order, to the threads of the first. Every thread of the block is here.
template <typename Chunks>
__device__ __forceinline__ Chunks group_total(SharedPtr sums, Chunks chunk, int items, int groups) {
  constexpr int kChunks = Chunks::kColumns / 4;
  const SharedPtr mine = sums + thread_id() * (16 * kChunks);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    Chunk values;
#pragma unroll
    for (int j = 0; j < 4; ++j) values.words[j] = float_bits(chunk.values[4 * i + j]);
    store_shared(mine + 16 * i, values);
  }
  sync_threads();
  if (thread_id() >= items) return chunk;
  for (int other = 1; other < groups; ++other) {
    Chunk part[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) part[i] = load_shared_chunk(mine + (other * items * kChunks + i) * 16);
    chunk.add(1.0f, part);
  }
  return chunk;
}

// The first `rows` rows of a tile from its parts, in the order of the splits, whoever does it: `store` takes a row, a column, its
// chunk and the row's statistics. Where the tile has fewer chunks than there are threads, groups of threads share the splits.
template <typename Config, typename Shared, typename Store>
__device__ __forceinline__ void combine_splits(const Shared& shared, const AttentionParams& params,
                                               const SplitParts<Config>& parts, int rows, Store store) {
  using Element = typename Config::Element;
  using Chunks = RowChunk<Element>;
  constexpr int kThreads = Config::kNumWarps * kWarpSize;
  constexpr int kColumns = Chunks::kColumns, kPerRow = Config::kHeadDimV / kColumns;
  static_assert(Shared::TilePart::kBytes >= kWarpSize * kColumns * int(sizeof(float)));  // the groups' sums fit a warp's place
  constexpr int kAhead = 4;  // splits that a thread reads at once
  const int items = rows * kPerRow, groups = max(kThreads / items, 1);
  const int group = thread_id() / items;
  float maxima[kAhead];
  Chunk read[kAhead][kColumns / 4];
  auto load = [&](int item, int first_split) {
    if (group >= groups || item >= items) return;
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int split = first_split + ahead * groups;
      if (split >= params.num_splits) return;
      maxima[ahead] = parts.statistics(split, item / kPerRow)[0];
      const float* out = parts.out(split, item / kPerRow) + item % kPerRow * kColumns;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) read[ahead][i] = load_arrived_chunk(out + 4 * i);
    }
  };
  int item = thread_id() - group * items;
  load(item, group);  // on its way while the warps find the statistics
  for (int row = warp_id(); row < rows; row += Config::kNumWarps) {
    const RowStatistics seen = combined_statistics(params, parts, row);
    if (lane_id() == 0) store_shared(shared.statistics(0, row), float_bits(seen.maximum), float_bits(seen.sum));
  }
  sync_threads();
  for (; item < items; item += kThreads, load(item, group)) {  // once, where there are several groups
    const SharedPtr statistics = shared.statistics(0, item / kPerRow);
    const RowStatistics seen{bits_float(load_shared(statistics)), bits_float(load_shared(statistics + 4))};
    Chunks chunk;
    for (int first = group; group < groups && first < params.num_splits;) {
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead)
        if (first + ahead * groups < params.num_splits) chunk.add(exp2_fast<Element>(maxima[ahead] - seen.maximum), read[ahead]);
      first += kAhead * groups;
      load(item, first);
    }
    if (groups > 1) chunk = group_total(shared.part(0).base, chunk, items, groups);
    if (group == 0) store(item / kPerRow, item % kPerRow * kColumns, chunk, seen);
  }
}

}  // namespace hfc
