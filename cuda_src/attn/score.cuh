// From products q·k to scores.
#pragma once

#include "isa.cuh"

namespace hfc {

template <int kM, int kN, typename Change>
__device__ __forceinline__ void for_each_score(float (&scores)[kM][kN][4], Change change) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][j][e] = change(scores[i][j][e]);
}

template <int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&scores)[kM][kN][4], float scale) {
  for_each_score(scores, [&](float score) { return score * scale; });
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

}  // namespace hfc
