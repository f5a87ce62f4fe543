// Barriers in shared memory that count arrivals and bytes: see isa/ptx/mbarrier.cuh.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

namespace host {

struct Mbarrier {
  uint16 arrivals;  // of a phase; all bits set (what shared memory holds at first): not initialised
  uint16 pending : 15;
  uint16 parity : 1;
  int bytes;  // announced and not yet come; negative: come and not yet announced
};
static_assert(sizeof(Mbarrier) == 8);

constexpr uint16 kNotInitialised = 0xffff;
constexpr int kMostBytes = (1 << 20) - 1;

inline Mbarrier& mbarrier_at(SharedPtr barrier) {
  auto& state = *reinterpret_cast<Mbarrier*>(barrier);
  if (state.arrivals == kNotInitialised) Block::current->fail("not initialised: mbarrier", barrier - shared_base());
  return state;
}

inline void mbarrier_count(SharedPtr barrier, int arrivals, int bytes) {
  Mbarrier& state = mbarrier_at(barrier);
  if (state.pending < arrivals) Block::current->fail("more arrivals than a phase has: mbarrier", barrier - shared_base());
  state.bytes += bytes;
  if (state.bytes > kMostBytes || state.bytes < -kMostBytes)
    Block::current->fail("more bytes than it counts: mbarrier", barrier - shared_base());
  state.pending = state.pending - arrivals;
  if (state.pending > 0 || state.bytes != 0) return;
  state.pending = state.arrivals;
  state.parity ^= 1;
}

}  // namespace host

inline void mbarrier_init(SharedPtr barrier, int arrivals) {
  if ((barrier - shared_base()) % 8 != 0 || arrivals < 1)
    host::Block::current->fail("not on 8 bytes, or without arrivals: mbarrier", barrier - shared_base());
  *reinterpret_cast<host::Mbarrier*>(barrier) = {uint16(arrivals), uint16(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(SharedPtr barrier) { host::mbarrier_count(barrier, 1, 0); }
inline void mbarrier_arrive_expect(SharedPtr barrier, int bytes) { host::mbarrier_count(barrier, 1, bytes); }

inline void mbarrier_wait(SharedPtr barrier, uint32 parity) {
  const host::Mbarrier& state = host::mbarrier_at(barrier);
  host::Block::current->wait_until([&] { return state.parity != parity; }, "mbarrier", barrier - shared_base());
}

}  // namespace hfc
