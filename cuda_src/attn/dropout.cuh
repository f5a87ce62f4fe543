// Dropout of probabilities. Random bits come from a counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
// they belong to a position of the attention matrix, so every kernel, whatever its tiles, draws the same for the same position.
#pragma once

#include "isa.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "common/params.cuh"
#include "tile/fragment.cuh"

namespace hfc {

// Philox4x32 with 7 rounds, the fewest that pass TestU01's BigCrush. `counter` becomes 128 random bits.
__device__ __forceinline__ void philox(uint32 (&counter)[4], uint32 key0, uint32 key1) {
  constexpr int kRounds = 7;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64 product0 = int64(0xd2511f53ull * counter[0]), product1 = int64(0xcd9e8d57ull * counter[2]);
    counter[0] = uint32(product1 >> 32) ^ counter[1] ^ key0;
    counter[1] = uint32(product1);
    counter[2] = uint32(product0 >> 32) ^ counter[3] ^ key1;
    counter[3] = uint32(product0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// Which probabilities of a tile are kept: bits as in mask.cuh. One call of the generator serves what a lane holds of 16 rows
// and 16 keys, 16 bits each: the two rows r, r + 8 with the keys 2t, 2t + 1, 2t + 8, 2t + 9.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void kept_bits(uint32 (&kept)[2 * kM], const AttentionParams& params, const SeqlenInfo& seqlen,
                                          ScoreTile tile) {
  static_assert(kN % 2 == 0);
  const int64 seed = params.philox[0], offset = params.philox[1];
  const uint32 threshold = params.dropout_threshold;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    kept[2 * i] = kept[2 * i + 1] = 0;
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      uint32 words[4] = {uint32(tile.first_row / 16 + i) * 8 + lane_id() / 4,     // rows r and r + 8 of 16
                         uint32(tile.first_key / 16 + j / 2) * 4 + lane_id() % 4,  // keys 2t … of 16
                         uint32(tile.entry) * uint32(params.num_heads) + tile.head, uint32(offset)};
      philox(words, uint32(seed), uint32(seed >> 32) ^ uint32(offset >> 32));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32 word = words[2 * half + n];
          const uint32 pair = uint32((word & 0xffffu) >= threshold) | uint32(word >> 16 >= threshold) << 1;
          kept[2 * i + half] |= pair << (2 * (j + n));
        }
    }
  }
}

}  // namespace hfc
