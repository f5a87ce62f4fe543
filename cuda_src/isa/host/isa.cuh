// The machine seen by the kernels, on a CPU: the same functions as isa/ptx/isa.cuh, for g++ or clang++.
#pragma once

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

#include "common/types.cuh"
#include "launch.h"
#include "convert.cuh"
#include "copy.cuh"
#include "ldmatrix.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "thread.cuh"
