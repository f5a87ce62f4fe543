// Tiles between device memory and shared memory.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"
#include "isa.cuh"
#include "tile/shared_tile.cuh"

namespace hfc {

// Rows of a tile that exist: [first, end). The others are filled with zeros.
struct RowRange {
  int first;
  int end;
};

// Each thread keeps one column of chunks and walks down the rows; a block narrower than a row takes several columns.
template <typename Tile, int kThreads>
struct CopyLayout {
  static constexpr int kColumnsPerPass = min(kThreads, Tile::kChunks);
  static constexpr int kRowsPerPass = kThreads / kColumnsPerPass;
  static constexpr int kPasses = ceil_div(Tile::kRows, kRowsPerPass);
  static constexpr bool kFull = kRowsPerPass * kColumnsPerPass == kThreads && Tile::kRows % kRowsPerPass == 0;
};

// Calls visit(row, column, elements) for every chunk of the tile, one thread each; `elements` is where the chunk's first
// element lies in device memory, `origin` where the tile's does. The address moves by one step a pass, since a loop would
// keep all the multiples of the stride otherwise. `thread`: which of the kThreads that share the tile this one is.
template <bool kVector, int kThreads, int kUnroll, typename Tile, typename Pointer, typename Visit>
__device__ __forceinline__ void for_each_chunk(Pointer origin, int64 row_stride, Visit visit, int thread = thread_id()) {
  using Layout = CopyLayout<Tile, kThreads>;
  row_stride = in_place(row_stride);
  const int first_row = thread / Layout::kColumnsPerPass;
  if (!Layout::kFull && first_row >= Layout::kRowsPerPass) return;
#pragma unroll
  for (int chunk = thread % Layout::kColumnsPerPass; chunk < Tile::kChunks; chunk += Layout::kColumnsPerPass) {
    const int column = chunk * Tile::kElementsPerChunk;
    Pointer elements = origin + first_row * row_stride + column;
#pragma unroll(!kVector ? 1 : kAsyncCopy && Layout::kPasses <= kUnroll ? Layout::kPasses : 2)
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
      const int row = first_row + pass * Layout::kRowsPerPass;
      if (Layout::kFull || row < Tile::kRows) visit(row, column, elements);
      elements += Layout::kRowsPerPass * row_stride;
    }
  }
}

// Chunks whose elements start anywhere, one element at a time.
template <typename Element>
__device__ __forceinline__ Chunk load_elements(const Element* source, int count) {
  constexpr int kPerWord = 4 / sizeof(Element);
  Chunk chunk{};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int index = i * kPerWord + j;
      if (index < count) {
        if constexpr (kPerWord == 2)
          chunk.words[i] |= uint32(source[index].bits) << (16 * j);
        else
          chunk.words[i] = float_bits(source[index]);
      }
    }
  return chunk;
}

// The dot product of two chunks, in fp32.
template <typename Element>
__device__ __forceinline__ float chunk_product(Chunk a, Chunk b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 2) {
      sum = fused_multiply_add(to_float<Element>(uint16(a.words[i])), to_float<Element>(uint16(b.words[i])), sum);
      sum = fused_multiply_add(to_float<Element>(uint16(a.words[i] >> 16)), to_float<Element>(uint16(b.words[i] >> 16)), sum);
    } else {
      sum = fused_multiply_add(bits_float(a.words[i]), bits_float(b.words[i]), sum);
    }
  }
  return sum;
}

template <typename Element>
__device__ __forceinline__ void store_elements(Element* target, Chunk chunk, int count) {
  constexpr int kPerWord = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int index = i * kPerWord + j;
      if (index < count) {
        if constexpr (kPerWord == 2)
          target[index].bits = uint16(chunk.words[i] >> (16 * j));
        else
          target[index] = bits_float(chunk.words[i]);
      }
    }
}

// Passes of a copy that are unrolled whole; more cost compile time and gain nothing.
constexpr int kCopyUnroll = 4;

// `source` is the tile's row 0, element 0, in device memory; kVector: every row starts on 16 bytes and is whole chunks.
template <bool kVector, int kThreads, int kUnroll = kCopyUnroll, typename Tile>
__device__ __forceinline__ void load_tile(Tile tile, const typename Tile::Element* source, int64 row_stride, RowRange rows,
                                          int columns, int thread = thread_id()) {
  for_each_chunk<kVector, kThreads, kUnroll, Tile>(
      source, row_stride,
      [&](int row, int column, const typename Tile::Element* elements) {
        const bool valid = row >= rows.first && row < rows.end && column < columns;
        const SharedPtr target = tile.at(row, column / Tile::kElementsPerChunk);
        if constexpr (kVector)
          copy_async(target, elements, valid);
        else
          store_shared(target, load_elements(elements, valid ? columns - column : 0));
      },
      thread);
}

template <bool kVector, int kThreads, int kUnroll = kCopyUnroll, typename Tile>
__device__ __forceinline__ void store_tile(Tile tile, typename Tile::Element* target, int64 row_stride, int num_rows,
                                           int columns) {
  for_each_chunk<kVector, kThreads, kUnroll, Tile>(
      target, row_stride, [&](int row, int column, typename Tile::Element* elements) {
        if (row >= num_rows || column >= columns) return;
        const Chunk value = load_shared_chunk(tile.at(row, column / Tile::kElementsPerChunk));
        if constexpr (kVector)
          store_global_chunk(elements, value);
        else
          store_elements(elements, value, columns - column);
      });
}

}  // namespace hfc
