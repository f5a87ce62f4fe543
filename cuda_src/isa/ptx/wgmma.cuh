// Matrix products of a warpgroup with operands in shared memory, fp32 accumulation (PTX ISA: wgmma.mma_async, m64nNk16, 16-bit
// elements). They run on their own: between fence and wait the registers of accumulators and operands belong to them.
// Warp w of the warpgroup holds rows 16w to 16w + 15, each lane of them what isa/ptx/mma.cuh says of accumulators and of A.
#pragma once

#include "common/types.cuh"
#include "thread.cuh"

namespace hfc {

// Where a 128-byte-swizzled operand lies (PTX ISA: matrix descriptor), in units of 16 bytes, so that an offset is added. Its
// rows are panels of 64 elements, eight of which (1024 bytes) repeat the swizzle.
__device__ __forceinline__ int64 matrix_descriptor(SharedPtr address) {
  constexpr int64 kSwizzle128 = int64(1) << 62, kRowGroup = int64(1024 >> 4) << 32;
  return kSwizzle128 | kRowGroup | int64((address & 0x3ffff) >> 4);
}
// Added for an operand whose columns are N: bytes from one panel to the next.
__device__ __forceinline__ constexpr int64 panel_stride(int bytes) { return int64(bytes >> 4) << 16; }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the warpgroup's committed groups run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not see that wgmma works on registers after its line: what is computed from these stays on the side of
// this line where it is written.
template <int kTiles>
__device__ __forceinline__ void hold_registers(float (&accumulator)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(accumulator[j][e])::"memory");
}
template <int kSteps>
__device__ __forceinline__ void hold_registers(uint32 (&operand)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(operand[k][e])::"memory");
}

// wgmma_shared<Element>(d, a, b, accumulate): d (64, N) = [d +] A Bᵀ, A (64, 16) and B (N, 16) row-major in shared memory.
// wgmma_registers<Element>(d, a, b): d (64, N) += A B, A (64, 16) in registers, B (16, N) row-major in shared memory.
// wgmma_columns<Element, kAccumulate>(d, a, b): d (64, N) = [d +] Aᵀ Bᵀ, A (16, 64) and B (N, 16) row-major in shared memory.
// Without kAccumulate d is written only: what it held before takes no registers.
#define HFC_ELEMENTS_4(io, d, j) io(d[j][0]), io(d[j][1]), io(d[j][2]), io(d[j][3])
#define HFC_ELEMENTS_8(io, d, j) HFC_ELEMENTS_4(io, d, j), HFC_ELEMENTS_4(io, d, j + 1)
#define HFC_ELEMENTS_16(io, d, j) HFC_ELEMENTS_8(io, d, j), HFC_ELEMENTS_8(io, d, j + 2)
#define HFC_ELEMENTS_32(io, d, j) HFC_ELEMENTS_16(io, d, j), HFC_ELEMENTS_16(io, d, j + 4)
#define HFC_ELEMENTS_40(io, d, j) HFC_ELEMENTS_32(io, d, j), HFC_ELEMENTS_8(io, d, j + 8)
#define HFC_ELEMENTS_48(io, d, j) HFC_ELEMENTS_40(io, d, j), HFC_ELEMENTS_8(io, d, j + 10)
#define HFC_ELEMENTS_64(io, d, j) HFC_ELEMENTS_32(io, d, j), HFC_ELEMENTS_32(io, d, j + 8)
#define HFC_ELEMENTS_96(io, d, j) HFC_ELEMENTS_64(io, d, j), HFC_ELEMENTS_32(io, d, j + 16)
#define HFC_ELEMENTS_128(io, d, j) HFC_ELEMENTS_64(io, d, j), HFC_ELEMENTS_64(io, d, j + 16)

#define HFC_LIST_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HFC_LIST_40 HFC_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HFC_LIST_48 HFC_LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HFC_LIST_64 HFC_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HFC_LIST_96 \
  HFC_LIST_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HFC_LIST_128 \
  HFC_LIST_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define HFC_WGMMA_SHARED(type, n, list, elements, a_, b_, p_)                                                                   \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p_                                                                         \
               ", 0;\n"                                                                                                         \
               " wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list "}, " a_ ", " b_ ", p, 1, 1, 0, 0;\n}" \
               : elements                                                                                                       \
               : "l"(a), "l"(b), "r"(int(accumulate)))
#define HFC_WGMMA_REGISTERS(type, n, list, elements, a_, b_, p_)                                                               \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p_                                                                        \
               ", 0;\n"                                                                                                        \
               " wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list "}, {" a_ "}, " b_ ", p, 1, 1, 1;\n}" \
               : elements                                                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))
#define HFC_WGMMA_COLUMNS(type, n, list, elements, a_, b_, p_)                                                                  \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p_                                                                         \
               ", 0;\n"                                                                                                         \
               " wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list "}, " a_ ", " b_ ", p, 1, 1, 1, 0;\n}" \
               : elements                                                                                                       \
               : "l"(a), "l"(b), "r"(int(kAccumulate)))

// For N columns: n in the instruction's name, tiles = N / 8, the list of N / 2 accumulator registers, and the numbers of the
// operands that follow them: i0 … i5 count on from there.
#define HFC_DEFINE_WGMMA(n, tiles, list, elements, i0, i1, i2, i3, i4, i5)                                \
  template <typename Element>                                                                             \
  __device__ __forceinline__ void wgmma_shared(float (&d)[tiles][4], int64 a, int64 b, bool accumulate) { \
    if constexpr (is_same<Element, bf16>::value)                                                          \
      HFC_WGMMA_SHARED("bf16", n, list, elements("+f", d, 0), i0, i1, i2);                                \
    else                                                                                                  \
      HFC_WGMMA_SHARED("f16", n, list, elements("+f", d, 0), i0, i1, i2);                                 \
  }                                                                                                       \
  template <typename Element>                                                                             \
  __device__ __forceinline__ void wgmma_registers(float (&d)[tiles][4], const uint32(&a)[4], int64 b) {   \
    if constexpr (is_same<Element, bf16>::value)                                                          \
      HFC_WGMMA_REGISTERS("bf16", n, list, elements("+f", d, 0), i0 ", " i1 ", " i2 ", " i3, i4, i5);     \
    else                                                                                                  \
      HFC_WGMMA_REGISTERS("f16", n, list, elements("+f", d, 0), i0 ", " i1 ", " i2 ", " i3, i4, i5);      \
  }                                                                                                       \
  template <typename Element, bool kAccumulate>                                                           \
  __device__ __forceinline__ void wgmma_columns(float (&d)[tiles][4], int64 a, int64 b) {                 \
    if constexpr (is_same<Element, bf16>::value && kAccumulate)                                           \
      HFC_WGMMA_COLUMNS("bf16", n, list, elements("+f", d, 0), i0, i1, i2);                               \
    else if constexpr (is_same<Element, bf16>::value)                                                     \
      HFC_WGMMA_COLUMNS("bf16", n, list, elements("=f", d, 0), i0, i1, i2);                               \
    else if constexpr (kAccumulate)                                                                       \
      HFC_WGMMA_COLUMNS("f16", n, list, elements("+f", d, 0), i0, i1, i2);                                \
    else                                                                                                  \
      HFC_WGMMA_COLUMNS("f16", n, list, elements("=f", d, 0), i0, i1, i2);                                \
  }

HFC_DEFINE_WGMMA("64", 8, HFC_LIST_32, HFC_ELEMENTS_32, "%32", "%33", "%34", "%35", "%36", "%37")
HFC_DEFINE_WGMMA("80", 10, HFC_LIST_40, HFC_ELEMENTS_40, "%40", "%41", "%42", "%43", "%44", "%45")
HFC_DEFINE_WGMMA("96", 12, HFC_LIST_48, HFC_ELEMENTS_48, "%48", "%49", "%50", "%51", "%52", "%53")
HFC_DEFINE_WGMMA("128", 16, HFC_LIST_64, HFC_ELEMENTS_64, "%64", "%65", "%66", "%67", "%68", "%69")
HFC_DEFINE_WGMMA("192", 24, HFC_LIST_96, HFC_ELEMENTS_96, "%96", "%97", "%98", "%99", "%100", "%101")
HFC_DEFINE_WGMMA("256", 32, HFC_LIST_128, HFC_ELEMENTS_128, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace hfc
