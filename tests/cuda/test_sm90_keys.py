"""Which keys a row sees on the Hopper forward: windows, intervals, masks, packed sequences; what hidden keys hold."""

from __future__ import annotations

import math

import pytest
import torch
from attention_check import cumulative, identical, qkv, randn
from hopper_check import (
    CUDA,
    HALVES,
    PACKINGS,
    by_head,
    check_hidden_keys,
    check_hopper,
    check_hopper_varlen,
    check_other_sequences,
    check_packing,
    documents,
    hidden_from_all,
    hopper,  # noqa: F401
    padding,
)

from hf_flash_cupy import flash_attention, flash_attention_varlen, sm90

HEAD_DIMS = [64, 72, 80, 96, 112, 128, 192, 256]
WINDOWS = [(100, 0), (0, 0), (7, 20), (200, -1), (64, 64), (1000, 0)]
LENGTHS = [(64, 64), (333, 333), (1000, 1000), (200, 777), (500, 190)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows(head_dim: int, dtype: torch.dtype) -> None:
    for rows, keys in LENGTHS:
        q, k, v = qkv(2, rows, keys, 6, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
        for window in WINDOWS:
            check_hopper(q, k, v, window_size=window)
        check_hopper(q, k, v, window_size=(50, -1), causal=True)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_windows_of_many_tiles(head_dim: int) -> None:
    """Several tiles a thread block, each with blocks to pass on at both ends."""
    for window in ((1024, 0), (300, 300), (130, -1)):
        q, k, v = qkv(2, 3000, 3000, 12, head_dim, dtype=torch.bfloat16, device=CUDA, num_heads_k=3)
        check_hopper(q, k, v, window_size=window)


@pytest.mark.parametrize("turns", [False, True])
def test_windows_with_and_without_turns(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "settings", lambda *_: sm90.Settings(3, 64, 4, turns))
    sm90.select.cache_clear()
    for rows, keys in LENGTHS:
        q, k, v = qkv(3, rows, keys, 40, 128, dtype=torch.bfloat16, device=CUDA)
        check_hopper(q, k, v, window_size=(100, 0))
        check_hopper(q, k, v, window_size=(64, 200))
    sm90.select.cache_clear()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_windows_of_modified_scores(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.01, -0.1], device=CUDA)
    for head_dim in (64, 128, 256):
        q, k, v = qkv(2, 500, 700, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
        for options in ({"softcap": 5.0}, {"alibi_slopes": slopes}, {"sinks": slopes}, {"softmax_scale": -0.1}):
            check_hopper(q, k, v, window_size=(100, 30), **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_key_intervals(head_dim: int, dtype: torch.dtype) -> None:
    for rows, keys in LENGTHS:
        q, k, v = qkv(2, rows, keys, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
        for make in (padding, documents, by_head):
            intervals = make(rows, keys, CUDA)
            check_hopper(q, k, v, key_intervals=intervals)
            check_hopper(q, k, v, key_intervals=intervals, causal=True)
        check_hopper(q, k, v, key_intervals=padding(rows, keys, CUDA), window_size=(60, 5))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masks(head_dim: int, dtype: torch.dtype) -> None:
    for rows, keys in LENGTHS:
        q, k, v = qkv(2, rows, keys, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
        sparse = randn(2, 4, rows, keys, dtype=torch.float32, device=CUDA, seed=7) > 1.5
        sparse[0, 1, rows // 2 :, keys // 3 :] = False
        padded = torch.arange(keys, device=CUDA)[None, None, None] < keys - 30
        check_hopper(q, k, v, mask=sparse)
        check_hopper(q, k, v, mask=padded, causal=True)
        check_hopper(q, k, v, mask=sparse, key_intervals=padding(rows, keys, CUDA))
        check_hopper(q, k, v, mask=sparse.mT.contiguous().mT, window_size=(80, 10), softcap=4.0)


def test_many_tiles_of_intervals() -> None:
    q, k, v = qkv(2, 2500, 2500, 24, 128, dtype=torch.bfloat16, device=CUDA, num_heads_k=8)
    check_hopper(q, k, v, key_intervals=documents(2500, 2500, CUDA))
    check_hopper(q, k, v, key_intervals=padding(2500, 2500, CUDA), causal=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_hidden_keys_never_matter(head_dim: int, dtype: torch.dtype) -> None:
    keys = 610
    q, k, v = qkv(2, 300, keys, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
    for options, hidden in hidden_from_all(keys, CUDA):
        check_hidden_keys(q, k, v, hidden, (math.nan, math.inf, -math.inf), **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_sequences(name: str, head_dim: int, dtype: torch.dtype) -> None:
    offsets_q, offsets_k = PACKINGS[name]
    for tail in (0, 90):
        sizes = (offsets_q[-1] + tail, offsets_k[-1] + tail, 4, head_dim)
        q, k, v = (x[0] for x in qkv(1, *sizes, dtype=dtype, device=CUDA, num_heads_k=2))
        check_packing(q, k, v, offsets_q, offsets_k)


def test_many_packed_heads() -> None:
    """More tiles than multiprocessors."""
    offsets = PACKINGS["mixed"][0]
    q, k, v = (x[0] for x in qkv(1, *offsets[-1:] * 2, 40, 128, dtype=torch.bfloat16, device=CUDA, num_heads_k=8))
    check_hopper_varlen(q, k, v, offsets, offsets, causal=True)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=CUDA)
    first = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 1500, 1500, causal=True, return_lse=True)
    for _ in range(10):
        again = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 1500, 1500, causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_other_sequences_never_matter() -> None:
    q, k, v = (x[0] for x in qkv(1, 500, 500, 4, 128, dtype=torch.bfloat16, device=CUDA, num_heads_k=2))
    check_other_sequences(q, k, v, cumulative([100, 65, 200, 30]))


def test_rows_before_the_first_offset_belong_to_no_entry() -> None:
    q, k, v = (x[0] for x in qkv(1, 400, 400, 4, 64, dtype=torch.bfloat16, device=CUDA))
    cu_seqlens = torch.tensor([70, 300], dtype=torch.int32, device=CUDA)
    out, lse = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 230, 230, return_lse=True)
    inside = flash_attention_varlen(q[70:300], k[70:300], v[70:300], cu_seqlens - 70, cu_seqlens - 70, 230, 230)
    assert identical(out[70:300], inside)
    for rows in (slice(0, 70), slice(300, 400)):
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == -math.inf).all()


def test_wild_offsets_stay_inside() -> None:
    """Offsets are the caller's data: whatever they are, nothing outside the tensors is read or written."""
    q, k, v = (x[0] for x in qkv(1, 300, 300, 2, 128, dtype=torch.bfloat16, device=CUDA))
    for offsets in ([0, 2**31 - 1], [-5, 100, 50, 1000], [300, 0, 300], [2**31 - 1, -(2**31)]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=CUDA)
        flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 300, 300, causal=True)
    torch.cuda.synchronize()
    assert flash_attention(q[None], k[None], v[None]).isfinite().all()
