// How thread blocks of one launch, on several worker threads, hand results to each other.
#pragma once

#include "common/types.cuh"
#include "copy.cuh"

namespace hfc {

// What the counter was; it goes on by one, and from `last` to 0. Whoever comes later sees all that was written before this.
inline uint32 count_arrival(uint32* counter, uint32 last) {
  uint32 before = __atomic_load_n(counter, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(counter, &before, before >= last ? 0 : before + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
    continue;
  return before;
}

__device__ __forceinline__ Chunk load_arrived_chunk(const float* source) { return load_global_chunk(source); }

}  // namespace hfc
