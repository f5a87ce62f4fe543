// Counters in memory that thread blocks, hence several worker threads, share.
#pragma once

#include "arrival.cuh"
#include "common/types.cuh"

namespace hfc {

inline uint32 atomic_increment(uint32* counter, uint32 last) { return count_arrival(counter, last); }

}  // namespace hfc
