// Four neighbouring warps as one: see isa/ptx/warpgroup.cuh.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

constexpr int kWarpgroupSize = 128;

inline int warpgroup_id() { return thread_id() / kWarpgroupSize; }

inline uint32 broadcast(uint32 value, int lane) {
  host::Block::current->warp_collective(&value, [lane](void** lanes) {
    const uint32 chosen = *static_cast<uint32*>(lanes[lane]);
    for (int i = 0; i < kWarpSize; ++i) *static_cast<uint32*>(lanes[i]) = chosen;
  });
  return value;
}
inline int warp_sum(int value) {
  int values[1] = {value};
  exchange<31>(values, [](int a, int b) { return a + b; });
  return values[0];
}
inline uint32 high_product(uint32 a, uint32 b) { return uint32((unsigned long long)(a)*b >> 32); }

template <int kRegisters>
inline void decrease_registers() {}
template <int kRegisters>
inline void increase_registers() {}

namespace host {

// Lanes 8i to 8i + 7 name the rows of matrix i: those of row(lane) become the calling lane's.
template <typename Row>
inline void exchange_rows(SharedPtr mine, SharedPtr (&rows)[4], Row row) {
  struct Lane {
    SharedPtr named;
    SharedPtr* wanted;
  } lane{mine, rows};
  Block::current->warp_collective(&lane, [row](void** lanes) {
    for (int i = 0; i < kWarpSize; ++i)
      for (int matrix = 0; matrix < 4; ++matrix)
        static_cast<Lane*>(lanes[i])->wanted[matrix] = static_cast<Lane*>(lanes[8 * matrix + row(i)])->named;
  });
}

}  // namespace host

inline void stmatrix(SharedPtr row, const uint32 (&r)[4]) {
  SharedPtr rows[4];
  host::exchange_rows(row, rows, [](int lane) { return lane / 4; });
  for (int i = 0; i < 4; ++i) store_shared(rows[i] + lane_id() % 4 * 4, r[i]);
}
inline void stmatrix_transposed(SharedPtr row, const uint32 (&r)[4]) {
  for (int half = 0; half < 2; ++half) {
    SharedPtr rows[4];
    host::exchange_rows(row, rows, [half](int lane) { return lane % 4 * 2 + half; });
    for (int i = 0; i < 4; ++i) write_shared(rows[i] + lane_id() / 4 * 2, uint16(r[i] >> 16 * half));
  }
}

}  // namespace hfc
