"""What the tests of the Hopper forward share, on its GPU and on the CPU: outputs are poisoned, and it is what ran."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_check import check, check_varlen, cumulative, identical, poisoned_allocations
from torch import Tensor

from hf_flash_cupy import execute, flash_attention, flash_attention_varlen
from hf_flash_cupy.launch import record_launches

HALVES = (torch.bfloat16, torch.float16)
CUDA = torch.device("cuda", 0)
KERNEL = "fa2_forward_sm90"


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Plans that a test makes with other settings do not outlive it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    with fresh_plans():
        yield


@contextmanager
def fresh_plans() -> Iterator[None]:
    execute._local.__dict__.clear()
    with poisoned_allocations():
        yield
    execute._local.__dict__.clear()


def check_hopper(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    with record_launches() as records:
        check(q, k, v, **options)
    assert [record.kernel for record in records] == [KERNEL]


def check_hopper_varlen(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: list[int], offsets_k: list[int], **options: Any
) -> None:
    with record_launches() as records:
        check_varlen(q, k, v, offsets_q, offsets_k, **options)
    assert [record.kernel for record in records] == [KERNEL]


def check_packing(q: Tensor, k: Tensor, v: Tensor, offsets_q: list[int], offsets_k: list[int]) -> None:
    """Plain, causal, with a window, and with every modification of the scores; q of four heads."""
    slopes = torch.tensor([0.5, 0.25, 0.01, -0.1], device=q.device)
    check_hopper_varlen(q, k, v, offsets_q, offsets_k)
    check_hopper_varlen(q, k, v, offsets_q, offsets_k, causal=True)
    check_hopper_varlen(q, k, v, offsets_q, offsets_k, window_size=(100, 20))
    by_entry = slopes.expand(len(offsets_q) - 1, 4).contiguous()
    modified = {"causal": True, "alibi_slopes": by_entry, "sinks": slopes, "softcap": 9.0}
    check_hopper_varlen(q, k, v, offsets_q, offsets_k, **modified)


def check_hidden_keys(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, values: tuple[float, ...], **options: Any
) -> None:
    """Keys that nobody sees (hidden: (batch, keys)) may hold ``values``."""
    plain = flash_attention(q, k, v, return_lse=True, **options)
    for value in values:
        dirty_k, dirty_v = (x.masked_fill(hidden[:, :, None, None], value) for x in (k, v))
        check_hopper(q, dirty_k, dirty_v, **options)
        again = flash_attention(q, dirty_k, dirty_v, return_lse=True, **options)
        assert all(identical(x, y) for x, y in zip(plain, again, strict=True))


def check_other_sequences(q: Tensor, k: Tensor, v: Tensor, offsets: list[int]) -> None:
    """NaN in the second packed sequence, and beyond the last offset, stays there. q, k and v become such."""
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=q.device)
    plain = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 200, 200)
    for x in (q, k, v):
        x[offsets[1] : offsets[2]] = x[offsets[-1] :] = math.nan
    out = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 200, 200)
    assert out[offsets[1] : offsets[2]].isnan().all()
    out[offsets[1] : offsets[2]] = plain[offsets[1] : offsets[2]]
    assert identical(out, plain)


def padding(rows: int, keys: int, device: torch.device) -> Tensor:
    """Left and right padding, an entry each."""
    ends = torch.tensor([(keys // 3, keys), (0, keys - keys // 4)], dtype=torch.int32, device=device)
    return ends[:, None, None].expand(-1, -1, rows, -1)


def documents(rows: int, keys: int, device: torch.device) -> Tensor:
    """Rows see keys far apart, with holes that nobody sees, and some rows see none."""
    row = torch.arange(rows, device=device)
    lo = row // 37 * 113 % max(keys - 20, 1)
    hi = torch.where(row % 11 == 3, lo, lo + 5 + row % 60)
    return torch.stack([lo, hi], dim=-1).to(torch.int32)


def by_head(rows: int, keys: int, device: torch.device) -> Tensor:
    ends = torch.tensor([(0, keys), (3, keys // 2), (keys - 9, keys + 50), (-7, 40)], dtype=torch.int32, device=device)
    return ends[None, :, None].expand(-1, -1, rows, -1)


def hidden_from_all(keys: int, device: torch.device) -> list[tuple[dict[str, Any], Tensor]]:
    """Options of calls with 300 rows, and which keys no row of an entry sees: (2, keys)."""
    nowhere = torch.zeros(2, keys, dtype=torch.bool, device=device)
    padded, holes, masked, left = (nowhere.clone() for _ in range(4))
    padded[0, : keys // 3] = padded[1, keys - keys // 4 :] = True
    holes[:] = True
    seen = documents(300, keys, device)
    for lo, hi in seen.tolist():
        holes[:, lo:hi] = False
    masked[:, ::3] = masked[1, 64:128] = True
    left[:, : max(keys - 300 - 5, 0)] = True
    return [
        ({"key_intervals": padding(300, keys, device)}, padded),
        ({"key_intervals": seen}, holes),
        ({"mask": ~masked[:, None, None]}, masked),
        ({"mask": ~masked[:, None, None], "key_intervals": padding(300, keys, device)}, masked | padded),
        ({"window_size": (5, 0)}, left),
        ({"window_size": (5, -1)}, left),
    ]


PACKINGS = {
    "one": ([0, 200], [0, 133]),
    "even": ([0, 128, 256], [0, 128, 256]),
    "ragged": ([0, 1, 71, 400, 403], [0, 5, 6, 340, 470]),
    "zero-length": ([0, 0, 120, 304, 304], [0, 25, 42, 51, 81]),
    "no-keys": ([0, 10, 20, 190], [0, 0, 30, 30]),
    "many": (cumulative([i * 53 % 130 for i in range(40)]), cumulative([i * 71 % 110 for i in range(40)])),
    "one-of-many": (cumulative([0] * 70 + [700] + [0] * 40), cumulative([0] * 70 + [550] + [2] * 40)),
    "mixed": (cumulative([900, 3, 64, 191, 192, 193, 1500]), cumulative([900, 3, 64, 191, 192, 193, 1500])),
}
