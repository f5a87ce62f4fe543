// Thread blocks of one launch that do one thing one after the other (PTX ISA: memory consistency model). GPUs start thread blocks in
// the order of their ids: a thread block may wait for those with smaller ids, which always go on, and for no others.
#pragma once

#include "common/types.cuh"
#include "mbarrier.cuh"

namespace hfc {

// Whether pass_turn() has made it this thread's turn (PTX ISA: ld.acquire). What the copy engine does for it then comes after what it
// did for those before, which the acquire alone would not say (PTX ISA: async proxy, fence.proxy.async).
__device__ __forceinline__ bool is_turn(const int* turn, int mine) {
  int now;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n fence.proxy.async.global;" : "=r"(now) : "l"(turn) : "memory");
  return now == mine;
}
__device__ __forceinline__ void wait_turn(const int* turn, int mine) {
#pragma unroll 1
  for (int tries = 0; !is_turn(turn, mine); tries += kMostWaits != 0)
    if (kMostWaits != 0 && tries == kMostWaits) asm volatile("trap;");
}

// After tma_store_wait(): that it has read shared memory says nothing of when the copy engine has written (PTX ISA: st.release;
// what a completed cp.reduce.async.bulk wrote needs no further fence).
__device__ __forceinline__ void pass_turn(int* turn, int next) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}

}  // namespace hfc
