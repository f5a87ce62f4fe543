// Sums in device memory that many thread blocks add to (PTX ISA: red).
#pragma once

#include "common/types.cuh"

namespace hfc {

// Neighbouring floats that one instruction adds.
#if __CUDA_ARCH__ >= 900
constexpr int kReduceWidth = 4;
#else
constexpr int kReduceWidth = 1;
#endif

__device__ __forceinline__ void reduce_add(float* target, const float (&values)[kReduceWidth]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(values[0]) : "memory");
#endif
}

}  // namespace hfc
