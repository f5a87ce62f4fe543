// Copies of boxes of a tensor by the copy engine (PTX ISA: cp.async.bulk.tensor). What a box has beyond the tensor arrives as
// zeros and is not written.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

// A CUtensorMap, encoded by the driver (CUDA driver API: cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  int64 words[16];
};

// The box at (column, row, head, entry) to shared memory; its bytes are reported to `barrier`. One thread calls.
__device__ __forceinline__ void tma_load(SharedPtr target, const TensorMap& map, SharedPtr barrier, int column, int row, int head,
                                         int entry) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(entry)
      : "memory");
}
// The box from shared memory. One thread calls, after fence_async_proxy() of all that wrote there.
__device__ __forceinline__ void tma_store(const TensorMap& map, SharedPtr source, int column, int row, int head, int entry) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(entry)
               : "memory");
}
// Neighbouring bytes, a multiple of 16 at multiples of 16, to shared memory; reported to `barrier` (PTX ISA: cp.async.bulk).
__device__ __forceinline__ void bulk_load(SharedPtr target, const void* source, int bytes, SharedPtr barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// Neighbouring floats in shared memory are added to those at `target` (PTX ISA: cp.reduce.async.bulk): a store as any other, in
// whatever order with other threads'. One thread calls, after fence_async_proxy() of all that wrote the source.
__device__ __forceinline__ void bulk_add(float* target, SharedPtr source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}
// The calling thread's stores since the last commit form a group (PTX ISA: cp.async.bulk.commit_group).
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the calling thread's groups have read shared memory, or have written (PTX ISA: cp.async.bulk.wait_group).
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's accesses to shared memory before those of the copy engine and of wgmma (PTX ISA: fence.proxy.async).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace hfc
