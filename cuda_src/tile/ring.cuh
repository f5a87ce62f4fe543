// Places in shared memory that are used round and round.
#pragma once

#include "common/types.cuh"

namespace hfc {

// A place in a ring of kSize, and the parity of the barrier phases of this round.
template <int kSize>
class Ring {
 public:
  __device__ __forceinline__ int slot() const { return int(place_ % kWrap); }
  __device__ __forceinline__ uint32 parity() const { return place_ / kWrap % 2; }
  __device__ __forceinline__ void advance() {
    ++place_;
    if (kSize != kWrap && slot() == kSize) place_ += kWrap - kSize;
  }

 private:
  static constexpr uint32 kWrap = kSize <= 1 ? 1 : kSize <= 2 ? 2 : kSize <= 4 ? 4 : 8;  // rounds start at its multiples
  static_assert(kSize <= 8);
  uint32 place_ = 0;  // in one register
};

}  // namespace hfc
