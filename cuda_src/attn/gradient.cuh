// The backward pass between its products: probabilities recomputed from lse, and the gradient of the scores.
#pragma once

#include "attn/dropout.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "common/types.cuh"
#include "isa.cuh"

namespace hfc {

// A warp's rows in lse's layout.
struct StatisticRows {
  int64 first;  // index of the tile's first row
  int count;    // rows from there on that exist
};

// Scores become probabilities from the two parts of lse, exp2(score - row_max) / row_sum, as the forward pass had them.
template <typename Element, bool kScaleFirst, int kM, int kN>
__device__ __forceinline__ void probabilities_by_parts(float (&scores)[kM][kN][4], const float (&lse)[2 * kM], float scale,
                                                       const AttentionParams& params, StatisticRows rows) {
  constexpr float kLarge = 16777216.0f;  // 2^24: where the forward pass scales first, too
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int row = row_of(i / 2, i % 2 * 2);
    const bool sees = row < rows.count && lse[i] != bits_float(0xff800000u);
    const float maximum = sees ? params.row_max[rows.first + row] : 0.0f;
    const float inverse = sees ? reciprocal_fast(params.row_sum[rows.first + row]) : 1.0f;
    const bool scale_first = kScaleFirst || abs_float(maximum) > kLarge;
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[i / 2][j][i % 2 * 2 + e];
        const float difference = scale_first ? multiply(score, scale) - maximum : fused_multiply_add(score, scale, -maximum);
        score = exp2_fast<Element>(difference) * inverse;
      }
  }
}

// Scores become probabilities exp(score - lse); rows without keys have lse = -inf and only hidden scores. Where the rounding of
// lse would show, its parts are read instead, from rows(). kScaleFirst: the forward pass scaled all scores before their maximum.
template <typename Config, bool kScaleFirst, int kM, int kN, typename Rows>
__device__ __forceinline__ void probabilities_from(float (&scores)[kM][kN][4], const float (&lse)[2 * kM], float scale,
                                                   const AttentionParams& params, Rows rows) {
  using Element = typename Config::Element;
  constexpr float kRounded = sizeof(Element) == 4 ? -1.0f : 512.0f;  // 2^9: from here on p may be off by 2^-15
  float lse_log2[2 * kM];
  bool large = false;
#pragma unroll
  for (int row = 0; row < 2 * kM; ++row) {
    lse_log2[row] = lse[row] == bits_float(0xff800000u) ? 0.0f : lse[row] * (1.0f / kLn2);
    large |= abs_float(lse_log2[row]) > kRounded;
  }
  if (warp_any(large)) {
    probabilities_by_parts<Element, kScaleFirst>(scores, lse, scale, params, rows());
  } else {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[i][j][e] = exp2_fast<Element>(fused_multiply_add(scores[i][j][e], scale, -lse_log2[2 * i + e / 2]));
  }
  // Scores of rows beyond the end, which stand for nothing, may be large (a negative ALiBi slope) and would be infinite.
  if constexpr (Config::kAlibi) for_each_score(scores, [](float p) { return p > 1.0f ? 1.0f : p; });
}

// Keys inside the window's range that no row may see.
template <typename Config>
constexpr bool kHasHoles = Config::kIntervals || Config::kMask || Config::kBias;

// The gradient of one warp's tile of scores, from its products q k and dout v.
template <typename Config, int kM, int kN>
class ScoreGradient {
  using Element = typename Config::Element;

 public:
  __device__ __forceinline__ ScoreGradient(const AttentionParams& params, const SeqlenInfo& seqlen, ScoreTile tile)
      : params_(params), seqlen_(seqlen), tile_(tile) {}

  // modify_scores(), with the slopes of the softcap kept.
  __device__ __forceinline__ float modify(float (&scores)[kM][kN][4]) {
    if constexpr (Config::kSoftcap) softcap_slopes<Element>(slopes_, scores, params_.softcap_inner);
    return modify_scores<Config>(scores, params_, seqlen_, tile_);
  }

  // dp = dout v becomes ds, `factor` times the gradient by the products q k (by the modified scores, which is bias's, without
  // kSlope). With softmax_scale as factor dq and dk need none, and fp16 overflows only where they do. With dropout `p` loses
  // what was dropped.
  template <bool kSlope = true>
  __device__ __forceinline__ void finish(float (&dp)[kM][kN][4], float (&p)[kM][kN][4], const float (&delta)[2 * kM],
                                         float factor) const {
    uint32 kept[2 * kM];
    if constexpr (Config::kDropout) {
      kept_bits<Config, kM, kN>(kept, params_, seqlen_, tile_);
      replace_unset(dp, kept, 0.0f);
    }
    const float dp_factor = Config::kDropout ? factor * params_.dropout_scale : factor;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float ds = p[i][j][e] * fused_multiply_add(dp[i][j][e], dp_factor, -(delta[2 * i + e / 2] * factor));
          if constexpr (Config::kSoftcap && kSlope) ds *= slopes_[i][j][e];
          dp[i][j][e] = kHasHoles<Config> && p[i][j][e] == 0.0f ? 0.0f : ds;  // a hidden key's dp and slope may be anything
        }
    if constexpr (Config::kDropout) replace_unset(p, kept, 0.0f);
  }

 private:
  const AttentionParams& params_;
  const SeqlenInfo& seqlen_;
  ScoreTile tile_;
  float slopes_[Config::kSoftcap ? kM : 1][Config::kSoftcap ? kN : 1][4];
};

}  // namespace hfc
