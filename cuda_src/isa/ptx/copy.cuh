// Global to shared copies (PTX ISA: cp.async). sm_75 has no asynchronous copy: a plain load and store stand in.
#pragma once

#include "common/types.cuh"
#include "convert.cuh"
#include "thread.cuh"

namespace hfc {

#if __CUDA_ARCH__ >= 800
constexpr bool kAsyncCopy = true;
#else
constexpr bool kAsyncCopy = false;  // copies pass through registers
#endif

__device__ __forceinline__ Chunk load_global_chunk(const void* source) {
  Chunk c;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3])
               : "l"(source));
  return c;
}
__device__ __forceinline__ void store_global_chunk(void* target, Chunk c) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(c.words[0]), "r"(c.words[1]), "r"(c.words[2]),
               "r"(c.words[3])
               : "memory");
}
__device__ __forceinline__ void store_global_pair(float* target, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x), "f"(y) : "memory");
}

// 16 bytes; zeros where not `valid` (then `source` is not read).
__device__ __forceinline__ void copy_async(SharedPtr target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
#else
  store_shared(target, valid ? load_global_chunk(source) : Chunk{});
#endif
}
// 4 bytes; zero where not `valid`.
__device__ __forceinline__ void copy_async_word(SharedPtr target, const float* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid ? 4 : 0) : "memory");
#else
  store_shared(target, valid ? float_bits(*source) : 0u);
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's groups are on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace hfc
