"""Dropout: the kernels' random numbers, where they drop, and what that does to the result."""

from __future__ import annotations

import math
from typing import Any

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import dropout_mask, flash_attention

TWO_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
BATCH, HEADS = 2, 4

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "softcap": {"softcap": 1.5},
}


def test_random_numbers_are_philox() -> None:
    """Against the known answers that come with the paper's implementation (Random123, philox4x32 with 7 rounds)."""
    answers = {
        (0, 0, 0, 0, 0, 0): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (0xFFFFFFFF,) * 6: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
            *(0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    }
    for (c0, c1, c2, c3, k0, k1), expected in answers.items():
        words = dropout_mask.philox4x32([torch.tensor(c) for c in (c0, c1, c2, c3)], (k0, k1), rounds=7)
        assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("lengths", [(100, 150), (16, 16), (1, 40)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999])
def test_dropped_exactly_where_philox_says(device: torch.device, dropout_p: float, lengths: tuple[int, int]) -> None:
    torch.manual_seed(check.SEED)
    philox = torch.randint(2**62, (2,), device=device)
    expected = dropout_mask.kept(philox, (BATCH, HEADS, *lengths), dropout_p).to(device)
    parts = []
    # With q = 0 every key weighs the same, and one-hot values show which are kept, 32 keys a call.
    q = torch.zeros(BATCH, lengths[0], HEADS, 32, device=device)
    k = torch.zeros(BATCH, lengths[1], HEADS, 32, device=device)
    for first in range(0, lengths[1], 32):
        one_hot = torch.arange(lengths[1], device=device)[:, None] == first + torch.arange(32, device=device)
        torch.manual_seed(check.SEED)
        v = one_hot.float()[None, :, None, :].expand(BATCH, -1, HEADS, -1)
        parts.append(flash_attention(q, k, v, dropout_p=dropout_p))
    found = torch.cat(parts, dim=-1)[..., : lengths[1]].transpose(1, 2)
    assert torch.equal(found > 0, expected)
    weight = 1 / (1 - dropout_mask.exact_p(dropout_p)) / lengths[1]
    torch.testing.assert_close(found[expected], torch.full_like(found[expected], weight))


@TWO_TYPES
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_dropout(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """lse is that of the probabilities before dropout."""
    for dropout_p in (0.17, 0.9):
        check.check(
            *check.qkv(2, 37, 70, HEADS, 32, num_heads_k=2, dtype=dtype, device=device), dropout_p=dropout_p, **options
        )


@pytest.mark.parametrize("dropout_p", [0.01, 0.3])
def test_dropout_statistics(dropout_p: float) -> None:
    """As many dropped as asked for, whatever row, key, head or call; neighbours are independent."""
    shape = (2, 8, 256, 512)
    torch.manual_seed(1)
    keeps = [dropout_mask.kept(torch.randint(2**62, (2,)), shape, dropout_p).double() for _ in range(2)]
    deviation = math.sqrt(dropout_p * (1 - dropout_p))
    noise = [(keep - (1 - dropout_p)) / deviation for keep in keeps]  # mean 0, variance 1
    one = noise[0]

    def sigmas(x: Tensor) -> float:
        return x.sum().abs().item() / math.sqrt(x.numel())

    for dim in range(4):
        sums = noise[0].transpose(0, dim).flatten(1).sum(1) / math.sqrt(one.numel() / one.shape[dim])
        assert sums.abs().max() < 5
        assert sigmas(one.narrow(dim, 1, one.shape[dim] - 1) * one.narrow(dim, 0, one.shape[dim] - 1)) < 5
    for distance in (2, 8, 16):
        assert sigmas(one[..., distance:] * one[..., :-distance]) < 5
        assert sigmas(one[:, :, distance:] * one[:, :, :-distance]) < 5
    assert sigmas(noise[0] * noise[1]) < 5
    assert sigmas(noise[0]) < 5


def test_dropout_keeps_the_mean(device: torch.device) -> None:
    q, k, v = check.qkv(1, 64, 2048, 4, 32, dtype=torch.float32, device=device)
    torch.manual_seed(2)
    out = flash_attention(q / 4, k, torch.ones_like(v), dropout_p=0.2)
    assert abs(out.double().mean().item() - 1) < 0.01
    assert 0 < (out - 1).abs().max() < 0.3


def test_dropout_is_drawn_anew_and_repeats_with_the_seed(device: torch.device) -> None:
    q, k, v = check.qkv(2, 37, 70, HEADS, 32, dtype=torch.float32, device=device)
    torch.manual_seed(3)
    first, second = (flash_attention(q, k, v, dropout_p=0.3) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert check.identical(first, flash_attention(q, k, v, dropout_p=0.3))
    plain = flash_attention(q, k, v)
    assert check.identical(plain, flash_attention(q, k, v, dropout_p=0.0))
