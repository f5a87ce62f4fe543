// The products of attention for one warp, operands from shared memory and registers.
#pragma once

#include "isa.cuh"
#include "tile/fragment.cuh"

namespace hfc {

// n-tiles that share one fetch of operands: bounds the registers of operand b.
template <int kN, int kMost>
constexpr int kTileGroup = kN % kMost == 0 ? kMost : kTileGroup<kN, kMost / 2>;
template <int kN>
constexpr int kTileGroup<kN, 2> = 2;

// scores (rows, n) = rows of a (rows, k) times b (n, k) transposed, from its row `first_n`.
template <typename Multiply, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void gemm_transposed(float (&scores)[kM][kN][4], TileA a, int first_row, TileB b, int first_n = 0) {
  using Element = typename TileA::Element;
  constexpr int kSteps = TileA::kColumns / Product<Element>::kK;
  constexpr int kGroup = kTileGroup < kN, sizeof(Element) == 2 ? 8 : 4 > ;
  clear(scores);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32 rows[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) load_rows(rows[i], a, first_row, 16 * i, k);
#pragma unroll
    for (int first = 0; first < kN; first += kGroup) {
      uint32 columns[kGroup][2];
#pragma unroll
      for (int j = 0; j < kGroup; j += 2) load_transposed_rows(columns[j], columns[j + 1], b, first_n, 8 * (first + j), k);
      mma_tile<Multiply>(scores, first, rows, columns);
    }
  }
}

// out (rows, n) += a (rows, k), operands, times the columns of b (k, n) from `first_column`, a multiple of 128.
// `keep(k, words)` may blank rows of b.
template <typename Multiply, int kSteps, int kM, int kN, typename TileB, typename Keep>
__device__ __forceinline__ void gemm_operands(float (&out)[kM][kN][4], const uint32 (&rows)[kSteps][kM][4], TileB b, Keep keep,
                                              int first_column = 0) {
  using Element = typename TileB::Element;
  constexpr int kGroup = kTileGroup < kN, sizeof(Element) == 2 ? 8 : 4 > ;
  static_assert(kSteps * Product<Element>::kK == TileB::kRows);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int first = 0; first < kN; first += kGroup) {
      uint32 columns[kGroup][2];
#pragma unroll
      for (int j = 0; j < kGroup; j += 2) load_columns(columns[j], columns[j + 1], b, k, first_column, 8 * (first + j));
#pragma unroll
      for (int j = 0; j < kGroup; ++j) keep(k, columns[j]);
      mma_tile<Multiply>(out, first, rows[k], columns);
    }
  }
}

// The same of probabilities (rows, k), an accumulator.
template <typename Multiply, int kM, int kK, int kN, typename TileB, typename Keep>
__device__ __forceinline__ void gemm_accumulator(float (&out)[kM][kN][4], const float (&probabilities)[kM][kK][4], TileB b,
                                                 Keep keep, int first_column = 0) {
  using Element = typename TileB::Element;
  uint32 rows[TileB::kRows / Product<Element>::kK][kM][4];  // all at once: frees half of the probabilities' registers
  to_operands<Element>(rows, probabilities);
  gemm_operands<Multiply>(out, rows, b, keep, first_column);
}

// out (rows, n) += a (rows, k) times b (k, n): `load(fragment, i, k)` fetches m-tile i of a, the warp's columns of b are those
// of pair_column from `first_column`. `keep(k, words)` may blank rows of b.
template <typename Multiply, int kWarps, int kM, int kN, typename TileB, typename Load, typename Keep>
__device__ __forceinline__ void gemm_shared(float (&out)[kM][kN][4], TileB b, int first_column, Load load, Keep keep) {
  using Element = typename TileB::Element;
  constexpr int kSteps = TileB::kRows / Product<Element>::kK;
  constexpr int kGroup = kTileGroup<kN, 4>;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32 rows[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) load(rows[i], i, k);
#pragma unroll
    for (int first = 0; first < kN; first += kGroup) {
      uint32 columns[kGroup][2];
#pragma unroll
      for (int j = 0; j < kGroup; j += 2) {
        load_columns(columns[j], columns[j + 1], b, k, first_column, pair_column<kWarps>(first + j));
        keep(k, columns[j]);
        keep(k, columns[j + 1]);
      }
      mma_tile<Multiply>(out, first, rows, columns);
    }
  }
}

}  // namespace hfc
