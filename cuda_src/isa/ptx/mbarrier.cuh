// Barriers in shared memory that count arrivals and bytes (PTX ISA: mbarrier). A phase ends when as many threads have arrived as
// it was initialised with and every byte that was announced has come; its parity, 0 for the first phase, tells phases apart.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

// Tries after which a wait gives up and traps, 0 = never: for finding a deadlock instead of hanging in it.
constexpr int kMostWaits = 0;

__device__ __forceinline__ void mbarrier_init(SharedPtr barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine (PTX ISA: fence.mbarrier_init).
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(SharedPtr barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that the copy engine will report to the barrier.
__device__ __forceinline__ void mbarrier_arrive_expect(SharedPtr barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(SharedPtr barrier, uint32 parity) {
  uint32 done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void mbarrier_wait(SharedPtr barrier, uint32 parity) {
  if constexpr (kMostWaits == 0) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
  } else {
#pragma unroll 1  // unrolled, the waits alone would be a fifth of a kernel
    for (int tries = 0; tries < kMostWaits; ++tries)
      if (mbarrier_try_wait(barrier, parity)) return;
    asm volatile("trap;");
  }
}

}  // namespace hfc
