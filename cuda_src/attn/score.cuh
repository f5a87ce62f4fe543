// From products q·k to scores: scale, softcap, ALiBi, additive bias (api: softmax_scale, softcap, alibi_slopes, bias).
#pragma once

#include "isa.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "tile/fragment.cuh"

namespace hfc {

// Where a warp's tile of scores lies inside its batch entry.
struct ScoreTile {
  int first_row;  // a multiple of 16, as first_key
  int first_key;
  int head;
  int entry;
};

template <int kM, int kN, typename Change>
__device__ __forceinline__ void for_each_score(float (&scores)[kM][kN][4], Change change) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][j][e] = change(scores[i][j][e]);
}

// Rounded, so that the difference to a maximum of these scores is exact.
template <int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&scores)[kM][kN][4], float scale) {
  for_each_score(scores, [&](float score) { return multiply(score, scale); });
}

// tanh(y) = 1 - 2 / (1 + e^2y), which cancels for small y: for fp32 a Taylor polynomial takes |y| < 0.3.
template <typename Element>
__device__ __forceinline__ float tanh_fast(float y) {
  const float large = 1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast<Element>(y * (2.0f / kLn2)));
  if constexpr (sizeof(Element) == 2) return large;
  const float square = y * y;
  float p = -1382.0f / 155925.0f;
  p = p * square + 62.0f / 2835.0f;
  p = p * square - 17.0f / 315.0f;
  p = p * square + 2.0f / 15.0f;
  p = p * square - 1.0f / 3.0f;
  return square < 0.09f ? y + y * square * p : large;
}

// softcap · tanh(score · inner), inner = softmax_scale / softcap.
template <typename Element, int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kM][kN][4], float softcap, float inner) {
  for_each_score(scores, [&](float score) { return softcap * tanh_fast<Element>(score * inner); });
}

// Derivatives of capped scores by their scaled products, 1 - tanh², from the products.
template <typename Element, int kM, int kN>
__device__ __forceinline__ void softcap_slopes(float (&slopes)[kM][kN][4], const float (&scores)[kM][kN][4], float inner) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float t = tanh_fast<Element>(scores[i][j][e] * inner);
        slopes[i][j][e] = fused_multiply_add(-t, t, 1.0f);
      }
}

// ALiBi (Press et al. 2022): each score loses slope times its distance from the diagonal.
template <int kM, int kN>
__device__ __forceinline__ void add_alibi(float (&scores)[kM][kN][4], const AttentionParams& params, const SeqlenInfo& seqlen,
                                          ScoreTile tile) {
  const float slope = params.alibi_slopes[tile.entry * params.alibi_batch_stride + tile.head];
  const int diagonal = tile.first_row + seqlen.seqlen_k - seqlen.seqlen_q - tile.first_key;  // key of the tile's row 0
  const float distance = float(diagonal + row_of(0, 0) - column_of(0, 0));                   // of [0][0][0]
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][j][e] -= slope * abs_float(distance + float(16 * i + e / 2 * 8 - (8 * j + e % 2)));
}

template <typename Bias>
__device__ __forceinline__ float read_bias(const Bias* element) {
  if constexpr (sizeof(Bias) == 2)
    return to_float<Bias>(element->bits);
  else
    return *element;
}

// A sink as a score of base 2, bounded as a bias is.
__device__ __forceinline__ float sink_score(float sink) {
  constexpr float kMost = 1e38f;
  return (sink > kMost ? kMost : sink) * (1.0f / kLn2);
}

// Scores of base 2 lie within fp32 only if those of base e are 1.44 times smaller: a huge bias (the least finite number of
// its type stands for -inf in many models) is bounded, so that a row that has nothing else weighs its keys evenly.
__device__ __forceinline__ float biased_score(float score, float bias) {
  constexpr float kMost = 1e38f;
  const float infinity = bits_float(0x7f800000u);
  if (bias == -infinity) return bias;  // hides the key, whatever its product is
  const float bounded = bias < -kMost ? -kMost : bias > kMost && bias != infinity ? kMost : bias;
  return score + bounded;
}

// Nothing is read beyond the last row or key; the rows there see no key, so that they hold none from being blanked.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&scores)[kM][kN][4], const AttentionParams& params, const SeqlenInfo& seqlen,
                                         ScoreTile tile) {
  using Bias = typename Config::Bias;
  const int rows = seqlen.seqlen_q - tile.first_row, keys = seqlen.seqlen_k - tile.first_key;
  const int64 column_stride = in_place(params.bias_col_stride);
  const Bias* bias = static_cast<const Bias*>(params.bias) + tile.entry * params.bias_batch_stride +
                     tile.head * params.bias_head_stride + (tile.first_key + column_of(0, 0)) * column_stride;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(i, 2 * half);
      const Bias* elements = bias + (tile.first_row + row) * params.bias_row_stride;
#pragma unroll
      for (int j = 0; j < kN; ++j, elements += 8 * column_stride)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[i][j][2 * half + e];
          const bool exists = row < rows && column_of(j, e) < keys;
          score = biased_score(score, exists ? read_bias(elements + e * column_stride) : bits_float(0xff800000u));
        }
    }
}

// Products q·k become modified scores; returns the positive factor that makes them logits of base 2. The softmax wants it
// positive: hidden scores are -inf, and the maximum counts. Tile: ScoreTile, or what else add_alibi and add_bias know.
template <typename Config, int kM, int kN, typename Tile>
__device__ __forceinline__ float modify_scores(float (&scores)[kM][kN][4], const AttentionParams& params,
                                               const SeqlenInfo& seqlen, const Tile& tile) {
  float scale = params.score_scale_log2;
  if constexpr (Config::kSoftcap) cap_scores<typename Config::Element>(scores, params.softcap, params.softcap_inner);
  if constexpr (Config::kAlibi || Config::kBias) {
    if constexpr (!Config::kSoftcap) scale_scores(scores, params.softmax_scale);
    scale = 1.0f / kLn2;
    if constexpr (Config::kAlibi) add_alibi(scores, params, seqlen, tile);
    if constexpr (Config::kBias) add_bias<Config>(scores, params, seqlen, tile);
  } else if constexpr (!Config::kSoftcap && !Config::kPositiveScale) {
    const float sign = scale < 0.0f ? -1.0f : scale > 0.0f ? 1.0f : 0.0f;
    scale_scores(scores, sign);
    scale = sign == 0.0f ? 1.0f : sign * scale;
  }
  return scale;
}

}  // namespace hfc
