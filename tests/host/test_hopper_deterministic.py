"""Deterministic gradients of the Hopper backward on the CPU: each part of dq in its turn, whoever is faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_check import CPU, qkv, randn
from changed_sources import use_changed_sources
from hopper_check import HALVES, fresh_plans
from hopper_gradients import SHAPES, check_hopper_gradients, check_hopper_shapes
from torch import Tensor

from hf_flash_cupy import execute, flash_attention, sm90_backward

BF16, FP16 = HALVES


@pytest.fixture(autouse=True)
def hopper_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90a")
    threads = torch.get_num_threads()
    with fresh_plans():
        yield
    torch.set_num_threads(threads)


def gradients(tensors: tuple[Tensor, Tensor, Tensor], causal: bool, workers: int) -> tuple[Tensor, ...]:
    """With so many thread blocks at once."""
    torch.set_num_threads(workers)
    given = [x.detach().requires_grad_() for x in tensors]
    out = flash_attention(*given, causal=causal, deterministic=True)
    return torch.autograd.grad(out, given, randn(*out.shape, dtype=out.dtype, device=CPU, seed=9))


def turns_afterwards(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[Tensor, Tensor, Tensor], causal: bool, block_m: int
) -> Tensor:
    """(batch, heads, row blocks, 2)"""
    made: list[Tensor] = []
    original = execute.workspace

    def remember(size: int, device: torch.device) -> Tensor:
        made.append(original(size, device))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(execute, "workspace", remember)
        gradients(tensors, causal, workers=3)
    batch, rows, heads, _ = tensors[0].shape
    return made[-1].view(torch.int32).reshape(batch, heads, -(-rows // block_m), 2)


def key_blocks_seen(rows: int, keys: int, causal: bool, head_dim: int) -> list[list[int]]:
    """By each block of rows."""
    block_m, block_n = sm90_backward.BLOCK_M[head_dim], sm90_backward.BLOCK_N[head_dim]
    row, key = torch.arange(rows)[:, None], torch.arange(keys)[None]
    sees = (key <= row + keys - rows) | (not causal)
    return [
        sorted({n // block_n for n in sees[first : first + block_m].any(0).nonzero()[:, 0].tolist()})
        for first in range(0, rows, block_m)
    ]


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_all_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check_hopper_shapes(SHAPES, head_dim, dtype, CPU, causal=causal, weigh_lse=True, deterministic=True)


@pytest.mark.slow
def test_causal_and_shared_heads() -> None:
    check_hopper_shapes(SHAPES[1:3], 64, BF16, CPU, causal=True, deterministic=True)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [128, 256])
def test_sinks_bounds_and_large_logits(head_dim: int) -> None:
    q, k, v = qkv(1, 260, 300, 4, head_dim, dtype=BF16, device=CPU, num_heads_k=2)
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 80.0])
    check_hopper_gradients(q, k, v, sinks=sinks, causal=True, deterministic=True)
    for right in (17, 400):
        check_hopper_gradients(q, k, v, window_size=(-1, right), deterministic=True)
    check_hopper_gradients(q, k, v, softmax_scale=30.0, causal=True, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [(64, True), pytest.param(64, False, marks=pytest.mark.full)]
    + [pytest.param(head_dim, causal, marks=pytest.mark.full) for head_dim in (128, 256) for causal in (False, True)],
)
def test_thread_blocks_at_once(head_dim: int, causal: bool) -> None:
    """As many at a time as may be, in whatever order they get on: every bit is the same."""
    tensors = qkv(1, 600, 700, 4, head_dim, dtype=BF16, device=CPU, num_heads_k=2)
    one_by_one = gradients(tensors, causal, workers=1)
    for workers in (2, 5, 12, 12):
        beside = gradients(tensors, causal, workers)
        assert all(torch.equal(x, y) for x, y in zip(beside, one_by_one, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "causal", "rows", "keys"),
    [(64, True, 300, 450), (64, True, 450, 200)]
    + [
        pytest.param(head_dim, causal, 300, 450, marks=pytest.mark.full)
        for head_dim in (128, 256)
        for causal in (False, True)
    ],
)
def test_everybody_had_a_turn(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool, rows: int, keys: int
) -> None:
    """Heads of the last section count key blocks upwards, those of the one before downwards."""
    monkeypatch.setattr(sm90_backward, "heads_per_section", lambda problem, geometry: 2 if causal else 3)
    tensors = qkv(3, rows, keys, 2, head_dim, dtype=BF16, device=CPU, num_heads_k=1)
    block_m = sm90_backward.BLOCK_M[head_dim]
    turns = turns_afterwards(monkeypatch, tensors, causal, block_m)
    upwards = [False, False, True] if causal else [True, True, True]
    for entry, up in zip(turns, upwards, strict=True):
        for m_block, seen in enumerate(key_blocks_seen(rows, keys, causal, head_dim)):
            if seen:
                assert (entry[:, m_block] == (seen[-1] + 1 if up else -1)).all()


VAIN = "deadlock.* wait for turn"
FAULTS = {  # text of the kernel, what stands there instead, and what is told
    "a block that waits for a later one": ("return keys.m_block + (", "return keys.m_block - (", VAIN),
    "a turn that nobody takes": ("(end - 1) / Config::kBlockN", "end / Config::kBlockN + 1", VAIN),
    "blocks against their order": ("if (!longest_first<Config>(params, k", "if (longest_first<Config>(params, k", VAIN),
    "a turn passed on too early": ("tma_store_wait();\n      pass_turn", "pass_turn", "before copies .*: the turn to"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_order_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    """In sections of one head each, which take turns: both orders are met."""
    right, wrong, message = FAULTS[fault]
    monkeypatch.setattr(sm90_backward, "heads_per_section", lambda problem, geometry: 1)
    use_changed_sources(monkeypatch, tmp_path, "fa2/backward_sm90*.cuh", right, wrong)
    tensors = qkv(2, 300, 450, 1, 64, dtype=BF16, device=CPU)
    with pytest.raises(RuntimeError, match=message):
        gradients(tensors, causal=True, workers=3)
