"""The Hopper backward on the CPU, its copies and products as late as can be: right against float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_check import CPU, qkv, randn
from hopper_check import HALVES, fresh_plans
from hopper_gradients import (
    KERNELS,
    SHAPES,
    check_hidden_keys_gradients,
    check_hopper_gradients,
    check_hopper_shapes,
    check_hopper_windows,
    check_nothing_seen,
    packed,
    visibilities,
)

from hf_flash_cupy import flash_attention, sm90_backward, tensormap
from hf_flash_cupy.launch import record_launches

BF16, FP16 = HALVES


@pytest.fixture(autouse=True)
def hopper_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90a")
    with fresh_plans():
        yield


def kernels_of(rows: int, head_dim: int = 64, **options: Any) -> list[str]:
    q, k, v = qkv(1, rows, 64, 1, head_dim, dtype=BF16, device=CPU)
    out = flash_attention(q.requires_grad_(), k, v, **options)
    with record_launches() as records:
        out.backward(torch.ones_like(out))
    return [record.kernel for record in records]


def test_the_cpu_runs_it_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_of(64) == KERNELS
    monkeypatch.delenv("HF_FLASH_CUPY_ARCH")
    with fresh_plans():
        assert not set(kernels_of(64)) & set(KERNELS)


def test_what_is_left_to_others() -> None:
    assert not set(kernels_of(63)) & set(KERNELS)
    assert not set(kernels_of(64, window_size=(5, -1), deterministic=True)) & set(KERNELS)
    assert not set(kernels_of(64, softcap=5.0)) & set(KERNELS)


@pytest.mark.full
def test_the_widest_head() -> None:
    assert kernels_of(64, 256) == KERNELS
    for options in ({"softcap": 5.0}, {"window_size": (5, -1), "deterministic": True}):
        assert not set(kernels_of(64, 256, **options)) & set(KERNELS)
    assert not set(kernels_of(64, 264)) & set(KERNELS)


def test_maps_that_are_made_anew_for_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a driver that writes an address otherwise: forward and backward, and a second call of each plan."""
    made = tensormap.Maps.__init__

    def without_a_word(maps: tensormap.Maps, *arguments: Any) -> None:
        made(maps, *arguments)
        maps.address_is_a_word = False

    monkeypatch.setattr(tensormap.Maps, "__init__", without_a_word)
    monkeypatch.setattr(tensormap, "encode", SimpleNamespace(__wrapped__=tensormap.host_words))
    for seed in range(2):
        check_hopper_gradients(*qkv(1, 64, 64, 1, 64, dtype=BF16, device=CPU, seed=seed))


@pytest.mark.slow
def test_causal_and_shared_heads() -> None:
    check_hopper_shapes(SHAPES[1:3], 128, BF16, CPU, causal=True)


@pytest.mark.slow
def test_a_small_head_in_fp16() -> None:
    check_hopper_shapes(SHAPES[1:2], 64, FP16, CPU, causal=True, weigh_lse=True)


@pytest.mark.slow
def test_a_wide_head() -> None:
    """Two warpgroups share the keys: one has dv, the other dk. Padded or not, rows without keys; heads share keys."""
    check_hopper_shapes(SHAPES[2:3], 256, BF16, CPU, causal=True)
    check_hopper_shapes(SHAPES[3:], 160, BF16, CPU, causal=True, weigh_lse=True)


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 72, 128, 136, 192, 200, 256])
def test_all_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check_hopper_shapes(SHAPES, head_dim, dtype, CPU, causal=causal, weigh_lse=True)


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e3, 1e8])
def test_large_logits(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    """Where the rounding of lse would show, probabilities come from its parts."""
    if dtype == FP16 and scale > 1e3:
        pytest.skip("float16 eager attention has no numbers for these")
    tensors = qkv(1, 150, 200, 2, head_dim, dtype=dtype, device=CPU, num_heads_k=1)
    for causal in (False, True):
        check_hopper_gradients(*tensors, softmax_scale=scale * head_dim**-0.5, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_large_gradients(head_dim: int, dtype: torch.dtype) -> None:
    """float16 overflows only where dq and dk do."""
    tensors = qkv(1, 150, 200, 2, head_dim, dtype=dtype, device=CPU)
    check_hopper_gradients(*tensors, dout_scale=1e3, softmax_scale=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [128, 256])
def test_keys_whose_scores_are_all_negative(head_dim: int) -> None:
    """Keys beyond the end score 0, far above lse."""
    q, k, v = qkv(1, 100, 70, 1, head_dim, dtype=BF16, device=CPU)
    check_hopper_gradients(q.abs(), -k.abs(), v, softmax_scale=4.0)


@pytest.mark.full
def test_layouts() -> None:
    """Heads before rows; parts of one tensor."""
    q, k, v = (randn(2, 4, 150, 128, dtype=BF16, device=CPU, seed=i).transpose(1, 2) for i in range(3))
    check_hopper_gradients(q, k, v, causal=True)
    for head_dim in (64, 192):
        q, k, v = randn(2, 150, 3, 4, head_dim, dtype=BF16, device=CPU).unbind(2)
        check_hopper_gradients(q, k, v)


def test_gradients_of_any_layout_take_the_same_kernel() -> None:
    """Its values decide the bits, not where the copy engine could not read them."""
    given = [x.requires_grad_() for x in qkv(1, 70, 90, 2, 64, dtype=BF16, device=CPU)]
    wide = randn(1, 70, 2, 192, dtype=BF16, device=CPU)
    for dout in (wide[..., 63:127], wide[..., :64].mT.contiguous().mT, wide[:, :1, :, :64].expand(1, 70, 2, 64)):
        out = flash_attention(*given, causal=True, deterministic=True)
        with record_launches() as records:
            got = torch.autograd.grad(out, given, dout, retain_graph=True)
        assert "fa2_backward_sm90" in [record.kernel for record in records]
        same = torch.autograd.grad(out, given, dout.contiguous().clone())
        assert all(torch.equal(x, y) for x, y in zip(got, same, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 256])
def test_sinks(head_dim: int) -> None:
    q, k, v = qkv(1, 150, 200, 4, head_dim, dtype=BF16, device=CPU, num_heads_k=2)
    check_hopper_gradients(q, k, v, sinks=torch.tensor([-torch.inf, 0.0, 3.0, 80.0]), causal=True)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [128, 256])
def test_row_blocks_of_one_key_block_only(head_dim: int) -> None:
    """A bound to the right of the diagonal, and one that hides nothing."""
    for right in (0, 17, 400):
        q, k, v = qkv(1, 260, 300, 1, head_dim, dtype=BF16, device=CPU)
        check_hopper_gradients(q, k, v, window_size=(-1, right))


@pytest.mark.slow
def test_packed_documents() -> None:
    """Ragged ones, some of them empty; heads share keys."""
    q, k, v = qkv(1, 330, 330, 2, 64, dtype=BF16, device=CPU, num_heads_k=1)
    check_hopper_gradients(q, k, v, key_intervals=packed([130, 0, 70, 1, 129], CPU), weigh_lse=True)


@pytest.mark.slow
def test_a_window() -> None:
    q, k, v = qkv(1, 200, 330, 2, 128, dtype=FP16, device=CPU, num_heads_k=1)
    check_hopper_gradients(q, k, v, window_size=(33, 0))


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", visibilities(300, CPU))
def test_what_rows_see(name: str, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 300, 300, 4, head_dim, dtype=dtype, device=CPU, num_heads_k=2)
    check_hopper_gradients(q, k, v, weigh_lse=True, **visibilities(300, CPU)[name])


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_of_other_numbers_of_keys(head_dim: int, dtype: torch.dtype) -> None:
    check_hopper_windows(head_dim, dtype, CPU)


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_keys_hold_anything(head_dim: int, dtype: torch.dtype) -> None:
    check_hidden_keys_gradients(head_dim, dtype, CPU)
    check_hidden_keys_gradients(head_dim, dtype, CPU, window_size=(20, 0))


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_is_seen(head_dim: int) -> None:
    check_nothing_seen(head_dim, BF16, CPU)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_row_blocks(head_dim: int) -> None:
    """More than a warp reads about at once, of one list and of one a head."""
    rows = 33 * sm90_backward.BLOCK_M[head_dim] + 50
    q, k, v = qkv(1, rows, rows, 2, head_dim, dtype=BF16, device=CPU, num_heads_k=1)
    both = torch.stack([packed([1000, rows - 1200, 200], CPU), torch.tensor([0, 40]).expand(rows, 2)])
    both[0, 1000:-200, 0] = torch.arange(1000, rows - 200) // 100 * 100  # short ones
    both[1, 200:-200, 1] = 0
    check_hopper_gradients(q, k, v, key_intervals=both[:1].to(torch.int32))
    check_hopper_gradients(q, k, v, key_intervals=both[None].to(torch.int32))


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [30.0, 1e3])
def test_large_logits_of_documents(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    tensors = qkv(1, 150, 150, 2, head_dim, dtype=dtype, device=CPU, num_heads_k=1)
    options = {"softmax_scale": scale * head_dim**-0.5, "key_intervals": packed([70, 80], CPU)}
    check_hopper_gradients(*tensors, **options)


@pytest.mark.full
def test_sinks_of_rows_without_keys() -> None:
    q, k, v = qkv(1, 250, 250, 4, 64, dtype=BF16, device=CPU, num_heads_k=2)
    intervals = packed([100, 150], CPU)
    intervals[90:110] = 0
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 1000.0])
    check_hopper_gradients(q, k, v, sinks=sinks, key_intervals=intervals)
    check_hopper_gradients(q, k, v, sinks=sinks, window_size=(40, 0))
