// Rows of panel tiles that hold numbers no factor of 0 removes from a product.
#pragma once

#include "isa.cuh"
#include "tile/panels.cuh"

namespace hfc {

// Bit 15 of either half is set where that element has one of the kExponents largest exponents, the largest being that of NaN and of
// infinity: adding so much to the exponent carries out of it.
template <typename Element, int kExponents>
__device__ __forceinline__ uint32 reaching(uint32 pair) {
  constexpr uint32 kMask = is_same<Element, bf16>::value ? 0x7f807f80u : 0x7c007c00u;
  constexpr uint32 kOnes = is_same<Element, bf16>::value ? 0x00800080u : 0x04000400u;
  return ((pair & kMask) + kExponents * kOnes) & 0x80008000u;
}

// Whether the row of a panel tile holds such an element. The lanes of a warp ask for neighbouring rows.
template <typename Element, int kExponents, typename Tile>
__device__ __forceinline__ bool row_reaches(Tile tile, int row) {
  uint32 found = 0;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
#pragma unroll 2
    for (int chunk = 0; chunk < 8; ++chunk) {  // lane by lane another bank
      const Chunk c = load_shared_chunk(tile.base + panel * Tile::kPanelBytes + row * kPanelRowBytes + (chunk ^ row % 8) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) found |= reaching<Element, kExponents>(c.words[i]);
    }
  return found != 0;
}

// A row becomes 0, once its lanes have read it. A warp calls; fence_async_proxy() is the caller's.
template <typename Tile>
__device__ __forceinline__ void clear_row(Tile tile, int row) {
  sync_warp();
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    store_shared(tile.base + panel * Tile::kPanelBytes + row * kPanelRowBytes + lane_id() * 4, 0u);
}

}  // namespace hfc
