// Four 8x8 matrices of 16-bit elements from shared memory (PTX ISA: ldmatrix).
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

// `address(lane)` is the 16-byte row that `lane` supplies: lanes 8i..8i+7 the rows of matrix i. A function, not a value,
// so that a CPU can look every row up without an exchange between lanes.
template <typename Address>
__device__ __forceinline__ void ldmatrix(uint32 (&r)[4], Address address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address(lane_id()))
               : "memory");
}

template <typename Address>
__device__ __forceinline__ void ldmatrix_transposed(uint32 (&r)[4], Address address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address(lane_id()))
               : "memory");
}

}  // namespace hfc
