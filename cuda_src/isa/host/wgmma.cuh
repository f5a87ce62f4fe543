// Matrix products of a warpgroup: see isa/ptx/wgmma.cuh. A warp computes its 16 of the 64 rows, when it waits for them and no
// thread can go on, from what shared memory and the registers of A hold then; until then its accumulators are NaN.
#pragma once

#include "common/types.cuh"
#include "convert.cuh"
#include "mma.cuh"
#include "thread.cuh"

namespace hfc {

namespace host {

inline const bool kProductsWatchWrites = watches_writes = true;

typedef Vector VectorAnywhere __attribute__((aligned(4), may_alias));

template <typename Element>
inline Vector to_vector(const char* chunk) {
  if constexpr (is_same<Element, bf16>::value) {
    typedef uint16 Halves __attribute__((vector_size(16)));
    typedef uint32 Words __attribute__((vector_size(32)));
    return reinterpret_cast<Vector>(__builtin_convertvector(read<Halves>(chunk), Words) << 16);
  } else {
    typedef _Float16 Numbers __attribute__((vector_size(16)));
    return __builtin_convertvector(read<Numbers>(chunk), Vector);
  }
}

// An operand in shared memory (PTX ISA: matrix descriptor): rows of K, or, transposed, columns of it.
class Operand {
 public:
  explicit Operand(int64 descriptor)
      : start_(field(descriptor, 0)), panel_bytes_(field(descriptor, 16)), group_bytes_(field(descriptor, 32)) {
    if (uint64(descriptor) >> 62 != 1) Block::current->fail("only operands swizzled by 128 bytes are known");
  }

  // Eight elements along K of row n, from k on.
  const char* along_k(int n, int k) const { return at(n / 8 * group_bytes_ + n % 8 * 128 + 2 * k); }
  // Eight elements along N (or M), from n on, of the transposed operand's row k.
  const char* along_n(int n, int k) const { return at(n / 64 * panel_bytes_ + k / 8 * group_bytes_ + k % 8 * 128 + n % 64 * 2); }

 private:
  using uint64 = unsigned long long;

  static std::ptrdiff_t field(int64 descriptor, int bit) { return (descriptor >> bit & 0x3fff) << 4; }
  const char* at(std::ptrdiff_t offset) const {
    SharedMemory& memory = Block::current->memory();
    const std::ptrdiff_t place = swizzled(start_ + offset);
    if (place + 16 > std::ptrdiff_t(memory.bytes())) Block::current->fail("an operand beyond shared memory, at", place);
    return memory.async(place);
  }

  std::ptrdiff_t start_;
  std::ptrdiff_t panel_bytes_;  // from 64 columns to the next, transposed
  std::ptrdiff_t group_bytes_;  // from eight rows to the next
};

// Eight columns of B, or rows of A, whose elements along K are `stride` floats apart.
inline void transpose_into(float* target, int stride, const Vector& values) {
  for (int i = 0; i < 8; ++i) target[i * stride] = values[i];
}

// A, (16, 16): rows 16 * warp to 16 * warp + 15 of the warpgroup's 64.
template <typename Element, bool kTransposed>
inline void gather_a(float (&a)[kWarpRows][16], const Product& product, int warp) {
  if (product.a_registers[0] != nullptr) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int r = 0; r < 4; ++r) {
        const uint32 pair = product.a_registers[lane][r];
        float* target = &a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8];
        target[0] = to_float<Element>(uint16(pair));
        target[1] = to_float<Element>(uint16(pair >> 16));
      }
    return;
  }
  const Operand operand(product.a);
  for (int i = 0; i < 2 * kWarpRows; ++i) {
    const int line = i / 2, half = i % 2 * 8;
    if constexpr (kTransposed)
      transpose_into(&a[half][line], 16, to_vector<Element>(operand.along_n(kWarpRows * warp + half, line)));
    else
      *reinterpret_cast<VectorAnywhere*>(&a[line][half]) = to_vector<Element>(operand.along_k(kWarpRows * warp + line, half));
  }
}

// B, (16, columns): K by N.
template <typename Element, int kTiles, bool kTransposed>
inline void gather_b(Vector (&b)[16][kTiles], int64 descriptor) {
  const Operand operand(descriptor);
  if constexpr (kTransposed) {
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < kTiles; ++j) b[k][j] = to_vector<Element>(operand.along_n(8 * j, k));
  } else {
    for (int n = 0; n < 8 * kTiles; ++n)
      for (int k = 0; k < 16; k += 8)
        transpose_into(reinterpret_cast<float*>(b[k]) + n, 8 * kTiles, to_vector<Element>(operand.along_k(n, k)));
  }
}

template <typename Element, int kTiles, bool kTransposedA, bool kTransposedB>
void multiply_rows(const Product& product, float* sums) {
  alignas(64) float a[kWarpRows][16];
  alignas(64) Vector b[16][kTiles];
  gather_a<Element, kTransposedA>(a, product, product.warp);
  gather_b<Element, kTiles, kTransposedB>(b, product.b);
  constexpr int kBlock = 4, kPair = 2;  // rows and tiles that registers hold
  for (int row = 0; row < kWarpRows; row += kBlock)
    for (int j = 0; j < kTiles; j += kPair) {
      Vector part[kBlock][kPair] = {};
      for (int k = 0; k < 16; ++k)
#pragma GCC unroll 8
        for (int i = 0; i < kBlock * kPair; ++i) part[i / kPair][i % kPair] += a[row + i / kPair][k] * b[k][j + i % kPair];
      for (int i = 0; i < kBlock * kPair; ++i) {
        VectorAnywhere* target = reinterpret_cast<VectorAnywhere*>(sums + (row + i / kPair) * 8 * kTiles + 8 * (j + i % kPair));
        *target = product.accumulate ? *target + part[i / kPair][i % kPair] : part[i / kPair][i % kPair];
      }
    }
}

// Every lane of a warp calls with the same product.
inline void start_product(Product product, float* sums, int tiles, const uint32* a_registers) {
  struct Lane {
    Product product;
    float* sums;
    const uint32* a_registers;
  } mine{product, sums, a_registers};
  Block::current->warp_collective(&mine, [&](void** lanes) {
    float* registers[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Lane& lane = *static_cast<Lane*>(lanes[i]);
      if (lane.product.a != mine.product.a || lane.product.b != mine.product.b ||
          lane.product.accumulate != mine.product.accumulate)
        Block::current->fail("the lanes of a warp start different products");
      registers[i] = lane.sums;
      mine.product.a_registers[i] = lane.a_registers;
    }
    mine.product.warp = warp_id() % 4;
    Block::current->products().add(mine.product, registers, tiles);
  });
}

}  // namespace host

inline int64 matrix_descriptor(SharedPtr address) {
  constexpr int64 kSwizzle128 = int64(1) << 62, kRowGroup = int64(1024 >> 4) << 32;
  return kSwizzle128 | kRowGroup | int64((address - shared_base()) >> 4);
}
constexpr int64 panel_stride(int bytes) { return int64(bytes >> 4) << 16; }

inline void wgmma_fence() {}
inline void wgmma_commit() {
  host::Block::current->warp_collective(nullptr, [](void**) { host::Block::current->products().commit(); });
}
template <int kPending>
inline void wgmma_wait() {
  host::Block::current->warp_collective(nullptr, [](void**) {
    host::Block& block = *host::Block::current;
    if (!block.products().has_more_than(kPending)) return;
    block.wait_for_others("its products");
    block.products().finish(kPending);
  });
}

template <int kTiles>
inline void hold_registers(float (&)[kTiles][4]) {}
template <int kSteps>
inline void hold_registers(uint32 (&)[kSteps][4]) {}

template <typename Element, int kTiles>
inline void wgmma_shared(float (&d)[kTiles][4], int64 a, int64 b, bool accumulate) {
  host::start_product({host::multiply_rows<Element, kTiles, false, false>, a, b, accumulate}, d[0], kTiles, nullptr);
}
template <typename Element, int kTiles>
inline void wgmma_registers(float (&d)[kTiles][4], const uint32 (&a)[4], int64 b) {
  host::start_product({host::multiply_rows<Element, kTiles, false, true>, 0, b, true}, d[0], kTiles, a);
}

template <typename Element, bool kAccumulate, int kTiles>
inline void wgmma_columns(float (&d)[kTiles][4], int64 a, int64 b) {
  host::start_product({host::multiply_rows<Element, kTiles, true, false>, a, b, kAccumulate}, d[0], kTiles, nullptr);
}

}  // namespace hfc
