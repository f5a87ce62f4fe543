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

inline void named_barrier_sync(int id, int threads) { host::Block::current->sync_at(id, threads); }
inline void named_barrier_arrive(int id, int threads) { host::Block::current->arrive_at(id, threads); }

inline void stmatrix(SharedPtr row, const uint32 (&r)[4]) {
  struct Lane {
    SharedPtr row;        // of the 32 of four matrices, the one it names
    SharedPtr place[4];   // where it writes
  } mine{row, {}};
  host::Block::current->warp_collective(&mine, [](void** lanes) {
    for (int lane = 0; lane < kWarpSize; ++lane)
      for (int i = 0; i < 4; ++i)
        static_cast<Lane*>(lanes[lane])->place[i] = static_cast<Lane*>(lanes[8 * i + lane / 4])->row + lane % 4 * 4;
  });
  for (int i = 0; i < 4; ++i) store_shared(mine.place[i], r[i]);
}

}  // namespace hfc
