// Softmax over blocks of keys (FlashAttention-2, Algorithm 1, lines 9-10 and 12), in base 2, one state for each of a lane's rows.
//
// Any reference r gives the same softmax: p = 2^(s - r), normalised by the sum of p. The paper takes the running maximum, so
// that every block rescales the output. Here r stays where it is until a score exceeds it by kSlack: p is then at most
// 2^kSlack, harmless in fp32 sums and in any element type, and rescaling becomes rare (the idea is FlashAttention-4's).
#pragma once

#include "attn/score.cuh"
#include "common/types.cuh"
#include "isa.cuh"

namespace hfc {

template <typename Element, int kRows>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;
  static constexpr float kLarge = 16777216.0f;  // 2^24

  float reference[kRows];  // base 2, the same in the four lanes of a quad
  float sum[kRows];  // of this lane's columns only until finish()
  float slack = kSlack;  // -inf: every block takes the slow road, see scale_first()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      reference[row] = -kFloatMax;  // finite, so that hidden scores (-inf) minus it stay -inf
      sum[row] = 0.0f;
    }
  }

  // Scores times `scale` (positive) become probabilities relative to the reference; `out` follows when that moves.
  template <int kM, int kN, int kNV>
  __device__ __forceinline__ void update(float (&scores)[kM][kN][4], float (&out)[kM][kNV][4], float scale) {
    float highest[kRows];
    bool exceeds = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      highest[row] = row_maximum(scores[row / 2], row % 2) * scale;
      exceeds |= highest[row] > reference[row] + slack;
    }
    if (warp_any(exceeds)) {
      if (scale_first(highest)) {
        scale_scores(scores, scale);
        scale = 1.0f;
      }
      raise_reference(highest, out);
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 2 * i + e / 2;
          scores[i][j][e] = exp2_fast<Element>(fused_multiply_add(scores[i][j][e], scale, -reference[row]));
          sum[row] += scores[i][j][e];
        }
  }

  // Normalises `out`, times `factor`; sum becomes the whole row's. `sink` (natural, or null) is one more score without a value.
  template <int kM, int kNV>
  __device__ __forceinline__ void finish(float (&out)[kM][kNV][4], const float* sink, float factor) {
    quad_sum(sum);
    float factors[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) factors[row] = factor;
    if (sink != nullptr) {
      const float logit = sink_score(*sink);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float raised = max_float(reference[row], logit);
        const float shrink = exp2_fast<Element>(reference[row] - raised);
        sum[row] = fused_multiply_add(sum[row], shrink, exp2_fast<Element>(logit - raised));
        factors[row] *= shrink;
        reference[row] = raised;
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) factors[row] = sum[row] == 0.0f ? 0.0f : factors[row] / sum[row];
    scale_rows(out, factors);
  }

  // Natural logarithm of the row's denominator; -inf for a row without keys. Call after finish().
  __device__ __forceinline__ float lse(int row) const {
    return sum[row] == 0.0f ? bits_float(0xff800000u) : fused_multiply_add(reference[row], kLn2, natural_log(sum[row]));
  }

 private:
  template <int kN>
  __device__ __forceinline__ static float row_maximum(const float (&scores)[kN][4], int half) {
    float highest = scores[0][2 * half];
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) highest = max_float(highest, scores[j][2 * half + e]);
    return highest;
  }

  // The scale rides on the exponent's subtraction, s · scale - r in one FMA, whose result is off by the rounding error of r.
  // That is nothing, until r is so large that 2^error shows: from then on the scores are scaled before the maximum is taken.
  __device__ __forceinline__ bool scale_first(const float (&highest)[kRows]) {
    bool large = slack != kSlack;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      large |= highest[row] > kLarge || (highest[row] < -kLarge && highest[row] >= -kFloatMax);
    if (!warp_any(large)) return false;
    slack = bits_float(0xff800000u);
    return true;
  }

  template <int kM, int kNV>
  __device__ __forceinline__ void raise_reference(float (&highest)[kRows], float (&out)[kM][kNV][4]) {
    quad_max(highest);
    float factors[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      // Only rows that exceed it themselves: a row's bits must not depend on its neighbours.
      const bool exceeds = highest[row] > reference[row] + slack;
      const float raised = exceeds ? max_float(highest[row], reference[row]) : reference[row];
      factors[row] = exp2_fast<Element>(reference[row] - raised);
      reference[row] = raised;
      sum[row] *= factors[row];
    }
    scale_rows(out, factors);
  }

  template <int kM, int kNV>
  __device__ __forceinline__ static void scale_rows(float (&out)[kM][kNV][4], const float (&factors)[kRows]) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kNV; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] *= factors[2 * i + e / 2];
  }
};

}  // namespace hfc
