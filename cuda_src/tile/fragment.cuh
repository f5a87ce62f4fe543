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

// B of A Bᵀ: 16 rows n of a row-major (n, k) tile, step k, as two n-tiles.
template <typename Tile>
__device__ __forceinline__ void load_transposed_rows(uint32 (&first)[2], uint32 (&second)[2], Tile tile, int row, int k) {
  uint32 r[4];
  ldmatrix(r, [&](int lane) { return tile.at(lane / 16 * 8 + lane % 8, row, 2 * k, lane / 8 % 2); });
  first[0] = r[0], first[1] = r[1];
  second[0] = r[2], second[1] = r[3];
}

// B of A B: step k of a row-major (k, n) tile, columns [column, column + 16) as two n-tiles. A 32-bit step takes its rows
// in the order an accumulator holds its columns (0 2 4 6 1 3 5 7), so that A can be an accumulator as it stands.
template <typename Tile>
__device__ __forceinline__ void load_columns(uint32 (&first)[2], uint32 (&second)[2], Tile tile, int k, int column) {
  if constexpr (sizeof(typename Tile::Element) == 2) {
    uint32 r[4];
    ldmatrix_transposed(r, [&](int lane) { return tile.at(lane % 16, 16 * k, column / 8, lane / 16); });
    first[0] = r[0], first[1] = r[1];
    second[0] = r[2], second[1] = r[3];
  } else {
    const int group = lane_id() / 4, row = lane_id() % 4 * 2, offset = group % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = load_shared(tile.at(row + i, 8 * k, column / 4, group / 4) + offset);
      second[i] = load_shared(tile.at(row + i, 8 * k, column / 4 + 2, group / 4) + offset);
    }
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

template <int kM, int kColumns>
__device__ __forceinline__ void clear(float (&accumulator)[kM][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulator[i][j][e] = 0.0f;
}

// The warp's accumulator to its rows of a tile, rounded to the tile's element.
template <int kM, int kColumns, typename Tile>
__device__ __forceinline__ void store_accumulator(Tile tile, int first_row, const float (&accumulator)[kM][kColumns][4]) {
  using Element = typename Tile::Element;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = accumulator[i][j][2 * half], y = accumulator[i][j][2 * half + 1];
        const SharedPtr target = tile.element(first_row + row_of(i, 2 * half), column_of(j, 0));
        if constexpr (sizeof(Element) == 2)
          store_shared(target, pack2<Element>(x, y));
        else
          store_shared(target, float_bits(x), float_bits(y));
      }
}

}  // namespace hfc
