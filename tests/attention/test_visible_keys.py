"""What hides keys from rows: causal, window, key intervals, dense masks, and their intersections."""

from __future__ import annotations

from typing import Any

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention
from hf_flash_cupy.reference import visible_keys

LENGTHS = [(70, 70), (37, 133), (133, 37)]
HUGE = 2**31
WINDOWS = [
    (0, 0), (3, 0), (0, 3), (5, 70), (-1, 0), (-1, 5), (5, -1), (0, -1), (64, 64), (1000, 1000), (HUGE, 0),
    (HUGE, HUGE),
]  # fmt: skip


def both_agree(device: torch.device, seqlen_q: int, seqlen_k: int, **options: Any) -> None:
    """The kernel sees exactly the oracle's keys, and its numbers are right (fp32: one key too many shows)."""
    found = check.visible_to_kernel(seqlen_q, seqlen_k, device, num_heads=2, batch=2, **options)
    parts = [options.get(name) for name in ("mask", "key_intervals")]
    window = (options.get("causal", False), options.get("window_size", (-1, -1)))
    wrong = found != visible_keys(2, 2, seqlen_q, seqlen_k, device, *window, *parts)
    assert not wrong.any(), f"{int(wrong.sum())} visibilities differ, {check.where(wrong)}"
    check.check(*check.qkv(2, seqlen_q, seqlen_k, 2, 32, dtype=torch.float32, device=device), **options)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["free", "causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window(device: torch.device, window: tuple[int, int], causal: bool, lengths: tuple[int, int]) -> None:
    both_agree(device, *lengths, window_size=window, causal=causal)


@pytest.mark.parametrize("lengths", [(1, 700), (700, 1), (600, 700)], ids=str)
def test_unbounded_window_sizes(device: torch.device, lengths: tuple[int, int]) -> None:
    """Sizes up to the largest integer are no wider than everything, however long the sequences."""
    q, k, v = check.qkv(1, *lengths, 1, 32, dtype=torch.float32, device=device)
    plain = flash_attention(q, k, v)
    for size in (2**31 - 600, 2**31 - 1, 2**31, 2**62):
        assert check.identical(flash_attention(q, k, v, window_size=(size, size)), plain)
        check.check(q, k, v, window_size=(size, size), causal=True)


@pytest.mark.parametrize("width", [1, 4, 33])
def test_sliding_window_counts_the_token_itself(device: torch.device, width: int) -> None:
    """Case C05: a sliding window of W tokens is window_size (W - 1, 0): keys max(0, i - W + 1) to i."""
    seqlen = 70
    found = check.visible_to_kernel(seqlen, seqlen, device, causal=True, window_size=(width - 1, 0))[0, 0]
    for i in range(seqlen):
        assert found[i].nonzero().flatten().tolist() == list(range(max(0, i - width + 1), i + 1))


def intervals_of(device: torch.device, *shape: int, seqlen_k: int, seed: int = 0) -> Tensor:
    """Random intervals: inside, empty, reversed, and reaching beyond both ends."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(-40, seqlen_k + 40, (*shape, 2), generator=generator)
    ends = torch.where(torch.rand(*shape, 1, generator=generator) < 0.8, ends.sort(dim=-1).values, ends)
    return ends.to(device, torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["free", "causal"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1), ()], ids=str)
def test_key_intervals(device: torch.device, shape: tuple[int, ...], causal: bool, lengths: tuple[int, int]) -> None:
    intervals = intervals_of(device, *shape, lengths[0], seqlen_k=lengths[1])
    both_agree(device, *lengths, key_intervals=intervals, causal=causal)


@pytest.mark.parametrize("window", [(-1, -1), (9, 4)], ids=str)
def test_key_interval_extremes(device: torch.device, window: tuple[int, int]) -> None:
    """Any int32 is a legal end."""
    low, high = -(2**31), 2**31 - 1
    ends = [
        (low, high), (low, low), (high, high), (high, low), (0, low), (0, high), (low, 0), (5, 5), (9, 3),
        (0, 133), (132, 133), (low, low + 1), (low, low + 70), (high - 1, high), (130, high), (low, 3),
        (63, 64), (64, 65), (1, high), (0, low + 200),
    ]  # fmt: skip
    intervals = torch.tensor((ends * 4)[:70], dtype=torch.int32, device=device)
    both_agree(device, 70, 133, key_intervals=intervals, window_size=window)


def test_key_interval_layouts(device: torch.device) -> None:
    """One pair for all rows, strided rows, transposed batch and heads: strides are the caller's."""
    both_agree(device, 70, 70, key_intervals=torch.tensor([3, 50], dtype=torch.int32, device=device))
    wide = intervals_of(device, 2, 2, 70, 3, seqlen_k=70)
    both_agree(device, 70, 70, key_intervals=wide[:, :, :, 1])
    both_agree(device, 70, 70, key_intervals=wide[:, :, ::2, 0].repeat(1, 1, 2, 1).transpose(0, 1))
    both_agree(device, 35, 70, key_intervals=wide[:, :, ::2, 0])


MASK_SHAPES = [
    (2, 2, 70, 133), (1, 1, 70, 133), (2, 1, 1, 133), (1, 2, 1, 1), (2, 1, 70, 1), (70, 133), (133,), (1,),
    (), (2, 70, 133), (2, 2, 1, 133),
]  # fmt: skip


def mask_of(device: torch.device, *shape: int, seed: int = 0, share: float = 0.6) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(device)


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_shapes(device: torch.device, shape: tuple[int, ...]) -> None:
    both_agree(device, 70, 133, mask=mask_of(device, *shape))
    both_agree(device, 70, 133, mask=mask_of(device, *shape), causal=True)


def test_mask_layouts(device: torch.device) -> None:
    """Transposed, stepped, offset and expanded views are read where they are."""
    both_agree(device, 70, 133, mask=mask_of(device, 2, 2, 133, 70).mT)
    both_agree(device, 70, 133, mask=mask_of(device, 2, 4, 140, 266)[:, ::2, ::2, ::2])
    both_agree(device, 70, 133, mask=mask_of(device, 71, 140)[1:, 5:138])
    both_agree(device, 70, 133, mask=mask_of(device, 1, 133).expand(2, 2, 70, 133))
    both_agree(device, 70, 133, mask=mask_of(device, 70, 1).expand(70, 133))
    both_agree(device, 70, 133, mask=mask_of(device, 2, 2, 70, 133).permute(1, 0, 2, 3))


@pytest.mark.parametrize("lengths", [*LENGTHS, (1, 133)], ids=str)
def test_all_at_once(device: torch.device, lengths: tuple[int, int]) -> None:
    """mask, causal, window and key_intervals combine by intersection."""
    mask = mask_of(device, 2, 1, *lengths)
    intervals = intervals_of(device, 1, 2, lengths[0], seqlen_k=lengths[1])
    both_agree(device, *lengths, mask=mask, key_intervals=intervals)
    both_agree(device, *lengths, mask=mask, key_intervals=intervals, causal=True, window_size=(40, -1))
    both_agree(device, *lengths, mask=mask, window_size=(40, 10))
    both_agree(device, *lengths, key_intervals=intervals, window_size=(40, 10))


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.full), torch.bfloat16], ids=check.NAMES.get
)
@pytest.mark.parametrize("kind", ["mask", "intervals"])
def test_sixteen_bit(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """The same in 16 bits, where two probabilities share a register; with grouped heads."""
    q, k, v = check.qkv(2, 70, 133, 4, 32, num_heads_k=2, dtype=dtype, device=device)
    if kind == "mask":
        check.check(q, k, v, mask=mask_of(device, 2, 4, 70, 133), causal=True)
    else:
        check.check(q, k, v, key_intervals=intervals_of(device, 2, 4, 70, seqlen_k=133), causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("kind", ["mask", "intervals", "causal", "window"])
def test_rows_without_keys(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """Case M02: a row that sees no key gives 0 and −inf, whichever way its keys are hidden."""
    seqlen_q, seqlen_k = (6, 10) if kind in ("mask", "intervals") else (100, 10)
    q, k, v = check.qkv(1, seqlen_q, seqlen_k, 2, 32, dtype=dtype, device=device)
    options: dict[str, Any]
    if kind == "mask":
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        mask[3] = False
        options, empty = {"mask": mask}, [3]
    elif kind == "intervals":
        intervals = torch.tensor([[0, 10]] * 3 + [[4, 4]] + [[0, 10]] * 2, dtype=torch.int32, device=device)
        options, empty = {"key_intervals": intervals}, [3]
    elif kind == "causal":
        options, empty = {"causal": True}, list(range(90))
    else:
        options, empty = {"window_size": (3, 2)}, list(range(88))
    check.check(q, k, v, **options)
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    rows = torch.zeros(seqlen_q, dtype=torch.bool, device=device)
    rows[empty] = True
    assert (out[:, rows] == 0).all()
    assert (lse[:, :, rows] == -torch.inf).all()
    assert lse[:, :, ~rows].isfinite().all()


@pytest.mark.parametrize("kind", ["mask", "intervals"])
def test_nothing_visible_at_all(device: torch.device, kind: str) -> None:
    q, k, v = check.qkv(1, 70, 133, 2, 32, dtype=torch.float32, device=device)
    if kind == "mask":
        check.check(q, k, v, mask=torch.zeros(1, dtype=torch.bool, device=device))
    else:
        check.check(q, k, v, key_intervals=torch.zeros(2, dtype=torch.int32, device=device))
