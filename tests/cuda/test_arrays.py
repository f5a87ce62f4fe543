"""CUDA arrays of other libraries, through DLPack: zero copy, in the order of their streams (case T06)."""

from __future__ import annotations

from typing import Any

import attention_check as check
import pytest
import torch

from hf_flash_cupy import flash_attention

cupy = pytest.importorskip("cupy")

DEVICE = torch.device("cuda")


def arrays(dtype: torch.dtype, seed: int = 0) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    tensors = check.qkv(2, 70, 131, 4, 64, num_heads_k=2, dtype=dtype, device=DEVICE, seed=seed)
    return [cupy.from_dlpack(x).copy() for x in tensors], tensors


@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
def test_cupy_arrays(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    inputs, tensors = arrays(dtype)
    expected, expected_lse = flash_attention(*tensors, causal=True, return_lse=True)
    out, lse = flash_attention(*inputs, causal=True, return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    assert check.identical(torch.from_dlpack(out), expected)
    assert check.identical(torch.from_dlpack(lse), expected_lse)
    alone = flash_attention(*inputs, causal=True)
    assert str(alone.dtype) == str(dtype).removeprefix("torch.")


def test_masks_travel_too() -> None:
    inputs, tensors = arrays(torch.float32)
    mask = torch.rand(70, 131, device=DEVICE) < 0.5
    ends = torch.tensor([3, 100], dtype=torch.int32, device=DEVICE)
    expected = flash_attention(*tensors, mask=mask, key_intervals=ends)
    out = flash_attention(*inputs, mask=cupy.from_dlpack(mask), key_intervals=cupy.from_dlpack(ends))
    assert check.identical(torch.from_dlpack(out), expected)


def test_strided_arrays() -> None:
    _, tensors = arrays(torch.float16)
    expected = flash_attention(*tensors)
    views = [cupy.from_dlpack(x.transpose(1, 2).contiguous()).transpose(0, 2, 1, 3) for x in tensors]
    assert check.identical(torch.from_dlpack(flash_attention(*views)), expected)


def test_nothing_is_copied() -> None:
    inputs, _ = arrays(torch.float16)
    flash_attention(*inputs)
    pool = cupy.get_default_memory_pool()
    used, before = pool.used_bytes(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attention(*inputs)
    assert pool.used_bytes() == used
    rounded = -(-out.nbytes // 512) * 512
    assert torch.cuda.max_memory_allocated() - before == rounded
    del out
    assert torch.cuda.memory_allocated() == before, "the exported array kept torch's memory"


def test_stream_order() -> None:
    """Arrays written on a CuPy stream of their own are waited for; the result may be read on it at once."""
    fresh, tensors = arrays(torch.float16, seed=1)
    stale = [cupy.full_like(x, cupy.nan) for x in fresh]
    expected = flash_attention(*tensors)
    flash_attention(*stale)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(100_000_000)
        for target, source in zip(stale, fresh, strict=True):
            target[...] = source
        doubled = flash_attention(*stale) * 2
    stream.synchronize()
    assert check.identical(torch.from_dlpack(doubled), expected * 2)


def test_stream_order_between_libraries() -> None:
    """CuPy's stream is not torch's: DLPack makes each wait for what the other has been given."""
    fresh, tensors = arrays(torch.float16, seed=2)
    stale = [cupy.full_like(x, cupy.nan) for x in fresh]
    expected = flash_attention(*tensors)
    flash_attention(*stale)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(100_000_000)
        for target, source in zip(stale, fresh, strict=True):
            target[...] = source
        out = flash_attention(*stale)  # torch's current stream is another one
        doubled = out * 2
    stream.synchronize()
    torch.cuda.synchronize()
    assert check.identical(torch.from_dlpack(doubled), expected * 2)
