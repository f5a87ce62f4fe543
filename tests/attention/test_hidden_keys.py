"""Keys that no row of their batch entry sees never influence anything, even where they hold NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention

SEQLEN_K = 133
Case = tuple[dict[str, Any], Tensor]  # options of the call; (batch, seqlen_k) bool, True = hidden from every row
BATCH = 2


def nowhere(device: torch.device) -> Tensor:
    return torch.zeros(BATCH, SEQLEN_K, dtype=torch.bool, device=device)


def interval_per_entry(seqlen_q: int, device: torch.device, *ends: tuple[int, int]) -> Case:
    hidden = nowhere(device)
    for entry, (lo, hi) in enumerate(ends):
        hidden[entry, :lo] = hidden[entry, hi:] = True
    intervals = torch.tensor(ends, dtype=torch.int32, device=device)[:, None, None].expand(-1, -1, seqlen_q, -1)
    return {"key_intervals": intervals}, hidden


def left_padding(seqlen_q: int, device: torch.device) -> Case:
    return interval_per_entry(seqlen_q, device, (0, SEQLEN_K), (70, SEQLEN_K))


def right_padding(seqlen_q: int, device: torch.device) -> Case:
    return interval_per_entry(seqlen_q, device, (0, 61), (0, SEQLEN_K))


def unfilled_cache_slots(seqlen_q: int, device: torch.device) -> Case:
    """A static cache: causal over the 100 filled slots, what lies behind them was never written."""
    filled = 100
    ends = filled - seqlen_q + torch.arange(seqlen_q, device=device) + 1
    intervals = torch.stack([torch.zeros_like(ends), ends], dim=-1).to(torch.int32)
    hidden = nowhere(device)
    hidden[:, filled:] = True
    return {"key_intervals": intervals}, hidden


def holes(seqlen_q: int, device: torch.device) -> Case:
    """Packed documents: rows see keys 3 to 20 or keys 70 to 90; nobody sees what lies between."""
    ends = torch.tensor([(3, 20), (70, 90)], dtype=torch.int32, device=device)
    hidden = ~nowhere(device)
    hidden[:, 3:20] = False
    if seqlen_q > 1:
        hidden[:, 70:90] = False
    return {"key_intervals": ends.repeat(seqlen_q, 1)[:seqlen_q]}, hidden


def mask_columns(seqlen_q: int, device: torch.device) -> Case:
    """Every third key, and for entry 1 a whole block of keys."""
    mask = ~nowhere(device)
    mask[:, ::3] = False
    mask[1, 64:128] = False
    return {"mask": mask[:, None, None]}, ~mask


def mask_and_causal(seqlen_q: int, device: torch.device) -> Case:
    options, hidden = mask_columns(seqlen_q, device)
    return {**options, "causal": True}, hidden


def mask_and_intervals(seqlen_q: int, device: torch.device) -> Case:
    options, hidden = mask_columns(seqlen_q, device)
    more, hidden_too = left_padding(seqlen_q, device)
    return {**options, **more}, hidden | hidden_too


def left_of_the_window(seqlen_q: int, device: torch.device) -> Case:
    hidden = nowhere(device)
    hidden[:, : max(SEQLEN_K - seqlen_q - 5, 0)] = True
    return {"window_size": (5, 0)}, hidden


def softcapped(seqlen_q: int, device: torch.device) -> Case:
    options, hidden = mask_and_intervals(seqlen_q, device)
    return {**options, "softcap": 3.0}, hidden


CASES: list[Callable[[int, torch.device], Case]] = [
    left_padding, right_padding, unfilled_cache_slots, holes, mask_columns, mask_and_causal,
    mask_and_intervals, left_of_the_window, softcapped,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("seqlen_q", [1, 37, 64, 100])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_hidden_keys_never_matter(
    device: torch.device, case: Callable[[int, torch.device], Case], seqlen_q: int, dtype: torch.dtype
) -> None:
    q, k, v = check.qkv(BATCH, seqlen_q, SEQLEN_K, 4, 32, num_heads_k=2, dtype=dtype, device=device)
    options, hidden = case(seqlen_q, device)
    assert hidden.any()
    plain, plain_lse = flash_attention(q, k, v, return_lse=True, **options)
    assert plain.isfinite().all()
    for value in (math.nan, math.inf, -math.inf):
        dirty_k, dirty_v = (x.masked_fill(hidden[:, :, None, None], value) for x in (k, v))
        check.check(q, dirty_k, dirty_v, **options)
        for tensors in ((q, dirty_k, v), (q, k, dirty_v), (q, dirty_k, dirty_v)):
            out, lse = flash_attention(*tensors, return_lse=True, **options)
            assert check.identical(out, plain)
            assert check.identical(lse, plain_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
def test_other_entries_keys_never_matter(device: torch.device, dtype: torch.dtype) -> None:
    """NaN in one batch entry, and in the heads of one group, stays there."""
    q, k, v = check.qkv(3, 37, 70, 4, 32, num_heads_k=2, dtype=dtype, device=device)
    plain = flash_attention(q, k, v)
    k[1], v[1] = math.nan, math.nan
    v[0, :, 1] = math.inf
    out = flash_attention(q, k, v)
    assert out[1].isnan().all()
    assert not out[0, :, 2:].isfinite().any()
    assert check.identical(out[2], plain[2])
    assert check.identical(out[0, :, :2], plain[0, :, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
def test_visible_nan_shows(device: torch.device, dtype: torch.dtype) -> None:
    """A NaN that a row does see is never swallowed; rows of other queries keep their values."""
    q, k, v = check.qkv(1, 70, 70, 2, 32, dtype=dtype, device=device)
    plain = flash_attention(q, k, v)
    q[:, 5] = math.nan
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out[:, 5].isnan().all()
    assert lse[:, :, 5].isnan().all()
    out[:, 5] = plain[:, 5]
    assert check.identical(out, plain)
    k[0, 9, 0] = math.nan
    assert flash_attention(q, k, v)[:, :, 0].isnan().all()


def test_beyond_the_end_of_the_tensors(device: torch.device) -> None:
    """What lies in memory behind the last key and before the first one is never read into the result."""
    q, k, v = check.qkv(1, 70, 70, 2, 32, dtype=torch.float32, device=device)
    plain = flash_attention(q, k, v)
    framed = [torch.nn.functional.pad(x, (0, 0, 0, 0, 70, 70), value=math.nan)[:, 70:140] for x in (q, k, v)]
    assert check.identical(flash_attention(*framed), plain)
