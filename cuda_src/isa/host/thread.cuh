// Threads, barriers, warp exchanges, shared memory addresses.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/types.cuh"
#include "launch.h"

namespace hfc {

using SharedPtr = char*;

constexpr int kSharedGap = 128;  // between shared arrays, poisoned for the address sanitizer; keeps their alignment

__device__ __forceinline__ SharedPtr shared_base() { return host::Block::current->memory().base(); }
inline void mark_shared_gap(SharedPtr gap) {
#ifdef HFC_ADDRESS_SANITIZER
  __asan_poison_memory_region(gap, kSharedGap);
#endif
  (void)gap;
}

__device__ __forceinline__ int thread_id() { return host::Block::current->thread(); }
__device__ __forceinline__ int lane_id() { return thread_id() % kWarpSize; }
__device__ __forceinline__ int warp_id() { return thread_id() / kWarpSize; }
__device__ __forceinline__ int64 block_id() { return host::Block::current->block(); }
__device__ __forceinline__ uint32 block_index() { return uint32(block_id()); }
__device__ __forceinline__ uint32 num_blocks() { return uint32(host::Block::current->num_blocks()); }

__device__ __forceinline__ int64 in_place(int64 value) { return value; }
__device__ __forceinline__ int in_place(int value) { return value; }
__device__ __forceinline__ SharedPtr in_place(SharedPtr address) { return address; }

inline void sync_threads() { host::Block::current->sync(); }
inline void sync_warp() {
  host::Block::current->warp_collective(nullptr, [](void**) {});
}

// Every lane's value is replaced by `reduce` of the values of its group: the lanes that differ only in the bits of `mask`.
template <int kMask, typename T, int kCount, typename Reduce>
inline void exchange(T (&values)[kCount], Reduce reduce) {
  host::Block::current->warp_collective(values, [&](void** lanes) {
    for (int i = 0; i < kCount; ++i) {
      T before[kWarpSize];
      for (int lane = 0; lane < kWarpSize; ++lane) before[lane] = static_cast<T*>(lanes[lane])[i];
      for (int lane = 0; lane < kWarpSize; ++lane) {
        T result = before[lane];
        for (int other = 0; other < kWarpSize; ++other)
          if (other != lane && (other & ~kMask) == (lane & ~kMask)) result = reduce(result, before[other]);
        static_cast<T*>(lanes[lane])[i] = result;
      }
    }
  });
}

template <int kCount>
inline void quad_max(float (&values)[kCount]) {
  exchange<3>(values, [](float a, float b) { return a >= b || b != b ? a : b; });
}
template <int kCount>
inline void quad_sum(float (&values)[kCount]) {
  exchange<3>(values, [](float a, float b) { return a + b; });
}
template <int kLanes>
inline float group_sum(float value) {
  float values[1] = {value};
  exchange<kLanes - 1>(values, [](float a, float b) { return a + b; });
  return values[0];
}
inline uint32 column_or(uint32 bits) {
  uint32 values[1] = {bits};
  exchange<28>(values, [](uint32 a, uint32 b) { return a | b; });
  return values[0];
}
inline bool warp_any(bool value) {
  bool any = value;
  host::Block::current->warp_collective(&any, [](void** lanes) {
    bool result = false;
    for (int lane = 0; lane < kWarpSize; ++lane) result |= *static_cast<bool*>(lanes[lane]);
    for (int lane = 0; lane < kWarpSize; ++lane) *static_cast<bool*>(lanes[lane]) = result;
  });
  return any;
}
inline uint32 warp_ballot(bool value) {
  uint32 values[1] = {uint32(value) << lane_id()};
  exchange<31>(values, [](uint32 a, uint32 b) { return a | b; });
  return values[0];
}
inline int first_bit(uint32 bits) { return __builtin_ctz(bits); }  // of at least one
inline int leading_zeros(uint32 bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int warp_inclusive_sum(int value) {
  host::Block::current->warp_collective(&value, [](void** lanes) {
    for (int lane = 1; lane < kWarpSize; ++lane) *static_cast<int*>(lanes[lane]) += *static_cast<int*>(lanes[lane - 1]);
  });
  return value;
}
inline int warp_min(int value) {
  int values[1] = {value};
  exchange<31>(values, [](int a, int b) { return a < b ? a : b; });
  return values[0];
}
inline float warp_max(float value) {
  float values[1] = {value};
  exchange<31>(values, [](float a, float b) { return a >= b || b != b ? a : b; });
  return values[0];
}

inline SharedPtr align_up(SharedPtr address, int bytes) { return address + (bytes - (address - shared_base()) % bytes) % bytes; }

// Valid where the address is aligned to more than `bits`.
__device__ __forceinline__ SharedPtr flip_bits(SharedPtr address, int bits) {
  return reinterpret_cast<SharedPtr>(reinterpret_cast<std::uintptr_t>(address) ^ std::uintptr_t(bits));
}

template <typename T>
__device__ __forceinline__ T read(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof(T));
  return value;
}

__device__ __forceinline__ int load_shared_int(SharedPtr address) { return read<int>(address); }
__device__ __forceinline__ uint32 load_shared(SharedPtr address) { return read<uint32>(address); }
__device__ __forceinline__ void load_shared(SharedPtr address, float& x, float& y) {
  x = read<float>(address);
  y = read<float>(address + 4);
}
__device__ __forceinline__ Chunk load_shared_chunk(SharedPtr address) { return read<Chunk>(address); }
template <typename T>
__device__ __forceinline__ void write_shared(SharedPtr address, const T& value) {
  std::memcpy(address, &value, sizeof(T));
  if (host::watches_writes) host::Block::current->memory().note_write(thread_id(), address, sizeof(T));
}
__device__ __forceinline__ void store_shared(SharedPtr address, uint32 value) { write_shared(address, value); }
__device__ __forceinline__ void store_shared(SharedPtr address, uint32 x, uint32 y) {
  store_shared(address, x);
  store_shared(address + 4, y);
}
__device__ __forceinline__ void store_shared(SharedPtr address, Chunk c) { write_shared(address, c); }

}  // namespace hfc
