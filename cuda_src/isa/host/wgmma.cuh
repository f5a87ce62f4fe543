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
  // `view`: shared memory, as threads or as others see it.
  Operand(int64 descriptor, const char* view)
      : view_(view), start_(field(descriptor, 0)), panel_bytes_(field(descriptor, 16)), group_bytes_(field(descriptor, 32)) {
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
    const std::ptrdiff_t place = swizzled(start_ + offset);
    if (place + 16 > std::ptrdiff_t(Block::current->memory().bytes()))
      Block::current->fail("an operand beyond shared memory, at", place);
    return view_ + place;
  }

  const char* view_;
  std::ptrdiff_t start_;
  std::ptrdiff_t panel_bytes_;  // from 64 columns to the next, transposed
  std::ptrdiff_t group_bytes_;  // from eight rows to the next
};

// The chunks of eight elements of kRows rows of N (or M) and 16 of K: visit(address, row, k), the chunk's first element.
template <int kRows, bool kTransposed, typename Visit>
inline void visit_chunks(int64 descriptor, const char* view, int first_row, Visit visit) {
  const Operand operand(descriptor, view);
  for (int i = 0; i < 2 * kRows; ++i) {
    const int row = kTransposed ? i % (kRows / 8) * 8 : i / 2, k = kTransposed ? i / (kRows / 8) : i % 2 * 8;
    visit(kTransposed ? operand.along_n(first_row + row, k) : operand.along_k(first_row + row, k), row, k);
  }
}

// As numbers, those of neighbouring rows and k's so far apart.
template <typename Element, int kRows, bool kTransposed, int kRowStride, int kKStride>
inline void gather(float* target, int64 descriptor, int first_row) {
  const char* view = Block::current->memory().async(0);
  visit_chunks<kRows, kTransposed>(descriptor, view, first_row, [target](const char* chunk, int row, int k) {
    constexpr int kStride = kTransposed ? kRowStride : kKStride;
    float* place = target + row * kRowStride + k * kKStride;
    const Vector values = to_vector<Element>(chunk);
    if constexpr (kStride == 1)
      std::memcpy(place, &values, sizeof(values));
    else
      for (int i = 0; i < 8; ++i) place[i * kStride] = values[i];
  });
}

// Registers of A: the fragment of mma.
template <typename Element>
inline void gather_registers(float (&a)[kWarpRows][16], const uint32* const (&registers)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int r = 0; r < 4; ++r)
      unpack_fragment<Element, 16>(registers[lane][r], &a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8], 1);
}

template <typename Element, int kTiles, bool kTransposedA, bool kTransposedB>
void multiply_rows(const Product& product, float* sums) {
  alignas(64) float a[kWarpRows][16];
  alignas(64) Vector b[16][kTiles];
  if (product.a_registers[0] != nullptr)
    gather_registers<Element>(a, product.a_registers);
  else
    gather<Element, kWarpRows, kTransposedA, 16, 1>(a[0], product.a, kWarpRows * product.warp);
  gather<Element, 8 * kTiles, kTransposedB, 1, 8 * kTiles>(reinterpret_cast<float*>(b), product.b, 0);
  constexpr int kBlock = 4, kPair = 2;  // rows and tiles that registers hold
  for (int row = 0; row < kWarpRows; row += kBlock)
    for (int j = 0; j < kTiles; j += kPair) {
      Vector part[kBlock][kPair] = {};
      for (int k = 0; k < 16; ++k)
#pragma GCC unroll 8
        for (int i = 0; i < kBlock * kPair; ++i) part[i / kPair][i % kPair] += a[row + i / kPair][k] * b[k][j + i % kPair];
      for (int i = 0; i < kBlock * kPair; ++i) {
        float* target = sums + (row + i / kPair) * 8 * kTiles + 8 * (j + i % kPair);
        Vector sum = {};
        if (product.accumulate) std::memcpy(&sum, target, sizeof(sum));
        sum += part[i / kPair][i % kPair];
        std::memcpy(target, &sum, sizeof(sum));
      }
    }
}

// Of what the operands hold in a view of shared memory.
template <int kTiles, bool kTransposedA, bool kTransposedB>
unsigned long long digest_operands(const Product& product, const char* view) {
  unsigned long long digest = 0, weight = 1;
  auto add = [&](const void* chunk) {
    for (int i = 0; i < 2; ++i) digest += read<unsigned long long>(static_cast<const char*>(chunk) + 8 * i) * (weight += 2);
  };
  auto visit = [&](const char* chunk, int, int) { add(chunk); };
  if (product.a_registers[0] != nullptr)
    for (const uint32* registers : product.a_registers) add(registers);
  else
    visit_chunks<kWarpRows, kTransposedA>(product.a, view, kWarpRows * product.warp, visit);
  visit_chunks<8 * kTiles, kTransposedB>(product.b, view, 0, visit);
  return digest;
}

template <typename Element, int kTiles, bool kTransposedA, bool kTransposedB>
inline Product product_of(int64 a, int64 b, bool accumulate) {
  return {multiply_rows<Element, kTiles, kTransposedA, kTransposedB>, digest_operands<kTiles, kTransposedA, kTransposedB>, a, b,
          accumulate};
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
    SharedMemory& memory = Block::current->memory();
    mine.product.digest = mine.product.digest_operands(mine.product, memory.async(0));
    if (mine.product.is_changed(memory.base())) Block::current->fail("operands of a product were written and not fenced");
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
    if (!block.products().finish(kPending, block.memory())) block.fail("operands change while a product is under way");
  });
}

template <int kTiles>
inline void hold_registers(float (&)[kTiles][4]) {}
template <int kSteps>
inline void hold_registers(uint32 (&)[kSteps][4]) {}

template <typename Element, int kTiles>
inline void wgmma_shared(float (&d)[kTiles][4], int64 a, int64 b, bool accumulate) {
  host::start_product(host::product_of<Element, kTiles, false, false>(a, b, accumulate), d[0], kTiles, nullptr);
}
template <typename Element, int kTiles>
inline void wgmma_registers(float (&d)[kTiles][4], const uint32 (&a)[4], int64 b) {
  host::start_product(host::product_of<Element, kTiles, false, true>(0, b, true), d[0], kTiles, a);
}

template <typename Element, bool kAccumulate, int kTiles>
inline void wgmma_columns(float (&d)[kTiles][4], int64 a, int64 b) {
  host::start_product(host::product_of<Element, kTiles, true, false>(a, b, kAccumulate), d[0], kTiles, nullptr);
}

}  // namespace hfc
