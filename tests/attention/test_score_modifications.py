"""ALiBi, additive bias, sinks, alone and with everything else, dropout included (cases of kinds M and N)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention, flash_attention_varlen

TWO_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
BATCH, HEADS, HEADS_K, ROWS, KEYS = 2, 4, 2, 37, 70

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "softcap": {"softcap": 1.5},
}
WITH_MASKS = pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)


def tensors(
    device: torch.device, dtype: torch.dtype, head_dim: int = 32, **sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options: dict[str, Any] = {"num_heads_k": HEADS_K, "dtype": dtype, "device": device, **sizes}
    return check.qkv(BATCH, ROWS, KEYS, HEADS, head_dim, **options)


def numbers(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 9) -> Tensor:
    return check.randn(*shape, dtype=dtype, device=device, seed=seed)


def slopes(device: torch.device, *shape: int) -> Tensor:
    return numbers(*(shape or (HEADS,)), device=device).abs() / 4


# ALiBi


@TWO_TYPES
@WITH_MASKS
@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS)], ids=["heads", "batch"])
def test_alibi(device: torch.device, dtype: torch.dtype, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    check.check(*tensors(device, dtype), alibi_slopes=slopes(device, *shape), **options)


def test_alibi_of_every_sign_and_size(device: torch.device) -> None:
    q, k, v = check.qkv(1, 150, 200, HEADS, 32, dtype=torch.float32, device=device)
    check.check(q, k, v, alibi_slopes=torch.tensor([0.0, -0.1, 1e-6, 30.0], device=device))
    check.check(q, k, v, alibi_slopes=torch.tensor([0.0, -0.1, 1e-6, 30.0], device=device), causal=True)


def test_alibi_batches_lie_anywhere(device: torch.device) -> None:
    q, k, v = tensors(device, torch.float32)
    wide = slopes(device, BATCH, 3 * HEADS)
    check.check(q, k, v, alibi_slopes=wide[:, HEADS : 2 * HEADS])
    check.check(q, k, v, alibi_slopes=slopes(device, 1, HEADS).expand(BATCH, HEADS))


# Bias

BROADCASTS = {
    "whole": (BATCH, HEADS, ROWS, KEYS),
    "heads": (HEADS, ROWS, KEYS),
    "batch": (BATCH, 1, ROWS, KEYS),
    "matrix": (ROWS, KEYS),
    "keys": (BATCH, 1, 1, KEYS),
    "rows": (HEADS, ROWS, 1),
    "row": (KEYS,),
    "head": (HEADS, 1, 1),
    "one": (1, 1, 1, 1),
    "scalar": (),
}


@TWO_TYPES
@pytest.mark.parametrize("shape", BROADCASTS.values(), ids=BROADCASTS)
def test_bias_broadcasts(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q, k, v = tensors(device, dtype)
    for kind in {dtype, torch.float32}:
        check.check(q, k, v, bias=numbers(*shape, device=device, dtype=kind))


@TWO_TYPES
@WITH_MASKS
def test_bias(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check.check(*tensors(device, dtype), bias=numbers(HEADS, ROWS, KEYS, device=device, dtype=dtype), **options)


@pytest.mark.parametrize("kind", [torch.float16, torch.float64], ids=str)
def test_bias_of_another_dtype(device: torch.device, kind: torch.dtype) -> None:
    q, k, v = tensors(device, torch.bfloat16)
    bias = numbers(ROWS, KEYS, device=device, dtype=kind)
    assert check.identical(flash_attention(q, k, v, bias=bias), flash_attention(q, k, v, bias=bias.float()))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # (2, 4, 37, 70) from contiguous (4, 8, 80, 160)
    "part": lambda x: x[:BATCH, 1 : HEADS + 1, 3 : ROWS + 3, 5 : KEYS + 5],
    "steps": lambda x: x[::2, ::2, : 2 * ROWS : 2, : 2 * KEYS : 2],
    "transposed": lambda x: x.transpose(2, 3)[:BATCH, :HEADS, :ROWS, :KEYS],
    "expanded": lambda x: x[:1, :HEADS, :1, :KEYS].expand(BATCH, HEADS, ROWS, KEYS),
}


@TWO_TYPES
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bias_layouts(device: torch.device, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    bias = layout(numbers(4, 8, 80, 160, device=device, dtype=dtype))
    assert bias.shape == (BATCH, HEADS, ROWS, KEYS)
    check.check(*tensors(device, dtype), bias=bias)


@TWO_TYPES
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_minus_infinity_hides(device: torch.device, dtype: torch.dtype, causal: bool) -> None:
    """Keys that a bias hides from every row influence nothing, whatever they hold."""
    q, k, v = tensors(device, dtype)
    bias = numbers(BATCH, HEADS, ROWS, KEYS, device=device, dtype=dtype)
    bias[numbers(BATCH, HEADS, ROWS, KEYS, device=device, seed=10) > 0.7] = -torch.inf
    bias[0, 1, 5] = -torch.inf  # a row without keys
    bias[1, :, 16:32] = -torch.inf  # a tile of rows without keys
    bias[:, :, :, 20:30] = bias[:, :, :, KEYS - 1] = bias[1, :, :, :16] = -torch.inf
    for x, bad in ((k, math.nan), (v, math.inf)):
        x[:, 20:24] = x[:, KEYS - 1] = bad
        x[:, 24:30] = math.nan
        x[1, :16] = -bad
    check.check(q, k, v, bias=bias, causal=causal)
    check.check(q, k, v, bias=bias.float(), causal=causal, sinks=numbers(HEADS, device=device))


def test_plus_infinity_and_nan_are_eagers(device: torch.device) -> None:
    """The rows they meet are NaN, as in eager attention, and no others."""
    q, k, v = tensors(device, torch.float32)
    bias = torch.zeros(ROWS, KEYS, device=device)
    bias[3, 7], bias[30, 0] = math.inf, math.nan
    out = flash_attention(q, k, v, bias=bias)
    bad = torch.tensor([row in (3, 30) for row in range(ROWS)], device=device)
    assert out[:, bad].isnan().all()
    assert not out[:, ~bad].isnan().any()


@TWO_TYPES
def test_least_finite_number_as_minus_infinity(device: torch.device, dtype: torch.dtype) -> None:
    """Many models hide with finfo.min: a row whose keys all have it weighs them evenly, as in eager attention."""
    q, k, v = tensors(device, dtype)
    least = torch.finfo(dtype).min
    bias = torch.zeros(BATCH, 1, ROWS, KEYS, dtype=dtype, device=device)
    bias[:, :, :, KEYS // 2 :] = least
    check.check(q, k, v, bias=bias)
    bias[0, 0, 4:20] = least
    for kind in {dtype, torch.float32}:
        out, lse = flash_attention(q, k, v, bias=bias.to(kind), return_lse=True)
        even = v[0].double().mean(0).repeat_interleave(HEADS // HEADS_K, dim=0)  # (heads, head_dim)
        torch.testing.assert_close(
            out[0, 4:20].double(), even.expand(16, -1, -1), rtol=0, atol=4 * torch.finfo(dtype).eps
        )
        assert ((lse[0, :, 4:20] < -1e37) & lse[0, :, 4:20].isfinite()).all()
    bias[0, 0, 4:20] = -torch.finfo(dtype).max
    bias[0, 0, 4:20, 8] = torch.finfo(dtype).max  # and the greatest is a choice
    out = flash_attention(q, k, v, bias=bias)
    assert torch.equal(out[0, 4:20], v[0, 8].repeat_interleave(HEADS // HEADS_K, dim=0).expand(16, -1, -1))


@TWO_TYPES
@pytest.mark.parametrize("scale", [-0.2, 0.0, -3.0])
def test_scales_of_every_sign(device: torch.device, dtype: torch.dtype, scale: float) -> None:
    q, k, v = tensors(device, dtype)
    check.check(q, k, v, softmax_scale=scale, bias=numbers(ROWS, KEYS, device=device, dtype=dtype))
    check.check(q, k, v, softmax_scale=scale, alibi_slopes=slopes(device))


# Sinks


@TWO_TYPES
@WITH_MASKS
def test_sinks(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    for scale in (1.0, 30.0):
        check.check(*tensors(device, dtype), sinks=scale * numbers(HEADS, device=device), **options)


@TWO_TYPES
def test_rows_without_keys_have_the_sink_alone(device: torch.device, dtype: torch.dtype) -> None:
    q, k, v = check.qkv(BATCH, 100, 40, HEADS, 32, dtype=dtype, device=device)
    sinks = torch.tensor([0.5, -3.0, 100.0, -torch.inf], device=device)
    check.check(q, k, v, causal=True, sinks=sinks)
    out, lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :60] == 0).all()
    torch.testing.assert_close(lse[:, :, :60], sinks[None, :, None].expand(BATCH, -1, 60))


def test_no_sink_is_minus_infinity(device: torch.device) -> None:
    q, k, v = tensors(device, torch.float32)
    none = flash_attention(q, k, v, return_lse=True)
    least = flash_attention(q, k, v, return_lse=True, sinks=torch.full((HEADS,), -torch.inf, device=device))
    assert all(check.identical(a, b) for a, b in zip(none, least, strict=True))


# Together


def everything(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    low = torch.randint(-5, 30, (ROWS, 1), generator=generator)
    intervals = torch.cat([low, low + torch.randint(0, 60, (ROWS, 1), generator=generator)], dim=1)
    bias = numbers(HEADS, ROWS, KEYS, device=device, dtype=dtype)
    bias[:, 3:6, 10:30] = -torch.inf
    return {
        "alibi_slopes": slopes(device, BATCH, HEADS),
        "bias": bias,
        "sinks": numbers(HEADS, device=device),
        "dropout_p": 0.25,
        "softcap": 3.0,
        "mask": (torch.rand(BATCH, 1, ROWS, KEYS, generator=generator) < 0.8).to(device),
        "key_intervals": intervals.to(device, torch.int32)[None, None],
        "causal": True,
        "window_size": (60, -1),
        "softmax_scale": 0.3,
    }


@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
@pytest.mark.parametrize("without", [(), ("mask", "key_intervals", "softcap"), ("bias", "alibi_slopes")], ids=str)
def test_everything_together(device: torch.device, dtype: torch.dtype, without: tuple[str, ...]) -> None:
    options = {name: value for name, value in everything(device, dtype).items() if name not in without}
    check.check(*tensors(device, dtype, head_dim_v=64), **options)


@pytest.mark.parametrize("head_dim", [7, 64, 128, pytest.param(256, marks=pytest.mark.full)])
def test_everything_together_at_head_size(device: torch.device, head_dim: int) -> None:
    check.check(*tensors(device, torch.bfloat16, head_dim), **everything(device, torch.bfloat16))


@TWO_TYPES
def test_many_rows(device: torch.device, dtype: torch.dtype) -> None:
    """More than one row block and a few blocks of keys; on a GPU the tiles of long sequences."""
    q, k, v = check.qkv(1, 200, 330, 4, 64, num_heads_k=1, dtype=dtype, device=device)
    bias = numbers(200, 330, device=device, dtype=dtype)
    check.check(q, k, v, alibi_slopes=slopes(device), causal=True)
    check.check(q, k, v, bias=bias, causal=True, sinks=numbers(4, device=device))
    check.check(q, k, v, dropout_p=0.2, causal=True)


# Packed sequences

OFFSETS = ([0, 5, 5, 64, 90], [0, 30, 41, 41, 120])  # an entry without rows, one without keys


@TWO_TYPES
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("per_entry", [False, True], ids=["heads", "entries"])
def test_packed(device: torch.device, dtype: torch.dtype, causal: bool, per_entry: bool) -> None:
    q, k, v = (x[0] for x in check.qkv(1, 97, 125, HEADS, 32, num_heads_k=2, dtype=dtype, device=device))
    entries = len(OFFSETS[0]) - 1
    alibi = slopes(device, entries, HEADS) if per_entry else slopes(device)
    sinks = numbers(HEADS, device=device)
    check.check_varlen(q, k, v, *OFFSETS, causal=causal, alibi_slopes=alibi)
    check.check_varlen(q, k, v, *OFFSETS, causal=causal, sinks=sinks)
    check.check_varlen(q, k, v, *OFFSETS, causal=causal, dropout_p=0.3)
    check.check_varlen(
        *(q, k, v, *OFFSETS),
        causal=causal,
        alibi_slopes=alibi,
        sinks=sinks,
        dropout_p=0.3,
        softcap=2.0,
        window_size=(20, 7),
    )


def test_packed_is_the_entries_alone(device: torch.device) -> None:
    """One entry draws the random numbers of a batch of one."""
    q, k, v = tensors(device, torch.float32)
    offsets = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (ROWS, KEYS)]
    options = {"dropout_p": 0.4, "alibi_slopes": slopes(device), "sinks": numbers(HEADS, device=device)}
    torch.manual_seed(5)
    whole = flash_attention(q[:1], k[:1], v[:1], causal=True, **options)
    torch.manual_seed(5)
    packed = flash_attention_varlen(q[0], k[0], v[0], *offsets, ROWS, KEYS, causal=True, **options)
    assert check.identical(whole[0], packed)
