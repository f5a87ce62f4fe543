"""Thread blocks that take turns, on the CPU: they keep to them, and who waits in vain is told."""

from __future__ import annotations

import ctypes

import numpy as np
import own_kernel
import pytest

from hf_flash_cupy.jit import module
from hf_flash_cupy.params import BACKWARD_SM90_PARAMS

FLOATS = 32
BLOCKS = 9

KERNEL = """
#pragma once
#include "fa2/backward_sm90_traits.cuh"
#include "turn.cuh"
namespace hfc {
// Each thread block adds 32 floats to dq_accum: -10 to the power of its number. window_left names a fault.
template <typename Config>
__device__ __forceinline__ void in_turn(const BackwardSm90Params& params) {
  const int fault = params.attention.window_left, block = int(block_id()), last = int(num_blocks()) - 1;
  float power = block % 2 == 0 ? 1.0f : -1.0f;
  for (int i = 0; i < block; ++i) power *= 10.0f;
  store_shared(shared_base() + thread_id() * 4, float_bits(power));
  fence_async_proxy();
  sync_threads();
  if (thread_id() != 0) return;
  const int mine = fault == 1 ? last - block : fault == 2 && block == last ? last + 1 : block;
  wait_turn(params.dq_turns, mine);
  bulk_add(params.attention.dq_accum, shared_base(), 32 * 4);
  tma_store_commit();
  if (fault == 3) tma_store_wait_read();
  else tma_store_wait();
  pass_turn(params.dq_turns, mine + 1);
}
}  // namespace hfc
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> module.HostKernel:
    folder = tmp_path_factory.mktemp("turns")
    return own_kernel.build(folder, KERNEL, "in_turn", "BackwardSm90Params", FLOATS, shared_bytes=FLOATS * 4)


def run(kernel: module.HostKernel, fault: int, workers: int, first: int = 0) -> tuple[np.ndarray, int]:
    """The sums, and whose turn it is afterwards. Raises RuntimeError where the kernel fails."""
    sums, turn = np.full(FLOATS, 0.5, np.float32), np.array([first], np.int32)
    params = np.zeros(1, BACKWARD_SM90_PARAMS)
    params["attention"]["dq_accum"], params["dq_turns"] = sums.ctypes.data, turn.ctypes.data
    params["attention"]["window_left"] = fault
    shape = (ctypes.c_uint * 4)(BLOCKS, 1, 1, workers)
    if (failure := kernel.function(params.ctypes.data, ctypes.addressof(shape))) is not None:
        raise RuntimeError(failure.decode())
    return sums, int(turn[0])


@pytest.mark.parametrize("workers", [1, 2, 4, BLOCKS, 2 * BLOCKS])
def test_in_the_order_of_their_numbers(kernel: module.HostKernel, workers: int) -> None:
    expected = np.float32(0.5)
    for block in range(BLOCKS):
        expected += np.float32((-10.0) ** block)
    for _ in range(20):
        sums, turn = run(kernel, 0, workers)
        assert (sums == expected).all()
        assert turn == BLOCKS


@pytest.mark.parametrize("workers", [1, 3])  # with all blocks at once, who waits for a later one gets on
@pytest.mark.parametrize(
    ("fault", "first", "message"),
    [
        (0, 1, "block 0, thread 0: deadlock: threads 0 to 0 wait for turn 0; threads 1 to 31 are done"),
        (1, 0, "block 0, thread 0: deadlock: threads 0 to 0 wait for turn 8; threads 1 to 31 are done"),
        (2, 0, "block 8, thread 0: deadlock: threads 0 to 0 wait for turn 9; threads 1 to 31 are done"),
        (3, 0, "block 0, thread 0: passed on before copies to device memory have come: the turn to 1"),
    ],
)
def test_what_would_hang_or_race_is_told(
    kernel: module.HostKernel, fault: int, first: int, message: str, workers: int
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(kernel, fault, workers, first)
