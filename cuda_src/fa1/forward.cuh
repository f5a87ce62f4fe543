// FlashAttention-1, forward pass (Dao et al. 2022, Algorithm 1). One thread block walks a whole head of one batch entry: the
// outer loop takes a block of keys and values into shared memory, the inner loop takes all row blocks past it. O, l and m live
// in device memory and are read and written at every visit. Groups of warps walk the inner loop side by side, each past every
// kGroups-th row block. The warps of a group split the keys ("split-K"): each multiplies all rows of the group's row block with
// its own keys, and maxima, sums and products are put together through shared memory.
//
// In the paper's letters: B_r = kBr rows, B_c = kBc keys, T_r row blocks i, T_c key blocks j.
#pragma once

#include "attn/dropout.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "fa1/block_mask.cuh"
#include "fa1/exchange.cuh"
#include "fa1/forward_traits.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace hfc {

// m and l of one row.
struct RowState {
  float max;  // base 2
  float sum;
};

template <typename Config>
class Fa1Forward {
  using Traits = Fa1ForwardTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  using Mask = BlockMask<Config>;
  using Partials = typename Traits::Partials;
  static constexpr int kM = Traits::kM, kN = Traits::kN, kNV = Traits::kNV, kOwn = Partials::kOwn;

 public:
  __device__ __forceinline__ Fa1Forward(const AttentionParams& params, const SeqlenInfo& seqlen, int head, int entry)
      : params_(params), seqlen_(seqlen), head_(head), entry_(entry), mask_(params, seqlen, head, entry) {
    shared_.mark_gaps();
    num_row_blocks_ = ceil_div(seqlen.seqlen_q, Traits::kBr);
    q_ = seqlen.template rows<Element>(params.q, seqlen.first_q, head);
    out_ = seqlen.template rows<Element>(params.out, seqlen.first_q, head);
    first_row_number_ = seqlen.batch * params.lse_batch_stride + head * params.lse_head_stride + seqlen.first_q;
    // O: (batch, num_heads, seqlen_q, kHeadDimV), head_dim_v rounded up so that pairs of elements are aligned
    const int64 rows = (int64(seqlen.batch) * params.num_heads + head) * params.seqlen_q + seqlen.first_q;
    out_accum_ = params.out_accum + rows * Config::kHeadDimV;
  }

  __device__ __forceinline__ void run() {
    finish_empty_blocks();
    const int head_k = head_ / (params_.num_heads / params_.num_heads_k);
    const Element* k = seqlen_.template rows<Element>(params_.k, seqlen_.first_k, head_k);  // (seqlen_k, head_dim)
    const Element* v = seqlen_.template rows<Element>(params_.v, seqlen_.first_k, head_k);  // (seqlen_k, head_dim_v)
    const KeyInterval keys = mask_.head_keys();
    for (int j = keys.lo / Traits::kBc; j * Traits::kBc < keys.hi; ++j) {  // line 5
      RowBlock block = mask_.next(shared_.group, j, num_row_blocks_, Traits::kGroups);
      const bool seen = block.i < num_row_blocks_;
      if (!sync_threads_any(seen)) continue;  // every warp has left the previous key block
      load_keys(k, v, keys, j);               // line 6
      if (seen) load_q(block.i);
      copy_async_commit();
      copy_async_wait<0>();
      sync_threads();
      while (block.i < num_row_blocks_) {  // line 7
        const RowBlock next = mask_.next(block.i + Traits::kGroups, j, num_row_blocks_, Traits::kGroups);
        step(block, next.i, j);
        block = next;
      }
    }
  }

 private:
  // Lines 8 to 13 for row block i, whose Q is in shared memory, and key block j. Q of block `next` is on its way at the end.
  __device__ __forceinline__ void step(const RowBlock& block, int next, int j) {
    const bool first = j == block.some.lo / Traits::kBc, last = j == (block.some.hi - 1) / Traits::kBc;
    RowState before[2];  // line 8: l_i, m_i of the rows whose O this warp puts together
#pragma unroll
    for (int half = 0; half < 2; ++half) before[half] = load_state(own_row(block.i, half), first);

    float scores[kM][kN][4];  // S_ij, then P̃_ij: the warp's own keys
    uint32 columns;
    const bool busy = compute_scores(scores, columns, block, j);  // line 9
    float block_max[2];  // m̃_ij
    exponentiate(scores, block_max);  // line 10; from its barrier on nobody reads Q_i
    if (next < num_row_blocks_) load_q(next);
    copy_async_commit();
    if constexpr (Config::kDropout) drop(scores, block.i, j);
    uint32 probabilities[Traits::kWarpKeys / Product<Element>::kK][kM][4];
    to_operands<Element>(probabilities, scores);

    RowFactors factors[2];
#pragma unroll 1
    for (int slab = 0; slab < Traits::kSlabs; ++slab) {
      float old[kOwn][4];  // line 8: O_i
      load_out(old, block.i, slab, first);
      float product[kM][kNV][4];  // the warp's own share of P̃_ij V_j
      clear(product);
      if (busy)
        gemm_operands<Multiply>(product, probabilities, shared_.warp_v(slab), [&](int k, uint32(&words)[2]) {
          if constexpr (Mask::kHoles) keep_columns<Element>(columns, k, words);
        });
      if (slab > 0) shared_.sync_group();  // every warp has left the previous slab's products
      if (busy) shared_.partials().put(product);
      if (slab == Traits::kSlabs - 1) copy_async_wait<0>();
      shared_.sync_group();  // the products of all warps have come, at the end Q of the next block too
      if (!shared_.partials().owns()) continue;
      float sum[kOwn][4];
      shared_.partials().sum(sum, [&](int warp) { return block.sees(warp_first_key(j, warp), warp_first_key(j, warp + 1)); });
      if (slab == 0) update_states(factors, before, block_max, block.i, last);  // line 11
      store_out(old, sum, factors, block.i, slab, last);                        // line 12
    }
  }

  struct RowFactors {
    float old, fresh;  // of O_i and of P̃_ij V_j in line 12
  };

  __device__ __forceinline__ static int warp_first_key(int j, int warp) { return j * Traits::kBc + warp * Traits::kWarpKeys; }

  // The two rows of the fragments that this lane puts together.
  __device__ __forceinline__ int own_row(int i, int half) const {
    return i * Traits::kBr + row_of(shared_.partials().own_row_tile(), 2 * half);
  }

  // Scores of base 2, hidden ones -inf. Returns false where the warp's keys are hidden from the whole block.
  __device__ __forceinline__ bool compute_scores(float (&scores)[kM][kN][4], uint32& columns, const RowBlock& block, int j) {
    const int first_row = block.i * Traits::kBr, first_key = warp_first_key(j, shared_.warp);
    const Visibility visibility = Mask::visibility(block, first_key, first_key + Traits::kWarpKeys);
    if (visibility == Visibility::kNone) {
      for_each_score(scores, [](float) { return bits_float(0xff800000u); });
      return false;
    }
    gemm_transposed<Multiply>(scores, shared_.q(), 0, shared_.warp_k());
    scale_scores(scores, modify_scores<Config>(scores, params_, seqlen_, ScoreTile{first_row, first_key, head_, entry_}));
    if (visibility == Visibility::kSome) {
      uint32 visible[2 * kM];
      mask_.template look<kM, kN>(visible, first_row, first_key);
      hide(scores, visible);
    }
    if constexpr (Mask::kHoles) columns = seen_columns(scores);
    return true;
  }

  // P̃ = exp(S - m̃), m̃ the rows' maxima over the keys of all warps; the warp's row sums go to shared memory.
  __device__ __forceinline__ void exponentiate(float (&scores)[kM][kN][4], float (&block_max)[2]) {
    float maxima[2 * kM], sums[2 * kM];
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) {
      maxima[row] = -kFloatMax;  // finite, so that hidden scores (-inf) minus it stay -inf
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) maxima[row] = max_float(maxima[row], scores[row / 2][j][row % 2 * 2 + e]);
    }
    quad_max(maxima);
    shared_.maxima().put(maxima);
    shared_.sync_group();
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) {
      maxima[row] = shared_.maxima().reduce(row_of(row / 2, row % 2 * 2), [](float a, float b) { return max_float(a, b); });
      if (row / 2 == shared_.partials().own_row_tile()) block_max[row % 2] = maxima[row];
      sums[row] = 0.0f;
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[row / 2][j][row % 2 * 2 + e];
          score = exp2_fast<Element>(score - maxima[row]);
          sums[row] += score;
        }
    }
    quad_sum(sums);
    shared_.sums().put(sums);
  }

  // Of the probabilities that the sums have counted, some do not reach the output.
  __device__ __forceinline__ void drop(float (&probabilities)[kM][kN][4], int i, int j) {
    uint32 kept[2 * kM];
    kept_bits<Config, kM, kN>(kept, params_, seqlen_, ScoreTile{i * Traits::kBr, warp_first_key(j, shared_.warp), head_, entry_});
    replace_unset(probabilities, kept, 0.0f);
  }

  // Line 2 at the first visit, without a pass of its own. A sink is a score without a value that all rows start from.
  __device__ __forceinline__ RowState load_state(int row, bool first) const {
    if (first) return initial_state();
    if (row >= seqlen_.seqlen_q) return {-kFloatMax, 0.0f};
    return {params_.row_max[first_row_number_ + row], params_.row_sum[first_row_number_ + row]};
  }

  __device__ __forceinline__ RowState initial_state() const {
    const bool no_entry = Config::kVarlen && entry_ == params_.batch;  // the rows beyond the last offset
    if (params_.sinks == nullptr || no_entry) return {-kFloatMax, 0.0f};
    const float sink = sink_score(params_.sinks[head_]);
    return {max_float(sink, -kFloatMax), sink < -kFloatMax ? 0.0f : 1.0f};
  }

  // Line 11, and line 13's l and m. `factors` are those of line 12: O stays normalised, as the paper has it.
  __device__ __forceinline__ void update_states(RowFactors (&factors)[2], const RowState (&before)[2],
                                                const float (&block_max)[2], int i, bool last) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(i, half);
      const float block_sum = shared_.sums().reduce(row - i * Traits::kBr, [](float a, float b) { return a + b; });  // l̃_ij
      RowState state;
      state.max = max_float(before[half].max, block_max[half]);
      const float old = exp2_fast<Element>(before[half].max - state.max) * before[half].sum;
      const float fresh = exp2_fast<Element>(block_max[half] - state.max);
      state.sum = fused_multiply_add(fresh, block_sum, old);
      const float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
      factors[half] = {old * inverse, fresh * inverse * (Config::kDropout ? params_.dropout_scale : 1.0f)};
      if (shared_.partials().own_column_tile() != 0 || lane_id() % 4 != 0 || row >= seqlen_.seqlen_q) continue;
      store_state(row, state);
      if (last) store_lse(row, state);
    }
  }

  __device__ __forceinline__ void store_state(int row, RowState state) const {
    params_.row_max[first_row_number_ + row] = state.max;
    params_.row_sum[first_row_number_ + row] = state.sum;
  }

  // The logarithm of the denominator; -inf for a row without keys.
  __device__ __forceinline__ void store_lse(int row, RowState state) const {
    if (params_.lse == nullptr) return;
    params_.lse[first_row_number_ + row] =
        state.sum == 0.0f ? bits_float(0xff800000u) : fused_multiply_add(state.max, kLn2, natural_log(state.sum));
  }

  __device__ __forceinline__ float* accum(int row, int column) const {
    return out_accum_ + int64(row) * Config::kHeadDimV + column;
  }

  __device__ __forceinline__ void load_out(float (&old)[kOwn][4], int i, int slab, bool first) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(i, half);
      const bool exists = !first && shared_.partials().owns() && row < seqlen_.seqlen_q;
#pragma unroll
      for (int f = 0; f < kOwn; ++f) {
        const int column = slab * Traits::kSlab + column_of(shared_.partials().own_column_tile() + f, 0);
        const FloatPair pair = exists ? *reinterpret_cast<const FloatPair*>(accum(row, column)) : FloatPair{0.0f, 0.0f};
        old[f][2 * half] = pair.x;
        old[f][2 * half + 1] = pair.y;
      }
    }
  }

  // Line 12: to O in device memory, at the last visit to `out` itself.
  __device__ __forceinline__ void store_out(const float (&old)[kOwn][4], const float (&sum)[kOwn][4],
                                            const RowFactors (&factors)[2], int i, int slab, bool last) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(i, half);
      if (row >= seqlen_.seqlen_q) continue;
#pragma unroll
      for (int f = 0; f < kOwn; ++f) {
        const int column = slab * Traits::kSlab + column_of(shared_.partials().own_column_tile() + f, 0);
        FloatPair pair;
        pair.x = fused_multiply_add(factors[half].fresh, sum[f][2 * half], factors[half].old * old[f][2 * half]);
        pair.y = fused_multiply_add(factors[half].fresh, sum[f][2 * half + 1], factors[half].old * old[f][2 * half + 1]);
        if (last)
          store_pair<Config::kVector>(out_ + row * params_.out.row_stride, column, params_.head_dim_v, pair);
        else
          store_global_pair(accum(row, column), pair.x, pair.y);
      }
    }
  }

  __device__ __forceinline__ void load_q(int i) const {
    const int first_row = i * Traits::kBr;
    load_tile<Config::kVector, Traits::kGroupThreads>(shared_.q(), q_ + first_row * params_.q.row_stride, params_.q.row_stride,
                                                      RowRange{0, seqlen_.seqlen_q - first_row}, params_.head_dim,
                                                      shared_.group_thread());
  }

  __device__ __forceinline__ void load_keys(const Element* k, const Element* v, KeyInterval keys, int j) const {
    const int first_key = j * Traits::kBc;
    const RowRange range{keys.lo - first_key, keys.hi - first_key};
    load_tile<Config::kVector, Traits::kThreads>(shared_.k(), k + first_key * params_.k.row_stride, params_.k.row_stride, range,
                                                 params_.head_dim);
#pragma unroll 1
    for (int slab = 0; slab < Traits::kSlabs; ++slab)
      load_tile<Config::kVector, Traits::kThreads>(shared_.v(slab), v + first_key * params_.v.row_stride + slab * Traits::kSlab,
                                                   params_.v.row_stride, range, params_.head_dim_v - slab * Traits::kSlab);
  }

  // Rows that see no key are visited by no step: out 0, lse -inf or the sink. Each warp takes its share of the row blocks.
  __device__ __forceinline__ void finish_empty_blocks() const {
    for (int i = warp_id(); i < num_row_blocks_; i += Traits::kNumWarps) {
      if (!mask_.row_block(i).some.empty()) continue;
      const int end = min((i + 1) * Traits::kBr, seqlen_.seqlen_q);
      for (int row = i * Traits::kBr; row < end; ++row) {
        for (int column = lane_id(); column < params_.head_dim_v; column += kWarpSize)
          out_[row * params_.out.row_stride + column] = Element{};
        if (lane_id() != 0) continue;
        store_state(row, initial_state());
        store_lse(row, initial_state());
      }
    }
  }

  const AttentionParams& params_;
  const SeqlenInfo& seqlen_;
  const int head_, entry_;
  const Mask mask_;
  const Traits shared_;
  int num_row_blocks_;  // T_r
  const Element* q_;    // (seqlen_q, head_dim)
  Element* out_;        // (seqlen_q, head_dim_v)
  float* out_accum_;    // (seqlen_q, kHeadDimV)
  int64 first_row_number_;  // of the entry's rows in lse, row_max, row_sum
};

template <typename Config>
__device__ __forceinline__ void fa1_forward(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return;
  const DivMod position = divmod(block_id(), params.num_heads);
  const SeqlenInfo seqlen(params, int(position.quotient));
  Fa1Forward<Config>(params, seqlen, int(position.remainder), int(position.quotient)).run();
}

}  // namespace hfc
