// Tiles in shared memory as the copy engine lays them and wgmma reads them: panels of 128-byte rows, swizzled.
#pragma once

#include "common/math.cuh"
#include "isa.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "tile/fragment.cuh"

namespace hfc {

constexpr int kPanelColumns = 64;  // 128 bytes of 16-bit elements: the width of the swizzle
constexpr int kPanelRowBytes = 128;

// A (rows, columns) operand: panels of 64 columns, one after the other; columns beyond the tensor's are zeros.
template <int kRows_, int kColumns_>
struct PanelTile {
  static constexpr int kRows = kRows_;
  static constexpr int kPanels = ceil_div(kColumns_, kPanelColumns);
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  SharedPtr base;
};

// All panels of a tile's rows, reported to `loaded`.
template <typename Tile>
__device__ __forceinline__ void load_panels(Tile tile, const TensorMap& map, SharedPtr loaded, int row, int head, int entry) {
  mbarrier_arrive_expect(loaded, Tile::kBytes);  // what lies beyond the tensor counts: it arrives as zeros
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    tma_load(tile.base + panel * Tile::kPanelBytes, map, loaded, panel * kPanelColumns, row, head, entry);
}

// An accumulator to 16 rows of a panel tile that starts at `rows`, rounded to Element.
template <typename Element, int kPanelBytes, int kNV>
__device__ __forceinline__ void stage_rows(SharedPtr rows, const float (&out)[kNV][4]) {
  const SharedPtr row = rows + lane_id() % 16 * kPanelRowBytes;
#pragma unroll
  for (int k = 0; k < kNV / 2; ++k) {
    uint32 matrices[4];  // rows 0 to 7 and 8 to 15 of the first 8 columns, then of the others
    to_operand<Element>(matrices, out, k);
    const int chunk = (k % 4 * 2 + lane_id() / 16) ^ lane_id() % 8;
    stmatrix(row + (k / 4 * kPanelBytes + chunk * 16), matrices);
  }
}

// The first `count` of 16 staged rows, by the lanes: the copy engine writes whole boxes, whose other rows are the next entry's.
template <typename Element, int kPanelBytes, int kColumns>
__device__ __forceinline__ void copy_rows(SharedPtr rows, Element* out, int64 row_stride, int count, int columns) {
  constexpr int kChunks = kColumns / 8;
  for (int i = lane_id(); i < count * kChunks; i += kWarpSize) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * 8 >= columns) continue;
    const SharedPtr place = rows + (chunk / 8 * kPanelBytes + row * kPanelRowBytes + (chunk % 8 ^ row % 8) * 16);
    *reinterpret_cast<Chunk*>(out + row * row_stride + chunk * 8) = load_shared_chunk(place);
  }
}

// Where a lane names a row for stmatrix_transposed(), of 16 columns of a warpgroup's accumulator that to_operand packed: they become
// 16 rows of the panel, and the rows of `warp` its columns 16 warp to 16 warp + 15.
__device__ __forceinline__ SharedPtr transposed_place(SharedPtr panel, int warp) {
  const int row = lane_id() / 16 * 8 + lane_id() % 8, chunk = (2 * warp + lane_id() / 8 % 2) ^ lane_id() % 8;
  return panel + (row * kPanelRowBytes + chunk * 16);
}

}  // namespace hfc
