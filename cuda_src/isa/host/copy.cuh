// Global to shared copies. Nothing is asynchronous here: the barriers that a GPU needs order these copies too.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

constexpr bool kAsyncCopy = true;  // nothing here passes through registers that would be short

__device__ __forceinline__ Chunk load_global_chunk(const void* source) { return read<Chunk>(source); }
__device__ __forceinline__ void store_global_chunk(void* target, Chunk c) { std::memcpy(target, &c, sizeof(c)); }
__device__ __forceinline__ void store_global_pair(float* target, float x, float y) {
  target[0] = x;
  target[1] = y;
}

__device__ __forceinline__ void copy_async(SharedPtr target, const void* source, bool valid) {
  store_shared(target, valid ? load_global_chunk(source) : Chunk{});
}
__device__ __forceinline__ void copy_async_word(SharedPtr target, const float* source, bool valid) {
  store_shared(target, valid ? read<uint32>(source) : 0u);
}
__device__ __forceinline__ void copy_async_commit() {}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {}

}  // namespace hfc
