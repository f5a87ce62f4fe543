"""Packed sequences: entries attend within themselves (cases V01, V04)."""

from __future__ import annotations

import attention_check as check
import pytest
import torch
from attention_check import cumulative
from torch import Tensor

from hf_flash_cupy import flash_attention, flash_attention_varlen
from hf_flash_cupy.launch import launch_count

TWO_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)


PACKINGS = {
    "one": ([0, 100], [0, 133]),
    "even": ([0, 64, 128], [0, 64, 128]),
    "ragged": ([0, 1, 71, 200, 203], [0, 5, 6, 140, 270]),
    "zero-length": ([0, 0, 120, 204, 204], [0, 25, 42, 51, 81]),  # case V01
    "no-keys": ([0, 10, 20, 90], [0, 0, 30, 30]),
    "nothing": ([0, 0, 0], [0, 0, 0]),
    "no-entry": ([0], [0]),
    # A warp looks at 32 entries at a time.
    "31-entries": (cumulative([2] * 31), cumulative([3] * 31)),
    "32-entries": (cumulative([3] * 32), cumulative([2] * 32)),
    "many": (cumulative([i * 5 % 13 for i in range(100)]), cumulative([i * 7 % 11 for i in range(100)])),
    "one-of-many": (cumulative([0] * 70 + [200] + [0] * 40), cumulative([0] * 70 + [150] + [2] * 40)),
}


def packed(total_q: int, total_k: int, device: torch.device, dtype: torch.dtype, head_dim: int = 32) -> list[Tensor]:
    return [x[0] for x in check.qkv(1, total_q, total_k, 4, head_dim, num_heads_k=2, dtype=dtype, device=device)]


@TWO_TYPES
@pytest.mark.parametrize("tail", [0, 1, 90], ids=lambda tail: f"tail{tail}")
@pytest.mark.parametrize("name", PACKINGS)
def test_packings(device: torch.device, dtype: torch.dtype, name: str, tail: int) -> None:
    """Rows beyond the last offset give 0 and −inf."""
    offsets_q, offsets_k = PACKINGS[name]
    q, k, v = packed(offsets_q[-1] + tail, offsets_k[-1] + tail, device, dtype)
    if q.numel() and k.numel():
        check.check_varlen(q, k, v, offsets_q, offsets_k)
        check.check_varlen(q, k, v, offsets_q, offsets_k, causal=True)
        check.check_varlen(q, k, v, offsets_q, offsets_k, window_size=(20, 7))
    else:
        out = flash_attention_varlen(q, k, v, *offsets(device, offsets_q, offsets_k), 0, 0, causal=True)
        assert out.shape == q.shape
        assert (out == 0).all()


def test_rows_before_the_first_offset_belong_to_no_entry(device: torch.device) -> None:
    q, k, v = packed(64, 64, device, torch.float32)
    whole = offsets(device, [5, 64], [5, 64])
    out, lse = flash_attention_varlen(q, k, v, *whole, 64, 64, return_lse=True)
    assert (out[:5] == 0).all()
    assert (lse[:, :5] == -torch.inf).all()
    alone = flash_attention_varlen(q[5:], k[5:], v[5:], *offsets(device, [0, 59], [0, 59]), 59, 59)
    assert check.identical(out[5:], alone)


def offsets(device: torch.device, *lists: list[int]) -> list[Tensor]:
    return [torch.tensor(x, dtype=torch.int32, device=device) for x in lists]


@pytest.mark.parametrize("max_seqlen_q", [0, 1, 64, 65, 10**6, 2**31 - 1])
def test_wrong_max_seqlen_costs_speed_only(device: torch.device, max_seqlen_q: int) -> None:
    q, k, v = packed(300, 270, device, torch.float32)
    right = flash_attention_varlen(q, k, v, *offsets(device, *PACKINGS["ragged"]), 129, 134, causal=True)
    check.check_varlen(q, k, v, *PACKINGS["ragged"], max_seqlen_q=max_seqlen_q, causal=True)
    out = flash_attention_varlen(q, k, v, *offsets(device, *PACKINGS["ragged"]), max_seqlen_q, 0, causal=True)
    assert check.identical(out, right)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.full
def test_zero_length_entries_as_reported(device: torch.device, head_dim: int) -> None:
    """Case V01 with its head sizes, H4 over one shared head."""
    q, k, v = (x[0] for x in check.qkv(1, 204, 81, 4, head_dim, num_heads_k=1, dtype=torch.bfloat16, device=device))
    check.check_varlen(q, k, v, *PACKINGS["zero-length"])
    check.check_varlen(q, k, v, *PACKINGS["zero-length"], causal=True)


def test_softcap(device: torch.device) -> None:
    q, k, v = packed(210, 280, device, torch.float32)
    check.check_varlen(q, k, v, *PACKINGS["ragged"], softcap=2.0, softmax_scale=0.7)


def test_strided_rows(device: torch.device) -> None:
    """Fused (total, 3, heads, head_dim) slices and offsets out of a wider tensor."""
    fused = check.randn(150, 3, 2, 32, dtype=torch.bfloat16, device=device)
    q, k, v = fused.unbind(1)
    check.check_varlen(q, k, v, [0, 70, 140], [0, 70, 140], causal=True)
    wide = torch.tensor([[0, 9], [70, 9], [140, 9]], dtype=torch.int32, device=device)
    expected = flash_attention_varlen(q, k, v, *offsets(device, [0, 70, 140], [0, 70, 140]), 70, 70)
    assert check.identical(flash_attention_varlen(q, k, v, wide[:, 0], wide[:, 0], 70, 70), expected)


def test_equals_the_dense_call(device: torch.device) -> None:
    q, k, v = check.qkv(3, 70, 70, 2, 32, dtype=torch.float32, device=device)
    dense = flash_attention(q, k, v, causal=True)
    cu_seqlens = offsets(device, [0, 70, 140, 210])[0]
    out = flash_attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens, cu_seqlens, 70, 70, causal=True)
    torch.testing.assert_close(out.view_as(dense), dense, rtol=0, atol=2e-6)


LOW, HIGH = -(2**31), 2**31 - 1
MALICIOUS = [
    ([0, -5, 70], [0, 10, 70]),
    ([0, 70], [-100, 70]),
    ([70, 35, 0], [70, 35, 0]),
    ([0, 1000], [0, 1000]),
    ([LOW, HIGH], [LOW, HIGH]),
    ([HIGH, LOW], [HIGH, LOW]),
    ([0, HIGH, LOW, 30], [0, LOW, HIGH, 30]),
    ([HIGH, HIGH], [0, 70]),
    ([0, 70], [HIGH, HIGH]),
    ([0, LOW], [0, 70]),
]


@pytest.mark.parametrize("lists", MALICIOUS, ids=str)
def test_malicious_offsets_stay_inside(device: torch.device, lists: tuple[list[int], list[int]]) -> None:
    """Whatever the offsets say, nothing outside the tensors is read."""
    frame = 200
    framed_q, framed_k, framed_v = packed(70 + 2 * frame, 70 + 2 * frame, device, torch.float32)
    for x in (framed_k, framed_v):
        x[:frame], x[-frame:] = torch.nan, torch.nan  # what is read from there shows
    q, k, v = (x[frame:-frame] for x in (framed_q, framed_k, framed_v))
    for options in ({}, {"causal": True}, {"window_size": (3, 5)}):
        out, lse = flash_attention_varlen(q, k, v, *offsets(device, *lists), 70, 70, return_lse=True, **options)
        covered = out.isfinite().all(-1)
        assert (lse.mT.isnan() == ~covered).all()  # rows that no entry names stay as they were allocated
    sane = flash_attention_varlen(q, k, v, *offsets(device, [0, 70], [0, 70]), 70, 70)
    assert sane.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("num_heads", [2, 0])
def test_empty_dense(device: torch.device, shape: tuple[int, int, int], num_heads: int) -> None:
    """Case V04: empty in, empty or zero out, and nothing launched."""
    batch, seqlen_q, seqlen_k = shape
    q, k = (torch.zeros(batch, seqlen, num_heads, 8, device=device) for seqlen in (seqlen_q, seqlen_k))
    v = torch.zeros(batch, seqlen_k, num_heads, 16, device=device)
    intervals = torch.zeros(2, dtype=torch.int32, device=device)
    before = launch_count()
    for options in (
        {},
        {"causal": True},
        {"key_intervals": intervals},
        {"window_size": (1, 1), "softcap": 3.0},
    ):
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        assert out.shape == (batch, seqlen_q, num_heads, 16)
        assert (out.dtype, out.device, lse.dtype) == (q.dtype, q.device, torch.float32)
        assert (out == 0).all()
        assert lse.shape == (batch, num_heads, seqlen_q)
        assert (lse == -torch.inf).all()
        assert torch.equal(flash_attention(q, k, v, **options), out)
    assert launch_count() == before


def test_empty_batch_against_a_broadcast_one(device: torch.device) -> None:
    q, k = torch.zeros(0, 5, 2, 8, device=device), torch.zeros(1, 7, 2, 8, device=device)
    assert flash_attention(q, k, k).shape == (0, 5, 2, 8)
    assert flash_attention(k, q[:, :0], q[:, :0]).shape == (0, 7, 2, 8)


def test_empty_varlen(device: torch.device) -> None:
    """Case V04: no tokens, no entries."""
    nothing = torch.zeros(0, 2, 8, device=device)
    rows = torch.ones(5, 2, 8, device=device)
    zero = offsets(device, [0])[0]
    for q, k in ((nothing, nothing), (rows, nothing), (nothing, rows)):
        out, lse = flash_attention_varlen(q, k, k, zero, zero, 0, 0, causal=True, return_lse=True)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert lse.shape == (2, q.shape[0])
        assert (lse == -torch.inf).all()
