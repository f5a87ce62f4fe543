// Softmax over blocks of keys for two rows of a lane (rows r and r + 8 of its warp), in base 2, with a reference that stays.
//
// Any reference m gives the same softmax: p = 2^(s - m) and the sum of p both carry the factor 2^-m, which the division takes
// out again. The paper moves m to the maximum of every block. Here it stays where it is while nothing overflows, and no maximum
// is taken to see that: the block's sums, needed anyway, tell. A sum of at most kMostSum = 2^15 has no term above it, which fp16
// holds (65504); above, or NaN, the block is done again from its scores, with m raised to their maximum, and O and the sums
// follow. m is never above the row's maximum, and below it by no more than 15 powers of two while terms of at least 2^-9 are
// normal numbers of fp16: what a term loses by underflow is below 2^-24 of the largest, as with the maximum itself.
//
// A row starts at m = -kFloatMax, finite so that hidden scores (-inf) minus it stay -inf: its first visible score overflows and
// thereby sets m. Scores ride on one FMA, s * scale - m, off by the rounding of m's own product. Beyond 2^24 that error shows in
// the exponent: such rows have their scores scaled first, in every block, so that equal scores have equal weights.
#pragma once

#include "attn/score.cuh"
#include "common/types.cuh"
#include "isa.cuh"
#include "wgmma.cuh"

namespace hfc {

template <typename Element, int kN>  // kN n-tiles of scores
struct StaleSoftmax {
  static constexpr float kSlack = 8.0f;
  static constexpr float kMostSum = 32768.0f;  // 2^15
  static constexpr float kLarge = 16777216.0f;  // 2^24

  using Scores = float[1][kN][4];
  using Probabilities = uint32[kN / 2][4];  // operand A of wgmma, k-step by k-step

  float reference[2];  // base 2, the same in the four lanes of a quad
  float sum[2];        // of this lane's columns only until finish()

  // A row's first block, of which some scores may be hidden.
  __device__ __forceinline__ void start(Probabilities& p, Scores& scores, float scale) {
    float highest[2];
    row_maxima(highest, scores, scale);
    quad_max(highest);
    reference[0] = max_float(highest[0], -kFloatMax);
    reference[1] = max_float(highest[1], -kFloatMax);
    exponentials(p, sum, scores, remaining_scale(scores, scale));
  }

  // A block of which some scores may be hidden: a reference moves when a score exceeds it by kSlack. `ready()` is called before
  // `out` or `p` is touched.
  template <int kNV, typename Ready>
  __device__ __forceinline__ void update_masked(Probabilities& p, Scores& scores, float (&out)[1][kNV][4], float scale,
                                                Ready ready) {
    float highest[2];
    row_maxima(highest, scores, scale);
    const bool exceeds = highest[0] > reference[0] + kSlack || highest[1] > reference[1] + kSlack;
    const bool careful = warp_any(exceeds || large());
    ready();
    if (careful) {
      quad_max(highest);
      raise_references(Rows{highest[0] > reference[0] + kSlack, highest[1] > reference[1] + kSlack}, highest, out);
      scale = remaining_scale(scores, scale);
    }
    float block_sum[2];
    exponentials(p, block_sum, scores, scale);
    sum[0] += block_sum[0];
    sum[1] += block_sum[1];
  }

  // A block that most rows see whole, or after which their references will stay all the same. Hidden scores count nothing.
  template <int kNV>
  __device__ __forceinline__ void update(Probabilities& p, Scores& scores, float (&out)[1][kNV][4], float scale) {
    float block_sum[2];
    exponentials(p, block_sum, scores, scale);
    if (warp_any(!(block_sum[0] <= kMostSum) || !(block_sum[1] <= kMostSum) || large())) {
      float highest[2];
      row_maxima(highest, scores, scale);
      quad_max(highest);
      quad_max(block_sum);
      Rows rows;  // by what they hold themselves, not by what brought the warp here; sums of large ones say nothing yet
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows.exceed[row] = is_large(reference[row]) ? highest[row] > reference[row] : block_sum[row] > kMostSum;
      raise_references(rows, highest, out);
      exponentials(p, block_sum, scores, remaining_scale(scores, scale));
    }
    sum[0] += block_sum[0];
    sum[1] += block_sum[1];
  }

  // `sum` becomes the whole row's; the factors that normalise the output, 0 for a row without keys. `sink` (natural, or null) is
  // one more score without a value.
  __device__ __forceinline__ void finish(float (&factors)[2], const float* sink) {
    quad_sum(sum);
    factors[0] = factors[1] = 1.0f;
    if (sink != nullptr) {
      const float logit = sink_score(*sink);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float raised = max_float(reference[row], logit);
        factors[row] = exp2_fast<Element>(reference[row] - raised);
        sum[row] = fused_multiply_add(sum[row], factors[row], exp2_fast<Element>(logit - raised));
        reference[row] = raised;
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) factors[row] = sum[row] == 0.0f ? 0.0f : factors[row] * reciprocal_fast(sum[row]);
  }

  // Natural logarithm of the row's denominator; -inf for a row without keys. Call after finish().
  __device__ __forceinline__ float lse(int row) const {
    return sum[row] == 0.0f ? bits_float(0xff800000u) : fused_multiply_add(reference[row], kLn2, natural_log(sum[row]));
  }

  template <int kNV>
  __device__ __forceinline__ static void scale_rows(float (&out)[1][kNV][4], const float (&factors)[2]) {
#pragma unroll
    for (int j = 0; j < kNV; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][j][e] *= factors[e / 2];
  }

 private:
  __device__ __forceinline__ static bool is_large(float x) { return abs_float(x) > kLarge; }
  __device__ __forceinline__ bool large() const { return is_large(max_float(abs_float(reference[0]), abs_float(reference[1]))); }

  // Of this lane's scores, times `scale`.
  __device__ __forceinline__ static void row_maxima(float (&highest)[2], const Scores& scores, float scale) {
    float partial[4];  // four chains: a maximum waits for the one before
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[e] = scores[0][0][e];
#pragma unroll
    for (int j = 1; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) partial[e] = max_float(partial[e], scores[0][j][e]);
#pragma unroll
    for (int row = 0; row < 2; ++row) highest[row] = max_float(partial[2 * row], partial[2 * row + 1]) * scale;
  }

  struct Rows {
    bool exceed[2];
  };

  // The references of the rows that exceed theirs rise to the maxima, their sums and `out` follow. The others stay: a row's bits
  // must not depend on its neighbours.
  template <int kNV>
  __device__ __forceinline__ void raise_references(Rows rows, const float (&highest)[2], float (&out)[1][kNV][4]) {
    float factors[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float raised = max_float(reference[row], rows.exceed[row] ? highest[row] : -kFloatMax);
      factors[row] = exp2_fast<Element>(reference[row] - raised);
      reference[row] = raised;
      sum[row] *= factors[row];
    }
    scale_rows(out, factors);
  }

  // The scale that the scores still lack: those of large references get theirs here.
  __device__ __forceinline__ float remaining_scale(Scores& scores, float scale) const {
    // Not for rows that have seen no key yet: their neighbours' bits must not depend on that.
    auto has_large = [&](int row) { return is_large(reference[row]) && reference[row] > -kFloatMax; };
    if (!warp_any(has_large(0) || has_large(1))) return scale;
    scale_scores(scores, scale);
    return 1.0f;
  }

  __device__ __forceinline__ void exponentials(Probabilities& p, float (&block_sum)[2], const Scores& scores, float scale) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float x = exp2_fast<Element>(fused_multiply_add(scores[0][j][2 * row], scale, -reference[row]));
        const float y = exp2_fast<Element>(fused_multiply_add(scores[0][j][2 * row + 1], scale, -reference[row]));
        even += x;
        odd += y;
        p[j / 2][j % 2 * 2 + row] = pack2<Element>(x, y);
      }
      block_sum[row] = even + odd;
    }
  }
};

}  // namespace hfc
