"""A kernel that goes wrong in a chosen way, to prove that the sanitizers of the host build see it.

As a program: ``python planted_faults.py FOLDER`` builds it from a copy of the sources in FOLDER, runs every
fault in a child of its own and prints, as JSON, how each ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

os.environ.pop("LD_PRELOAD", None)

import numpy as np
import own_kernel
from sanitizer_cases import in_child

from hf_flash_cupy import tiles
from hf_flash_cupy.jit import module
from hf_flash_cupy.params import ATTENTION_PARAMS

THREADS = 64
ARRAY_BYTES = THREADS * 4  # of each of the two shared arrays

KERNEL = """
#pragma once
#include "common/params.cuh"
#include "isa.cuh"
namespace hfc {
// out[i] = q[i] through two shared arrays with a gap between them. window_left names the fault.
template <typename Config>
__device__ __forceinline__ void faulty(const AttentionParams& params) {
  constexpr int kBytes = Config::kArrayBytes;
  const int fault = params.window_left, i = thread_id(), last = i == Config::kThreads - 1;
  const SharedPtr first = shared_base(), second = first + kBytes + kSharedGap;
  mark_shared_gap(first + kBytes);
  const float* q = static_cast<const float*>(params.q.data);
  float* out = static_cast<float*>(params.out.data);
  volatile float local[4] = {0.0f, 0.0f, 0.0f, 0.0f}, *volatile anywhere = local;
  store_shared(first + 4 * i, float_bits(q[i + (last && fault == 1)]));
  store_shared(second + 4 * i, load_shared(first + 4 * i));
  sync_threads();
  if (last && fault == 2) out[i + 1] = 1.0f;
  if (last && fault == 3) store_shared(second, load_shared(first + 4 * i + 4));
  if (last && fault == 4) store_shared(first + 4 * i + 4, 1u);
  if (last && fault == 5) store_shared(second + 4 * i + 4, 1u);
  if (last && fault == 6) store_shared(first - 4, 1u);
  if (last && fault == 7) anywhere[params.seqlen_q] = 1.0f;
  if (last && fault == 8) out[0] = float(params.seqlen_k + i);
  if (last && fault == 9) out[0] = float(1 << params.seqlen_q * i);
  out[i] = bits_float(load_shared(second + 4 * i)) + local[0];
}
}  // namespace hfc
"""

FAULTS = {
    "none": 0,
    "global-read": 1,
    "global-write": 2,
    "shared-read": 3,
    "shared-write": 4,
    "shared-end": 5,
    "shared-begin": 6,
    "stack": 7,
    "overflow": 8,
    "shift": 9,
}


def run(kernel: module.HostKernel, fault: int) -> None:
    """One block of the kernel on heap memory of exact size; raises where its result is wrong."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pointers = [libc.malloc(ctypes.c_size_t(ARRAY_BYTES)) for _ in range(2)]
    q, out = (np.ctypeslib.as_array((ctypes.c_float * THREADS).from_address(pointer)) for pointer in pointers)
    q[:] = np.arange(THREADS)
    params = np.zeros(1, ATTENTION_PARAMS)
    params["q"]["data"], params["out"]["data"] = pointers
    params["window_left"], params["seqlen_q"], params["seqlen_k"] = fault, 4, 2**31 - 1
    shape = (ctypes.c_uint * 4)(1, 1, 1, 1)
    if kernel.function(params.ctypes.data, ctypes.addressof(shape)) is not None or not np.array_equal(q, out):
        raise RuntimeError("the kernel computed something else")


def main(folder: str) -> None:
    constants = (("int kThreads", str(THREADS)), ("int kArrayBytes", str(ARRAY_BYTES)))
    shared = 2 * ARRAY_BYTES + tiles.HOST_GAP
    options = {"constants": constants, "shared_bytes": shared}
    kernel = own_kernel.build(Path(folder), KERNEL, "faulty", "AttentionParams", THREADS, **options)
    print(json.dumps({name: in_child(lambda fault=fault: run(kernel, fault)) for name, fault in FAULTS.items()}))  # type: ignore[misc]


if __name__ == "__main__":
    main(*sys.argv[1:])
