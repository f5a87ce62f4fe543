// Counters in device memory that thread blocks share (PTX ISA: atom).
#pragma once

#include "common/types.cuh"

namespace hfc {

// What the counter was; it goes on by one, and from `last` to 0 (PTX ISA: atom.inc).
__device__ __forceinline__ uint32 atomic_increment(uint32* counter, uint32 last) {
  uint32 old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}

}  // namespace hfc
