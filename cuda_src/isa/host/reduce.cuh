// Sums in memory that many thread blocks, hence several worker threads, add to.
#pragma once

#include <atomic>

#include "common/types.cuh"

namespace hfc {

constexpr int kReduceWidth = 1;

__device__ __forceinline__ void reduce_add(float* target, const float (&values)[kReduceWidth]) {
  float sum;
  __atomic_load(target, &sum, __ATOMIC_RELAXED);
  for (float next = sum + values[0]; !__atomic_compare_exchange(target, &sum, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);)
    next = sum + values[0];
}

}  // namespace hfc
