"""What a call costs the CPU, before the GPU has done anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_flash_cupy.functional import flash_attention

_CALLS, _SAMPLES = 100, 10  # few at a time: the device's queue must never fill


def call_costs() -> dict[str, float]:
    """CPU microseconds to enqueue one call for a tiny problem: ours, torch's, and an elementwise operation."""
    q, k, v = (torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first, second, third = (x.transpose(1, 2) for x in (q, k, v))
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return {
            "cupy_fa2": _cost(lambda: flash_attention(q, k, v)),
            "sdpa": _cost(lambda: scaled_dot_product_attention(first, second, third)),
            "elementwise": _cost(lambda: q + q),
        }


def _cost(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - start) / _CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)
