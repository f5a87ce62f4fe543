"""Sizes: grids, offsets beyond 32 bits, batch invariance (cases Z01, Z03, Z05, Z08)."""

from __future__ import annotations

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention, launch

# Gigabytes of work: for a GPU alone. The CPU's kernels are the same sources.
ON_GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture(autouse=True)
def clean_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def need(gigabytes: float) -> None:
    """Skips on a GPU without that much free memory."""
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of device memory")


def ones_like_values(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers that differ from entry to entry and cost no host memory."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def entries_right(q: Tensor, k: Tensor, v: Tensor, out: Tensor, entries: list[int], causal: bool = False) -> None:
    """Entries of a large call, each against its own truth and bit by bit against its own small call."""
    for entry in entries:
        one = [x[entry : entry + 1] for x in (q, k, v)]
        check.check(*one, causal=causal)
        assert check.identical(flash_attention(*one, causal=causal), out[entry : entry + 1]), f"entry {entry}"


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "num_heads"), [(1, 65537), pytest.param(65537, 1, marks=pytest.mark.full)])
def test_more_than_65535(device: torch.device, batch: int, num_heads: int) -> None:
    """Case Z03 with one row each: every head and entry of the grid is worked on."""
    v = ones_like_values((batch, 1, num_heads, 16), device)
    out = flash_attention(v, v, v)  # one key: its value
    assert torch.equal(out, v)


@ON_GPU
@pytest.mark.parametrize(
    "shape", [(65536, 4, 8, 64), (1, 10, 65536, 16), (3, 70, 30000, 16)], ids=["batch", "heads", "both"]
)
def test_grids_as_reported(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    """Case Z03."""
    need(2)
    batch, seqlen, num_heads, head_dim = shape
    q, k, v = (ones_like_values((batch, seqlen, num_heads, head_dim), device) for _ in range(3))
    out = flash_attention(q, k, v, causal=True)
    if batch > 3:
        entries_right(q, k, v, out, [0, 1, batch // 2, 65535 % batch, batch - 1], causal=True)
    else:
        for head in (0, 1, num_heads // 2, num_heads - 1):
            one = [x[:, :, head : head + 1] for x in (q, k, v)]
            check.check(*one, causal=True)
            assert check.identical(flash_attention(*one, causal=True), out[:, :, head : head + 1])


def test_many_heads_few_keys(device: torch.device) -> None:
    """Heads whose keys all fit the cache at once, in numbers that no 32-bit section of the grid could hold."""
    q = check.randn(1, 3, 600, 1, dtype=torch.bfloat16, device=device)
    k, v = (check.randn(1, 3, 1, 1, dtype=torch.bfloat16, device=device, seed=seed) for seed in (1, 2))
    check.check(q, k, v, causal=True)
    check.check(q[:, :1], k[:, :1], v[:, :1], causal=True)
    check.check(q[:, :1], k[:, :1], v[:, :1], window_size=(0, 0))


def test_second_grid_dimension(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2³¹ − 1 thread blocks the grid grows in y; its last row holds blocks without work."""
    monkeypatch.setattr(launch, "_MAX_GRID_X", 7)
    q, k, v = check.qkv(3, 131, 70, 5, 32, dtype=torch.float32, device=device)  # a shape no other test plans
    with launch.record_launches() as records:
        check.check(q, k, v, causal=True)
    (grid_x, grid_y) = records[0].grid
    assert grid_x == 7
    assert 1 < grid_y < grid_x * grid_y - 3 * 5 + 1


@ON_GPU
def test_one_row_many_entries(device: torch.device) -> None:
    """Case Z01: more than 2³¹ bytes are no reason to go wrong; out = v for one key."""
    need(1)
    q, k, v = (ones_like_values((8300, 1, 16, 128), device) for _ in range(3))
    assert torch.equal(flash_attention(q, k, v), v)


@ON_GPU
@pytest.mark.parametrize("shape", [(1600, 729, 16, 72), (28800, 16, 15, 72)], ids=["vision", "many"])
def test_more_than_two_to_the_30_elements(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    """Case Z05."""
    need(14)
    q, k, v = (ones_like_values(shape, device) for _ in range(3))
    out = flash_attention(q, k, v)
    entries_right(q, k, v, out, [0, 1, shape[0] // 2, shape[0] - 1])


@ON_GPU
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """Offsets of rows, heads and outputs beyond 32 bits, in one sequence."""
    need(40)
    seqlen, num_heads, head_dim = 270_000, 64, 128  # 2.2e9 elements each
    q = ones_like_values((1, seqlen, num_heads, head_dim), device)
    k, v = (ones_like_values((1, 64, num_heads, head_dim), device) for _ in range(2))
    out, lse = flash_attention(q, k, v, return_lse=True)
    for first in (0, 131_000, seqlen - 64):
        rows = q[:, first : first + 64]
        small, small_lse = flash_attention(rows, k, v, return_lse=True)
        # Another tile of the short call may sum in another order.
        torch.testing.assert_close(out[:, first : first + 64].float(), small.float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, :, first : first + 64], small_lse, rtol=0, atol=1e-4)
    del out, lse
    few = q[:, -64:]
    out = flash_attention(few, q, q, window_size=(0, 0))  # the diagonal alone: every row gets its own value
    assert torch.equal(out, few)
    out = flash_attention(few, q, q, window_size=(63, 0))
    tail = [x[:, -127:] for x in (q, q)]
    torch.testing.assert_close(out.float(), flash_attention(few, *tail, window_size=(63, 0)).float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
def test_batch_invariance(device: torch.device, dtype: torch.dtype) -> None:
    """Case Z08: an entry gives the same bits alone and in any batch, at any place, with any neighbours."""
    q, k, v = check.qkv(5, 70, 300, 3, 32, dtype=dtype, device=device)
    for options in ({}, {"causal": True}, {"window_size": (40, 3)}):
        whole = flash_attention(q, k, v, **options)
        for entry in range(5):
            alone = flash_attention(*(x[entry : entry + 1] for x in (q, k, v)), **options)
            assert check.identical(alone[0], whole[entry])
        order = [3, 1, 4, 0, 2]
        assert check.identical(flash_attention(*(x[order] for x in (q, k, v)), **options), whole[order])
        for _ in range(3):
            assert check.identical(flash_attention(q, k, v, **options), whole)


@ON_GPU
def test_batch_invariance_as_reported(device: torch.device) -> None:
    """Case Z08 with its sizes."""
    need(12)
    q = ones_like_values((8, 500, 12, 64), device)
    k, v = (ones_like_values((8, 350_000, 12, 64), device) for _ in range(2))
    whole = flash_attention(q, k, v)
    for entry in (0, 7):
        alone = flash_attention(*(x[entry : entry + 1] for x in (q, k, v)))
        assert check.identical(alone[0], whole[entry])
