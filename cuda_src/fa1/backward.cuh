// FlashAttention-1, backward pass (Dao et al. 2022, Algorithm 4). One thread block walks a whole head of k and v of one batch
// entry: the outer loop takes a block of keys and values into shared memory and keeps their gradients dk, dv in registers, the
// inner loop takes all row blocks of every query head that shares them past it, recomputes the probabilities from lse (L, which
// stands for the paper's l and m), and adds to dq in device memory. No other block adds there: sums have one order.
//
// In the paper's letters: B_r = kBr rows, B_c = kBc keys, T_r row blocks i, T_c key blocks j, D_i = delta.
#pragma once

#include "attn/delta.cuh"
#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "fa1/backward_traits.cuh"
#include "fa1/block_mask.cuh"
#include "fa1/exchange.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace hfc {

template <typename Config>
class Fa1Backward {
  using Traits = Fa1BackwardTraits<Config>;
  using Element = typename Traits::Element;
  using Multiply = typename Config::Multiply;
  using Mask = BlockMask<Config>;
  static constexpr int kM = Traits::kM, kN = Traits::kN;
  static constexpr int kDqM = Traits::kDqM, kDqN = Traits::kDqN, kDqColumnWarps = Traits::kDqColumnWarps;

 public:
  __device__ __forceinline__ Fa1Backward(const AttentionParams& params, const SeqlenInfo& seqlen, int head_k, int entry)
      : params_(params), seqlen_(seqlen), head_k_(head_k), entry_(entry) {
    shared_.mark_gaps();
    const int group = params.num_heads / params.num_heads_k;
    first_head_ = head_k * group;
    end_head_ = first_head_ + group;
  }

  __device__ __forceinline__ void run() {
    compute_delta();
    clear_empty_blocks();
    for (int j = 0; j * Traits::kBc < seqlen_.seqlen_k; ++j) {  // line 6
      float dk[Traits::kKeyM][Traits::kKeyN][4], dv[Traits::kKeyM][Traits::kKeyNV][4];
      clear(dk);  // line 8
      clear(dv);
      Visit visit = next_visit({first_head_, -1}, j);
      if (exists(visit)) {
        sync_threads();  // every warp has left the previous key block
        load_keys(j);    // line 7
        load_rows(visit, 0);
      }
      copy_async_commit();
      for (int stage = 0; exists(visit); stage = (stage + 1) % Traits::kStages) {  // line 9
        copy_async_wait<0>();
        sync_threads();  // the row block has come, and every warp has left the one before
        visit = step(dk, dv, visit, j, stage);
      }
      if constexpr (Config::kDropout) for_each_score(dv, [&](float x) { return x * params_.dropout_scale; });
      store_gradients(dk, dv, j);
    }
  }

 private:
  // What follows from these is computed anew from here on: kept across the loops it would take 60 registers.
  __device__ __forceinline__ void forget() {
    shared_.forget();
    seqlen_.batch = in_place(seqlen_.batch);
  }

  __device__ __forceinline__ int num_row_blocks() const { return ceil_div(seqlen_.seqlen_q, Traits::kBr); }  // T_r

  // A row block of one of the query heads.
  struct Visit {
    int head;
    int i;
  };

  __device__ __forceinline__ bool exists(Visit visit) const { return visit.head < end_head_; }

  // The next row block, of this head or one of those after it, that sees key block j.
  __device__ __forceinline__ Visit next_visit(Visit visit, int j) const {
    for (++visit.i; visit.head < end_head_; ++visit.head, visit.i = 0) {
      visit.i = Mask(params_, seqlen_, visit.head, entry_).next(visit.i, j, num_row_blocks()).i;
      if (visit.i < num_row_blocks()) break;
    }
    return visit;
  }

  // Line 19 for all rows, once: D = rowsum(dO o O), less the gradient that lse itself has.
  __device__ __forceinline__ void compute_delta() const {
    for (int head = first_head_; head < end_head_; ++head) {
      const Element* dout = seqlen_.template rows<Element>(params_.dout, seqlen_.first_q, head);
      const Element* out = seqlen_.template rows<Element>(params_.out, seqlen_.first_q, head);
      const int64 number = seqlen_.batch * params_.lse_batch_stride + head * params_.lse_head_stride + seqlen_.first_q;
      compute_deltas<Config, kDeltaRows>(params_, dout, out, number, seqlen_.seqlen_q, seqlen_.seqlen_q,
                                         [](int, float, float) {});
    }
    sync_threads();
  }

  // Lines 11 to 22 for row block i, whose Q and dO are in shared memory, and key block j. Returns the next visit, whose rows are
  // on their way.
  template <int kKeyM, int kKeyN, int kKeyNV>
  __device__ __forceinline__ Visit step(float (&dk)[kKeyM][kKeyN][4], float (&dv)[kKeyM][kKeyNV][4], Visit visit, int j,
                                        int stage) {
    const RowBlock block = Mask(params_, seqlen_, visit.head, entry_).row_block(visit.i);
    const bool first = j == block.some.lo / Traits::kBc, last = j == (block.some.hi - 1) / Traits::kBc;
    if (shared_.has_scores()) compute_scores(visit, block, j, stage);
    sync_threads();  // p and ds are whole
    const Visit next = next_visit(visit, j);  // no earlier: scores and gradients leave few registers
    if (Traits::kStages > 1 && exists(next)) load_rows(next, (stage + 1) % Traits::kStages);
    copy_async_commit();

    forget();
    float dq[kDqM][kDqN][4];
    auto keep_all = [](int, uint32(&)[2]) {};
    gemm_shared<Multiply, Traits::kColumnWarps>(  // line 16: dv += pᵀ dout
        dv, shared_.dout(stage), shared_.first_column(),
        [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared_.p(), k, shared_.first_warp_key(), 16 * i); }, keep_all);
    load_dq(dq, visit, first);  // ahead of its use: it comes from device memory
    gemm_shared<Multiply, Traits::kColumnWarps>(  // line 22: dk += dsᵀ q
        dk, shared_.q(stage), shared_.first_column(),
        [&](uint32(&a)[4], int i, int k) { load_factor_columns(a, shared_.ds(), k, shared_.first_warp_key(), 16 * i); },
        keep_all);
    if (shared_.has_dq()) {
      add_dq(dq);
      store_dq(dq, visit, last);
    }
    if (Traits::kStages == 1) {
      sync_threads();  // every warp has left the rows
      if (exists(next)) load_rows(next, 0);
      copy_async_commit();
    }
    return next;
  }

  // Line 21: dq += ds k.
  __device__ __forceinline__ void add_dq(float (&dq)[kDqM][kDqN][4]) const {
    uint32 seen[Traits::kKeyWarps];
    if constexpr (Traits::kHoles) load_seen(seen);
    gemm_shared<Multiply, kDqColumnWarps>(
        dq, shared_.k(), shared_.first_dq_column(),
        [&](uint32(&a)[4], int i, int k) { load_factor_rows(a, shared_.ds(), shared_.first_dq_row(), 16 * i, k); },
        [&](int k, uint32(&words)[2]) {
          constexpr int kSteps = Traits::kWarpKeys / Product<Element>::kK;  // of a key group
          if constexpr (Traits::kHoles) keep_columns<Element>(seen[k / kSteps], k % kSteps, words);
        });
  }

  // Lines 11 to 20: the warp's tile of p and ds, to shared memory.
  __device__ __forceinline__ void compute_scores(Visit visit, const RowBlock& block, int j, int stage) {
    forget();
    const int score_row = shared_.first_score_row(), warp_key = shared_.first_warp_key();
    const int first_row = visit.i * Traits::kBr + score_row, first_key = j * Traits::kBc + warp_key;
    const Visibility visibility = Mask::visibility(block, first_key, first_key + Traits::kWarpKeys);
    float p[kM][kN][4], ds[kM][kN][4];
    uint32 columns = 0;
    if (visibility == Visibility::kNone) {
      clear(p);
      clear(ds);
    } else {
      ScoreGradient<Config, kM, kN> gradient(params_, seqlen_, ScoreTile{first_row, first_key, visit.head, entry_});
      gemm_transposed<Multiply>(p, shared_.q(stage), score_row, shared_.k(), warp_key);  // line 11
      const float scale = gradient.modify(p);
      if (visibility == Visibility::kSome) {  // line 12
        uint32 visible[2 * kM];
        Mask(params_, seqlen_, visit.head, entry_).template look<kM, kN>(visible, first_row, first_key);
        hide(p, visible);
      }
      if constexpr (Traits::kHoles) columns = seen_columns(p);
      float lse[2 * kM], delta[2 * kM];
      load_rows_of(lse, shared_.lse(stage));
      probabilities_from<Config, true>(p, lse, scale, params_, [&] { return statistic_rows(visit, score_row); });  // line 13
      gemm_transposed<Multiply>(ds, shared_.dout(stage), score_row, shared_.v(), warp_key);  // line 17
      load_rows_of(delta, shared_.delta(stage));
      gradient.finish(ds, p, delta, params_.softmax_scale);  // lines 14, 15, 18, 20
    }
    if constexpr (Traits::kHoles) {
      if (lane_id() < 4) store_shared(shared_.seen(shared_.key_group(), shared_.group_warp()), columns);
    }
    store_accumulator(shared_.p(), score_row, p, warp_key);
    store_accumulator(shared_.ds(), score_row, ds, warp_key);
  }

  // The warp's rows of scores. Made where they are wanted, which is seldom: the loop has no register for them.
  __device__ __forceinline__ StatisticRows statistic_rows(Visit visit, int score_row) const {
    const int first_row = visit.i * Traits::kBr + score_row;
    const int64 first_of_head =
        seqlen_.batch * in_place(params_.lse_batch_stride) + visit.head * in_place(params_.lse_head_stride);
    return {first_of_head + seqlen_.first_q + first_row, seqlen_.seqlen_q - first_row};
  }

  // lse or delta of the lane's rows.
  __device__ __forceinline__ void load_rows_of(float (&numbers)[2 * kM], SharedPtr statistics) const {
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row)
      numbers[row] = bits_float(load_shared(statistics + (shared_.first_score_row() + row_of(row / 2, row % 2 * 2)) * 4));
  }

  // Keys that no row of the block sees: what K holds there must not reach dq.
  __device__ __forceinline__ void load_seen(uint32 (&seen)[Traits::kKeyWarps]) const {
#pragma unroll
    for (int group = 0; group < Traits::kKeyWarps; ++group) {
      seen[group] = 0;
#pragma unroll
      for (int warp = 0; warp < Traits::kScoreWarps; ++warp) seen[group] |= load_shared(shared_.seen(group, warp));
    }
  }

  __device__ __forceinline__ void load_keys(int j) const {
    const int first_key = j * Traits::kBc;
    const KeyInterval keys = Mask(params_, seqlen_, first_head_, entry_).head_keys();
    const RowRange range{keys.lo - first_key, keys.hi - first_key};
    load_tile<Config::kVector, Traits::kThreads>(shared_.k(),
                                                 seqlen_.template rows<Element>(params_.k, seqlen_.first_k + first_key, head_k_),
                                                 params_.k.row_stride, range, params_.head_dim);
    load_tile<Config::kVector, Traits::kThreads>(shared_.v(),
                                                 seqlen_.template rows<Element>(params_.v, seqlen_.first_k + first_key, head_k_),
                                                 params_.v.row_stride, range, params_.head_dim_v);
  }

  // Line 10: Q_i, dO_i, L_i and D_i.
  __device__ __forceinline__ void load_rows(Visit visit, int stage) const {
    const int first_row = visit.i * Traits::kBr;
    const RowRange rows{0, seqlen_.seqlen_q - first_row};
    const int64 first = seqlen_.first_q + first_row;
    load_tile<Config::kVector, Traits::kThreads>(shared_.q(stage), seqlen_.template rows<Element>(params_.q, first, visit.head),
                                                 params_.q.row_stride, rows, params_.head_dim);
    load_tile<Config::kVector, Traits::kThreads>(shared_.dout(stage),
                                                 seqlen_.template rows<Element>(params_.dout, first, visit.head),
                                                 params_.dout.row_stride, rows, params_.head_dim_v);
    const int64 number = seqlen_.batch * params_.lse_batch_stride + visit.head * params_.lse_head_stride + first;
    for (int row = thread_id(); row < Traits::kBr; row += Traits::kThreads) {
      copy_async_word(shared_.lse(stage) + row * 4, params_.lse + number + row, row < rows.end);
      copy_async_word(shared_.delta(stage) + row * 4, params_.delta + number + row, row < rows.end);
    }
  }

  // Calls visit_pair(row, column, x, y) for each two neighbouring elements of this lane's part of dQ_i that exist.
  template <typename VisitPair>
  __device__ __forceinline__ void for_each_dq_pair(float (&dq)[kDqM][kDqN][4], Visit visit, VisitPair visit_pair) const {
#pragma unroll
    for (int i = 0; i < kDqM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = visit.i * Traits::kBr + shared_.first_dq_row() + row_of(i, 2 * half);
        if (row >= seqlen_.seqlen_q) continue;
#pragma unroll
        for (int n = 0; n < kDqN; ++n) {
          const int column = shared_.first_dq_column() + pair_column<kDqColumnWarps>(n) + lane_id() % 4 * 2;
          visit_pair(row, column, dq[i][n][2 * half], dq[i][n][2 * half + 1]);
        }
      }
  }

  // dQ in fp32: (batch, num_heads, seqlen_q, kHeadDim), head_dim rounded up so that pairs of elements are aligned.
  __device__ __forceinline__ float* dq_accum(int head) const {
    const int64 row = (int64(seqlen_.batch) * params_.num_heads + head) * params_.seqlen_q + seqlen_.first_q;
    return params_.dq_accum + row * Config::kHeadDim;
  }

  // Zeros at the first visit (line 2, without a pass of its own).
  __device__ __forceinline__ void load_dq(float (&dq)[kDqM][kDqN][4], Visit visit, bool first) const {
    clear(dq);
    if (first || !shared_.has_dq()) return;
    const float* rows = dq_accum(visit.head);
    for_each_dq_pair(dq, visit, [&](int row, int column, float& x, float& y) {
      const FloatPair pair = *reinterpret_cast<const FloatPair*>(rows + int64(row) * Config::kHeadDim + column);
      x = pair.x;
      y = pair.y;
    });
  }

  // At the last visit to dq itself.
  __device__ __forceinline__ void store_dq(float (&dq)[kDqM][kDqN][4], Visit visit, bool last) const {
    if (last) {
      Element* rows = seqlen_.template rows<Element>(params_.dq, seqlen_.first_q, visit.head);
      for_each_dq_pair(dq, visit, [&](int row, int column, float x, float y) {
        store_pair<Config::kVector>(rows + row * params_.dq.row_stride, column, params_.head_dim, FloatPair{x, y});
      });
    } else {
      float* rows = dq_accum(visit.head);
      for_each_dq_pair(dq, visit, [&](int row, int column, float x, float y) {
        store_global_pair(rows + int64(row) * Config::kHeadDim + column, x, y);
      });
    }
  }

  // Line 24: dK_j and dV_j, by way of shared memory, where K_j and V_j have done their work.
  template <int kKeyM, int kKeyN, int kKeyNV>
  __device__ __forceinline__ void store_gradients(const float (&dk)[kKeyM][kKeyN][4], const float (&dv)[kKeyM][kKeyNV][4],
                                                  int j) {
    sync_threads();
    forget();
    store_accumulator<Traits::kColumnWarps>(shared_.k(), shared_.first_warp_key(), dk, shared_.first_column());
    store_accumulator<Traits::kColumnWarps>(shared_.v(), shared_.first_warp_key(), dv, shared_.first_column());
    sync_threads();
    const int first_key = j * Traits::kBc, num_keys = seqlen_.seqlen_k - first_key;
    store_tile<Config::kVector, Traits::kThreads>(
        shared_.k(), seqlen_.template rows<Element>(params_.dk, seqlen_.first_k + first_key, head_k_), params_.dk.row_stride,
        num_keys, params_.head_dim);
    store_tile<Config::kVector, Traits::kThreads>(
        shared_.v(), seqlen_.template rows<Element>(params_.dv, seqlen_.first_k + first_key, head_k_), params_.dv.row_stride,
        num_keys, params_.head_dim_v);
  }

  // Rows that see no key are visited by no step: their dq is 0. Each warp takes its share of the row blocks.
  __device__ __forceinline__ void clear_empty_blocks() const {
    for (int head = first_head_; head < end_head_; ++head) {
      const Mask mask(params_, seqlen_, head, entry_);
      Element* rows = seqlen_.template rows<Element>(params_.dq, seqlen_.first_q, head);
      for (int i = shared_.warp; i < num_row_blocks(); i += Traits::kNumWarps) {
        if (!mask.row_block(i).some.empty()) continue;
        const int end = min((i + 1) * Traits::kBr, seqlen_.seqlen_q);
        for (int row = i * Traits::kBr; row < end; ++row)
          for (int column = lane_id(); column < params_.head_dim; column += kWarpSize)
            rows[row * params_.dq.row_stride + column] = Element{};
      }
    }
  }

  const AttentionParams& params_;
  SeqlenInfo seqlen_;
  const int head_k_, entry_;
  Traits shared_;
  int first_head_, end_head_;  // the query heads of head_k
};

template <typename Config>
__device__ __forceinline__ void fa1_backward(const AttentionParams& params) {
  if (block_id() >= params.num_tiles) return;
  const DivMod position = divmod(block_id(), params.num_heads_k);
  SeqlenInfo seqlen(params, int(position.quotient));
  if constexpr (!Config::kVarlen) {  // the compiler does not know that there are no offsets: a dozen registers
    seqlen.first_q = seqlen.first_k = 0;
    seqlen.seqlen_q = params.seqlen_q, seqlen.seqlen_k = params.seqlen_k;
    seqlen.batch = int(position.quotient);
  }
  Fa1Backward<Config>(params, seqlen, int(position.remainder), int(position.quotient)).run();
}

}  // namespace hfc
