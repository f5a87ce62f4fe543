// How thread blocks of one launch hand results to each other (PTX ISA: atom, memory consistency model).
#pragma once

#include "common/types.cuh"

namespace hfc {

// What the counter was; it goes on by one, and from `last` to 0. Whoever comes later and passes a barrier of its block sees all
// that this block's threads wrote before a barrier ahead of this.
__device__ __forceinline__ uint32 count_arrival(uint32* counter, uint32 last) {
  uint32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// What another block of the launch wrote: load_global_chunk may take what never changes from a cache that does not know.
__device__ __forceinline__ Chunk load_arrived_chunk(const float* source) {
  Chunk c;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3])
               : "l"(source)
               : "memory");
  return c;
}

}  // namespace hfc
