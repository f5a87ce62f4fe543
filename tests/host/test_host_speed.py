"""How fast the host kernels are. Printed, not judged: a shared machine's figure says little on its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from hf_flash_cupy import flash_attention


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_speed(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    batch, seqlen, num_heads, head_dim = 1, 1024, 4, 64
    q, k, v = (torch.randn(batch, seqlen, num_heads, head_dim).to(dtype) for _ in range(3))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        flash_attention(q, k, v)  # compiles
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            flash_attention(q, k, v)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    speed = 4 * batch * num_heads * seqlen * seqlen * head_dim / min(seconds) / 1e9
    record_property("GFLOP/s", round(speed, 2))
    with capsys.disabled():
        print(f"\nhost kernel, D=64, S=1024, {dtype}, 2 threads: {speed:.1f} GFLOP/s")
