// Thread blocks of one launch that do one thing one after the other: see isa/ptx/turn.cuh.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

inline bool is_turn(const int* turn, int mine) { return __atomic_load_n(turn, __ATOMIC_ACQUIRE) == mine; }
inline void wait_turn(const int* turn, int mine) {
  host::Block::current->wait_for_blocks([=] { return is_turn(turn, mine); }, "turn", mine);
}

inline void pass_turn(int* turn, int next) {
  for (const host::PendingStore& store : host::Block::current->stores())
    if (store.thread == thread_id())
      host::Block::current->fail("passed on before copies to device memory have come: the turn to", next);
  __atomic_store_n(turn, next, __ATOMIC_RELEASE);
}

}  // namespace hfc
