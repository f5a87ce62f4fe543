// Threads, barriers, warp exchanges, shared memory addresses.
#pragma once

#include "common/types.cuh"

namespace hfc {

using SharedPtr = uint32;  // an address in the shared window, in bytes

extern __shared__ __align__(1024) char dynamic_shared[];

constexpr int kSharedGap = 0;  // a CPU keeps a poisoned gap between shared arrays

__device__ __forceinline__ SharedPtr shared_base() { return SharedPtr(__cvta_generic_to_shared(dynamic_shared)); }

__device__ __forceinline__ void mark_shared_gap(SharedPtr) {}

__device__ __forceinline__ int thread_id() { return int(threadIdx.x); }
__device__ __forceinline__ int lane_id() { return int(threadIdx.x) % kWarpSize; }
// The shuffle tells the compiler that the value is the same for a whole warp; call it where all lanes do.
__device__ __forceinline__ int warp_id() { return __shfl_sync(~0u, int(threadIdx.x) / kWarpSize, 0); }
__device__ __forceinline__ int64 block_id() { return int64(blockIdx.y) * gridDim.x + blockIdx.x; }
// Of a grid of one row.
__device__ __forceinline__ uint32 block_index() { return blockIdx.x; }
__device__ __forceinline__ uint32 num_blocks() { return gridDim.x; }

// Hides a value's origin: what follows from it is computed where it is used, not kept in registers across a loop.
__device__ __forceinline__ int64 in_place(int64 value) {
  asm volatile("" : "+l"(value));
  return value;
}
__device__ __forceinline__ int in_place(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ SharedPtr in_place(SharedPtr address) {
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ void sync_threads() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ bool warp_any(bool value) { return __any_sync(~0u, value); }
__device__ __forceinline__ uint32 warp_ballot(bool value) { return __ballot_sync(~0u, value); }  // bit i: lane i's
__device__ __forceinline__ int first_bit(uint32 bits) { return __ffs(int(bits)) - 1; }
__device__ __forceinline__ int leading_zeros(uint32 bits) { return __clz(int(bits)); }

// The four lanes of a quad share the rows of an accumulator.
template <int kCount>
__device__ __forceinline__ void quad_max(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = fmaxf(values[i], __shfl_xor_sync(~0u, values[i], 1));
    values[i] = fmaxf(values[i], __shfl_xor_sync(~0u, values[i], 2));
  }
}

template <int kCount>
__device__ __forceinline__ void quad_sum(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] += __shfl_xor_sync(~0u, values[i], 1);
    values[i] += __shfl_xor_sync(~0u, values[i], 2);
  }
}

// Sum over groups of kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// OR over the eight lanes that hold the same columns of an accumulator.
__device__ __forceinline__ uint32 column_or(uint32 bits) {
  bits |= __shfl_xor_sync(~0u, bits, 4);
  bits |= __shfl_xor_sync(~0u, bits, 8);
  return bits | __shfl_xor_sync(~0u, bits, 16);
}

__device__ __forceinline__ int warp_inclusive_sum(int value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane_id() >= step) value += other;
  }
  return value;
}

__device__ __forceinline__ int warp_min(int value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const int other = __shfl_xor_sync(~0u, value, step);
    value = other < value ? other : value;
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// To a power of two.
__device__ __forceinline__ SharedPtr align_up(SharedPtr address, int bytes) {
  return (address + (bytes - 1)) & ~SharedPtr(bytes - 1);
}

// Valid where the address is aligned to more than `bits`.
__device__ __forceinline__ SharedPtr flip_bits(SharedPtr address, int bits) { return address ^ bits; }

__device__ __forceinline__ int load_shared_int(SharedPtr address) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint32 load_shared(SharedPtr address) {
  uint32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void load_shared(SharedPtr address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ Chunk load_shared_chunk(SharedPtr address) {
  Chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3])
               : "r"(address)
               : "memory");
  return c;
}
__device__ __forceinline__ void store_shared(SharedPtr address, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(SharedPtr address, uint32 x, uint32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_shared(SharedPtr address, Chunk c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(c.words[0]), "r"(c.words[1]), "r"(c.words[2]),
               "r"(c.words[3])
               : "memory");
}

}  // namespace hfc
