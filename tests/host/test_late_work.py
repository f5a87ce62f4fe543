"""The CPU does copies and products as late as can be: a kernel that does not wait for them is found out."""

from __future__ import annotations

import ctypes

import numpy as np
import own_kernel
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import tensormap
from hf_flash_cupy.jit import module
from hf_flash_cupy.params import FORWARD_SM90_PARAMS

THREADS = 128
SHARED_BYTES = 3 * 8192 + 64

KERNEL = """
#pragma once
#include "fa2/forward_sm90_traits.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
namespace hfc {
// out = q kᵀ, each (64, 64), by one warpgroup. window_left names the fault of the last thread block.
template <typename Config>
__device__ __forceinline__ void late(const ForwardSm90Params& params) {
  const int fault = block_index() + 1 == num_blocks() ? params.attention.window_left : 0;
  const SharedPtr q = align_up(shared_base(), 1024), k = q + 8192, out = k + 8192, loaded = out + 8192;
  if (thread_id() == 0 && fault != 1) mbarrier_init(loaded, fault == 2 ? 2 : 1);
  fence_mbarrier_init();
  sync_threads();
  if (thread_id() == 0) {
    mbarrier_arrive_expect(loaded, fault == 3 ? 3 * 8192 : 2 * 8192);
    tma_load(q, params.q, loaded, 0, 0, 0, 0);
    tma_load(k, params.k, loaded, 0, 0, 0, 0);
  }
  if (fault != 4) mbarrier_wait(loaded, 0);
  float s[8][4] = {}, early[8][4];
  wgmma_fence();
  for (int step = 0; step < 4; ++step)
    wgmma_shared<bf16>(s, matrix_descriptor(q + 32 * step), matrix_descriptor(k + 32 * step), step > 0);
  if (fault != 5) wgmma_commit();
  if (fault == 6) sync_threads();
  if (fault == 6 && thread_id() == 0) {
    mbarrier_arrive_expect(loaded, 8192);
    tma_load(k, params.v, loaded, 0, 0, 0, 0);
  }
  for (int i = 0; i < 32; ++i) early[i / 4][i % 4] = s[i / 4][i % 4];
  wgmma_wait<0>();
  if (fault == 4) mbarrier_wait(loaded, 0);
  if (fault == 6) mbarrier_wait(loaded, 1);
  const int row = 16 * warp_id() + lane_id() % 16;
  for (int i = 0; i < 4; ++i) {
    uint32 matrices[4];
    for (int m = 0; m < 4; ++m) {
      const float* pair = &(fault == 7 ? early : s)[2 * i + m / 2][m % 2 * 2];
      matrices[m] = pack2<bf16>(pair[0], pair[1]);
    }
    stmatrix(out + row * 128 + ((2 * i + lane_id() / 16) ^ (fault == 8 ? 0 : row % 8)) * 16, matrices);
  }
  if (fault != 9) fence_async_proxy();
  sync_threads();
  if (thread_id() != 0) return;
  tma_store(params.out, out, 0, 0, 0, 0);
  if (fault != 10) tma_store_commit();
  tma_store_wait();
}
}  // namespace hfc
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> module.HostKernel:
    folder = tmp_path_factory.mktemp("late")
    return own_kernel.build(folder, KERNEL, "late", "ForwardSm90Params", THREADS, shared_bytes=SHARED_BYTES)


def run(kernel: module.HostKernel, fault: int, block: int = 0) -> tuple[Tensor, Tensor]:
    """What the kernel gives in thread block ``block``, and the truth. Raises RuntimeError where it fails."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(64, 64).bfloat16() for name in ("q", "k", "v")}
    tensors["out"] = torch.full((64, 64), torch.nan, dtype=torch.bfloat16)
    params = np.zeros(1, FORWARD_SM90_PARAMS)
    for name, tensor in tensors.items():
        box = tensormap.TensorBox("bf16", (64, 64, 1, 1), (128, 16, 16), (64, 64))
        params[name] = np.array(tensormap.host_words(box, tensor.data_ptr()), np.uint64).tobytes()
    params["attention"]["window_left"] = fault
    shape = (ctypes.c_uint * 4)(block + 1, 1, 1, 1)
    if (failure := kernel.function(params.ctypes.data, ctypes.addressof(shape))) is not None:
        raise RuntimeError(failure.decode())
    return tensors["out"].double(), tensors["q"].double() @ tensors["k"].double().T


@pytest.mark.parametrize("block", [0, 1])  # the earliest work first, the latest first
def test_without_a_fault(kernel: module.HostKernel, block: int) -> None:
    out, truth = run(kernel, 0, block)
    torch.testing.assert_close(out, truth, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("fault", "block"),
    [
        (4, 1),  # nobody waits for a load: multiplied before it comes
        (7, 0),  # sums are read before the wait
    ],
)
def test_what_is_not_there_yet_is_nan(kernel: module.HostKernel, fault: int, block: int) -> None:
    assert run(kernel, fault, block)[0].isnan().all()


def test_what_is_not_swizzled_is_wrong(kernel: module.HostKernel) -> None:
    out, truth = run(kernel, 8)
    assert not (out - truth).abs().max() < 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "not initialised: mbarrier 24576"),
        (2, "deadlock: threads 0 to 127 wait for mbarrier 24576"),
        (3, "deadlock: threads 0 to 127 wait for mbarrier 24576"),
        (4, "operands change while a product is under way"),  # the load comes after its start
        (5, "ends before products that its block started"),
        (6, "operands change while a product is under way"),  # the next load
        (9, "written and not fenced: what goes to device memory from 16384"),
        (10, "ends before its copies to device memory have read shared memory"),
    ],
)
def test_the_rest_is_told(kernel: module.HostKernel, fault: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(kernel, fault)
