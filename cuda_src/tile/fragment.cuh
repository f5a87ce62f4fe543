// What a lane of a warp holds of a tile: accumulators and the operands of a warp-level product (layouts: isa/ptx/mma.cuh).
#pragma once

#include "common/types.cuh"
#include "isa.cuh"

namespace hfc {

// Position of accumulator element [i][j][e] in the warp's tile.
__device__ __forceinline__ int row_of(int i, int e) { return 16 * i + e / 2 * 8 + lane_id() / 4; }
__device__ __forceinline__ int column_of(int j, int e) { return 8 * j + lane_id() % 4 * 2 + e % 2; }

// Element types of the products. fp32 operands are 32 bits wide and 8 deep, the others 16 bits and 16 deep: 32 bytes each.
template <typename Element>
struct Product {
  static constexpr int kK = 32 / sizeof(Element);  // depth of one step
};

// A: rows [warp_row + row, + 16) of a row-major tile, step k.
template <typename Tile>
__device__ __forceinline__ void load_rows(uint32 (&fragment)[4], Tile tile, int warp_row, int row, int k) {
  ldmatrix(fragment, [&](int lane) { return tile.at(warp_row + lane % 16, row, 2 * k, lane / 16); });
}

// B of A Bᵀ: rows [warp_row + row, + 16) of a row-major (n, k) tile, step k, as two n-tiles.
template <typename Tile>
__device__ __forceinline__ void load_transposed_rows(uint32 (&first)[2], uint32 (&second)[2], Tile tile, int warp_row, int row,
                                                     int k) {
  uint32 r[4];
  ldmatrix(r, [&](int lane) { return tile.at(warp_row + lane / 16 * 8 + lane % 8, row, 2 * k, lane / 8 % 2); });
  first[0] = r[0], first[1] = r[1];
  second[0] = r[2], second[1] = r[3];
}

// B of A B: step k of a row-major (k, n) tile, columns [warp_column + column, + 16) as two n-tiles; the two numbers share no
// bit. A 32-bit step takes its rows in the order an accumulator holds its columns (0 2 4 6 1 3 5 7), so that A can be an
// accumulator as it stands.
template <typename Tile>
__device__ __forceinline__ void load_columns(uint32 (&first)[2], uint32 (&second)[2], Tile tile, int k, int warp_column,
                                             int column) {
  if constexpr (sizeof(typename Tile::Element) == 2) {
    uint32 r[4];
    ldmatrix_transposed(r, [&](int lane) { return tile.at(lane % 16, 16 * k, column / 8, warp_column / 8 + lane / 16); });
    first[0] = r[0], first[1] = r[1];
    second[0] = r[2], second[1] = r[3];
  } else {
    const int group = lane_id() / 4, row = lane_id() % 4 * 2, offset = group % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = load_shared(tile.at(row + i, 8 * k, column / 4, warp_column / 4 + group / 4) + offset);
      second[i] = load_shared(tile.at(row + i, 8 * k, column / 4 + 2, warp_column / 4 + group / 4) + offset);
    }
  }
}

// A of A B as load_columns wants it: rows [warp_row + row, + 16) of a row-major (m, k) tile, step k.
template <typename Tile>
__device__ __forceinline__ void load_factor_rows(uint32 (&fragment)[4], Tile tile, int warp_row, int row, int k) {
  if constexpr (sizeof(typename Tile::Element) == 2) {
    load_rows(fragment, tile, warp_row, row, k);
  } else {
    const int group = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SharedPtr pair = tile.at(warp_row + group, row + 8 * half, 2 * k, t / 2) + t % 2 * 8;
      fragment[half] = load_shared(pair);
      fragment[half + 2] = load_shared(pair + 4);
    }
  }
}

// A of Aᵀ B as load_columns wants it: columns [warp_column + column, + 16) of a row-major (k, m) tile, step k; the two numbers
// share no bit.
template <typename Tile>
__device__ __forceinline__ void load_factor_columns(uint32 (&fragment)[4], Tile tile, int k, int warp_column, int column) {
  if constexpr (sizeof(typename Tile::Element) == 2) {
    ldmatrix_transposed(fragment, [&](int lane) {
      return tile.at(lane / 16 * 8 + lane % 8, 16 * k, column / 8, warp_column / 8 + lane / 8 % 2);
    });
  } else {
    const int group = lane_id() / 4, row = lane_id() % 4 * 2, offset = group % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        fragment[2 * i + half] =
            load_shared(tile.at(row + i, 8 * k, column / 4 + 2 * half, warp_column / 4 + group / 4) + offset);
  }
}

// Step k of an accumulator as operand A, rounded to Element.
template <typename Element, int kColumns>
__device__ __forceinline__ void to_operand(uint32 (&fragment)[4], const float (&accumulator)[kColumns][4], int k) {
  if constexpr (sizeof(Element) == 2) {
    fragment[0] = pack2<Element>(accumulator[2 * k][0], accumulator[2 * k][1]);
    fragment[1] = pack2<Element>(accumulator[2 * k][2], accumulator[2 * k][3]);
    fragment[2] = pack2<Element>(accumulator[2 * k + 1][0], accumulator[2 * k + 1][1]);
    fragment[3] = pack2<Element>(accumulator[2 * k + 1][2], accumulator[2 * k + 1][3]);
  } else {
    fragment[0] = float_bits(accumulator[k][0]);
    fragment[1] = float_bits(accumulator[k][2]);
    fragment[2] = float_bits(accumulator[k][1]);
    fragment[3] = float_bits(accumulator[k][3]);
  }
}

// All steps.
template <typename Element, int kSteps, int kM, int kColumns>
__device__ __forceinline__ void to_operands(uint32 (&fragments)[kSteps][kM][4], const float (&accumulator)[kM][kColumns][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < kM; ++i) to_operand<Element>(fragments[k][i], accumulator[i], k);
}

template <int kM, int kColumns>
__device__ __forceinline__ void clear(float (&accumulator)[kM][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulator[i][j][e] = 0.0f;
}

// How an accumulator's n-tiles lie in a tile that kWarps warps share by columns: each warp takes every kWarps-th pair, so
// that any width divides and a warp's first column shares no bit with the steps from there.
template <int kWarps>
__device__ __forceinline__ constexpr int pair_column(int j) {
  return j / 2 * 16 * kWarps + j % 2 * 8;
}

// The warp's accumulator to its rows of a tile, from `first_column`, rounded to the tile's element.
template <int kWarps = 1, int kM, int kColumns, typename Tile>
__device__ __forceinline__ void store_accumulator(Tile tile, int first_row, const float (&accumulator)[kM][kColumns][4],
                                                  int first_column = 0) {
  using Element = typename Tile::Element;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = accumulator[i][j][2 * half], y = accumulator[i][j][2 * half + 1];
        const int lane_row = first_row + lane_id() / 4, row = 16 * i + 8 * half, column = pair_column<kWarps>(j),
                  t = lane_id() % 4;
        if constexpr (sizeof(Element) == 2)
          store_shared(tile.at(lane_row, row, column / 8, first_column / 8) + 4 * t, pack2<Element>(x, y));
        else
          store_shared(tile.at(lane_row, row, column / 4, first_column / 4 + t / 2) + t % 2 * 8, float_bits(x), float_bits(y));
      }
}

}  // namespace hfc
