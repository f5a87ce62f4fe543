// From products q·k to scores in base 2.
#pragma once

#include "common/params.cuh"
#include "isa.cuh"

namespace hfc {

// Scaling before the maximum is taken makes any scale right, also zero and negative ones.
template <bool kSoftcap, int kM, int kN>
__device__ __forceinline__ void scale_scores(const ForwardParams& params, float (&scores)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores[i][j][e];
        if constexpr (kSoftcap)  // cap · tanh(x / cap), tanh(y) = 1 - 2 / (1 + e^2y)
          score = params.score_scale_log2 * (1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(score * params.softcap_inner)));
        else
          score *= params.score_scale_log2;
      }
}

}  // namespace hfc
