// The machine seen by the kernels: one PTX instruction, one function. isa/host/isa.cuh offers the same for a CPU.
#pragma once

#include "common/types.cuh"
#include "convert.cuh"
#include "copy.cuh"
#include "ldmatrix.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "thread.cuh"
