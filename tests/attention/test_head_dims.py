"""Element types × head sizes (cases S08, S10), grouped heads, lengths: the plain kernel."""

from __future__ import annotations

from typing import Any

import attention_check as check
import pytest
import torch

HEAD_DIMS = (
    *(1, 7, 8, 15, 16, 36, 40, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 192, 224, 256),
    *(257, 288, 320, 384, 440, 512),  # the output's columns are shared among thread blocks
)
# All run in the full tier. The ordinary run takes few kernels: each costs seconds of compiling.
ORDINARY = {
    torch.float16: (36, 64, 72),
    torch.bfloat16: (7, 8, 15, 16, 40, 64, 128, 256, 257, 512),
    torch.float32: (1, 7, 16, 64, 128, 320),
}
UNEQUAL = (
    *((24, 16), (16, 24), (64, 128), (192, 128), (96, 64), (64, 96), (128, 64), (20, 256), (256, 7)),
    *((40, 512), (512, 40), (300, 257), (257, 300)),
)


def head_dim_cases() -> list[Any]:
    return [
        pytest.param(
            dtype,
            size,
            marks=() if size in ORDINARY[dtype] else pytest.mark.full,
            id=f"{check.NAMES[dtype]}-{size}",
        )
        for dtype in check.DTYPES
        for size in HEAD_DIMS
    ]


@pytest.mark.parametrize(("dtype", "head_dim"), head_dim_cases())
def test_head_dim(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = check.qkv(2, 70, 131, 4, head_dim, num_heads_k=2, dtype=dtype, device=device)
    check.check(q, k, v)
    check.check(q, k, v, causal=True)


def unequal_cases() -> list[Any]:
    ordinary = {
        *((torch.bfloat16, 24, 16), (torch.bfloat16, 192, 128), (torch.float32, 64, 128)),
        *((torch.bfloat16, 40, 512), (torch.float32, 300, 257)),
    }
    return [
        pytest.param(
            dtype,
            *sizes,
            marks=() if (dtype, *sizes) in ordinary else pytest.mark.full,
            id=f"{check.NAMES[dtype]}-{sizes[0]}-{sizes[1]}",
        )
        for dtype in check.DTYPES
        for sizes in UNEQUAL
    ]


@pytest.mark.parametrize(("dtype", "head_dim", "head_dim_v"), unequal_cases())
def test_head_dim_v_differs(device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    q, k, v = check.qkv(1, 70, 131, 2, head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device)
    check.check(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
def test_wide_heads_with_everything(device: torch.device, dtype: torch.dtype) -> None:
    """Chunks of columns agree on the mask, the random numbers and lse (case T09)."""
    q, k, v = check.qkv(2, 100, 140, 4, 512, num_heads_k=1, dtype=dtype, device=device)
    mask = torch.rand(2, 1, 100, 140, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[..., 17] = False
    k[:, 17] = v[:, 17] = torch.nan
    sinks = check.randn(4, dtype=torch.float32, device=device)
    check.check(q, k, v, causal=True, mask=mask.to(device), sinks=sinks, dropout_p=0.2)


def test_wide_heads_packed(device: torch.device) -> None:
    q, k, v = (x[0] for x in check.qkv(1, 90, 120, 2, 264, dtype=torch.bfloat16, device=device))
    check.check_varlen(q, k, v, [0, 5, 64, 80], [0, 30, 41, 120], window_size=(20, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 3), (1, 1)], ids=str)
def test_grouped_heads(device: torch.device, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    q, k, v = check.qkv(2, 40, 70, heads[0], 32, num_heads_k=heads[1], dtype=dtype, device=device)
    check.check(q, k, v, causal=True)


LENGTHS = [
    (1, 1),
    (1, 77),
    (3, 8),
    (17, 1),
    (37, 129),
    (129, 37),
    (63, 64),
    (64, 65),
    (65, 63),
    (130, 513),
    (128, 128),
    (300, 5),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(device: torch.device, dtype: torch.dtype, causal: bool, lengths: tuple[int, int]) -> None:
    """Cases C01, C03, C04: the causal mask is aligned at the bottom right."""
    q, k, v = check.qkv(2, *lengths, 2, 32, dtype=dtype, device=device)
    check.check(q, k, v, causal=causal)


def test_chunk_is_the_tail_of_the_whole(device: torch.device) -> None:
    """Case C01: the last rows alone, with every key, equal the same rows of the full causal attention."""
    q, k, v = check.qkv(1, 200, 200, 2, 32, dtype=torch.float32, device=device)
    whole = check.flash_attention(q, k, v, causal=True)
    for rows in (1, 3, 70):
        chunk = check.flash_attention(q[:, -rows:], k, v, causal=True)
        torch.testing.assert_close(chunk, whole[:, -rows:], rtol=0, atol=2e-6)
