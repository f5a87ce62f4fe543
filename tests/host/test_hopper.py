"""The Hopper forward on the CPU, its copies and products as late as can be: right against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_check import CPU, qkv, randn
from hopper_check import (
    HALVES,
    PACKINGS,
    by_head,
    check_hidden_keys,
    check_hopper,
    check_hopper_varlen,
    check_other_sequences,
    check_packing,
    documents,
    fresh_plans,
    hidden_from_all,
    padding,
)

from hf_flash_cupy import flash_attention, flash_attention_varlen, sm90
from hf_flash_cupy.launch import record_launches

BF16, FP16 = HALVES
SHAPES = [  # batch, heads, key heads, rows, keys
    (1, 2, 2, 64, 64),
    (2, 3, 3, 333, 300),  # several tiles a thread block, and rows that fill none
    (2, 4, 1, 260, 90),  # causal: rows without keys
    (1, 1, 1, 700, 700),
]


@pytest.fixture(autouse=True)
def hopper_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90a")
    with fresh_plans():
        yield


def inputs(*shape: int, dtype: torch.dtype, **sizes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, rows, keys, heads, head_dim = shape
    return qkv(batch, rows, keys, heads, head_dim, dtype=dtype, device=CPU, **sizes)


def check_shapes(shapes: list[tuple[int, ...]], head_dim: int, dtype: torch.dtype, **options: Any) -> None:
    for seed, (batch, heads, heads_k, rows, keys) in enumerate(shapes):
        q, k, v = inputs(batch, rows, keys, heads, head_dim, dtype=dtype, num_heads_k=heads_k, seed=seed)
        check_hopper(q, k, v, **options)


def test_the_cpu_runs_it_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_FLASH_CUPY_ARCH")
    q, k, v = inputs(1, 64, 64, 1, 64, dtype=BF16)
    with record_launches() as records:
        flash_attention(q, k, v)
    assert [record.kernel for record in records] == ["fa2_forward"]


def test_shapes() -> None:
    check_shapes(SHAPES[:2], 128, BF16)  # warpgroups that take turns


@pytest.mark.slow
def test_causal_and_shared_heads() -> None:
    check_shapes(SHAPES[2:3], 128, BF16, causal=True)


@pytest.mark.slow
def test_four_warpgroups() -> None:
    check_shapes([SHAPES[1]], 72, FP16, causal=True)


@pytest.mark.slow
def test_what_no_row_sees() -> None:
    """Masks and intervals with holes: another warp clears what hidden values hold."""
    q, k, v = inputs(2, 130, 333, 4, 80, dtype=BF16, num_heads_k=2)
    mask = randn(2, 4, 130, 333, dtype=torch.float32, device=CPU, seed=7) > 1.5
    mask[:, :, :, 64:128] = False
    dirty = v.clone()
    dirty[:, 64:128] = math.nan
    check_hopper(q, k, dirty, mask=mask, key_intervals=padding(130, 333, CPU))


@pytest.mark.slow
def test_packed_and_windowed() -> None:
    offsets_q, offsets_k = PACKINGS["ragged"]
    q, k, v = (x[0] for x in inputs(1, offsets_q[-1] + 9, offsets_k[-1] + 9, 4, 64, dtype=BF16, num_heads_k=2))
    check_hopper_varlen(q, k, v, offsets_q, offsets_k, window_size=(100, 20))


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_all_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check_shapes(SHAPES, head_dim, dtype, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "setting", [sm90.Settings(3, 64, 4, True), sm90.Settings(3, 64, 4, False), sm90.Settings(2, 128, 2, False)]
)
def test_any_setting_is_right(setting: sm90.Settings, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "settings", lambda *_: setting)
    sm90.select.cache_clear()
    check_shapes(SHAPES, 128, BF16, causal=causal)
    sm90.select.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
def test_unequal_head_dims(causal: bool) -> None:
    for head_dim, head_dim_v in ((192, 128), (64, 128), (160, 256)):
        for rows, keys in ((333, 333), (500, 190)):
            q, k, v = inputs(2, rows, keys, 4, head_dim, dtype=BF16, num_heads_k=2, head_dim_v=head_dim_v)
            check_hopper(q, k, v, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_score_modifications(head_dim: int) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.01, -0.1])
    modifications: list[dict[str, Any]] = [
        {"softcap": 5.0},
        {"softcap": 20.0, "alibi_slopes": slopes, "sinks": slopes},
        {"softmax_scale": -0.1},
        {"softmax_scale": 0.0},
    ]
    for options in modifications:
        for rows, keys in ((333, 200), (300, 190)):
            q, k, v = inputs(2, rows, keys, 4, head_dim, dtype=BF16, num_heads_k=2)
            check_hopper(q, k, v, **options)
            check_hopper(q, k, v, causal=True, **options)


@pytest.mark.full
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 1e8, 1e30])
def test_large_logits(scale: float) -> None:
    q, k, v = inputs(1, 300, 500, 2, 128, dtype=BF16)
    check_hopper(q, k, v, softmax_scale=scale * 128**-0.5)
    check_hopper(q, k, v, softmax_scale=scale * 128**-0.5, causal=True)


@pytest.mark.full
def test_layouts() -> None:
    q, k, v = (randn(2, 4, 200, 128, dtype=BF16, device=CPU, seed=i).transpose(1, 2) for i in range(3))
    check_hopper(q, k, v, causal=True)
    cache = randn(2, 2, 500, 4, 64, dtype=BF16, device=CPU)
    check_hopper(randn(2, 100, 8, 64, dtype=BF16, device=CPU), cache[0, :, 5:400], cache[1, :, 5:400], causal=True)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_windows(head_dim: int) -> None:
    for rows, keys in ((64, 64), (333, 333), (200, 500), (500, 190)):
        q, k, v = inputs(2, rows, keys, 6, head_dim, dtype=BF16, num_heads_k=2)
        for window in ((100, 0), (0, 0), (7, 20), (200, -1)):
            check_hopper(q, k, v, window_size=window)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_key_intervals_and_masks(head_dim: int) -> None:
    for rows, keys in ((64, 64), (333, 333), (200, 500), (300, 190)):
        q, k, v = inputs(2, rows, keys, 4, head_dim, dtype=BF16, num_heads_k=2)
        for make in (padding, documents, by_head):
            check_hopper(q, k, v, key_intervals=make(rows, keys, CPU))
            check_hopper(q, k, v, key_intervals=make(rows, keys, CPU), causal=True)
        sparse = randn(2, 4, rows, keys, dtype=torch.float32, device=CPU, seed=7) > 1.5
        check_hopper(q, k, v, mask=sparse)
        check_hopper(q, k, v, mask=sparse, key_intervals=padding(rows, keys, CPU))


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_hidden_keys_never_matter(head_dim: int) -> None:
    q, k, v = inputs(2, 300, 450, 4, head_dim, dtype=BF16, num_heads_k=2)
    for options, hidden in hidden_from_all(450, CPU):
        check_hidden_keys(q, k, v, hidden, (math.nan, math.inf), **options)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["one", "ragged", "zero-length", "no-keys", "many"])
def test_packed_sequences(name: str, head_dim: int) -> None:
    offsets_q, offsets_k = PACKINGS[name]
    for tail in (0, 90):
        sizes = (offsets_q[-1] + tail, offsets_k[-1] + tail, 4, head_dim)
        q, k, v = (x[0] for x in inputs(1, *sizes, dtype=BF16, num_heads_k=2))
        check_packing(q, k, v, offsets_q, offsets_k)


@pytest.mark.full
def test_other_sequences_never_matter() -> None:
    q, k, v = (x[0] for x in inputs(1, 450, 450, 4, 128, dtype=BF16, num_heads_k=2))
    check_other_sequences(q, k, v, [0, 100, 165, 365, 395])


@pytest.mark.full
def test_wild_offsets_stay_inside() -> None:
    q, k, v = (x[0] for x in inputs(1, 300, 300, 2, 128, dtype=BF16))
    for offsets in ([0, 2**31 - 1], [-5, 100, 50, 1000], [300, 0, 300], [2**31 - 1, -(2**31)]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 300, 300, causal=True)
