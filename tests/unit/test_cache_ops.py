"""The operators behind attention with a cache keep torch's rules: schema, fake tensors, tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_flash_cupy  # noqa: F401  registers the operators

BATCH, ROWS, KEYS, HEADS, HEADS_K, HEAD_DIM = 3, 2, 64, 4, 2, 16


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float32)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 2])
def test_operators(new: int, paged: bool) -> None:
    q = randn(BATCH, ROWS, HEADS, HEAD_DIM)
    shape = (BATCH * KEYS // 16, 16) if paged else (BATCH, KEYS)
    caches = [randn(*shape, HEADS_K, HEAD_DIM) for _ in "kv"]
    news = [randn(BATCH, new, HEADS_K, HEAD_DIM) for _ in "kv"] if new else []
    seqlens = torch.tensor([0, 17, 40], dtype=torch.int32)
    table = torch.arange(shape[0], dtype=torch.int32).view(BATCH, -1) if paged else None
    operators: Any = torch.ops.hf_flash_cupy
    operator = operators.append_and_attend.default if new else operators.attend_cache.default
    options = (True, 20, -1, 0.2, 5.0, 3)  # causal, window, scale, softcap, splits
    torch.library.opcheck(operator, (q, *caches, *news, seqlens, None, None, table, None, randn(HEADS), *options))
