// Four neighbouring warps as one: their registers; and what the lanes of their warps tell each other.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

constexpr int kWarpgroupSize = 128;

__device__ __forceinline__ int warpgroup_id() { return __shfl_sync(~0u, int(threadIdx.x) / kWarpgroupSize, 0); }

__device__ __forceinline__ uint32 broadcast(uint32 value, int lane) { return __shfl_sync(~0u, value, lane); }
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ uint32 high_product(uint32 a, uint32 b) { return __umulhi(a, b); }  // a b / 2^32

// Registers of a thread from here on (PTX ISA: setmaxnreg); every warp of the warpgroup calls.
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit elements to shared memory (PTX ISA: stmatrix): lanes 8i..8i+7 name the rows of matrix i.
__device__ __forceinline__ void stmatrix(SharedPtr row, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}
// The same of their transposes: what a lane holds of a row goes to a column.
__device__ __forceinline__ void stmatrix_transposed(SharedPtr row, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace hfc
