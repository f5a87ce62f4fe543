"""Numeric range: scales, softcap, large logits (cases N01, N04, N06, J10)."""

from __future__ import annotations

import math

import attention_check as check
import pytest
import torch

from hf_flash_cupy import flash_attention

TWO_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)


@TWO_TYPES
@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 0.1234567, 1e-30, 1e-46, 4.0, 1, -40.0], ids=str)
def test_softmax_scale(device: torch.device, dtype: torch.dtype, scale: float | None) -> None:
    """Case J10: the scale arrives as the number that was given."""
    q, k, v = check.qkv(1, 70, 133, 2, 32, dtype=dtype, device=device)
    check.check(q, k, v, softmax_scale=scale)
    check.check(q, k, v, softmax_scale=scale, causal=True)


def test_zero_scale_is_the_mean(device: torch.device) -> None:
    q, k, v = check.qkv(1, 3, 70, 2, 32, dtype=torch.float32, device=device)
    out, lse = flash_attention(q, k, v, softmax_scale=0.0, return_lse=True)
    torch.testing.assert_close(out, v.mean(dim=1, keepdim=True).expand_as(out), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(70)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=check.NAMES.get)
def test_outputs_round_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    """The mean of two values is exact in fp32, so that only the last rounding is left."""
    v = check.randn(1, 2, 400, 64, dtype=dtype, device=device)
    out = flash_attention(torch.zeros_like(v), torch.zeros_like(v), v)
    expected = v.float().mean(dim=1, keepdim=True)
    assert (expected != expected.to(dtype)).any()
    assert torch.equal(out, expected.to(dtype).expand_as(out))


@TWO_TYPES
@pytest.mark.parametrize("softcap", [50.0, 5.0, 1.0, 0.1])
@pytest.mark.parametrize("size", [0.1, 1.0, 8.0], ids=["small", "normal", "saturated"])
def test_softcap(device: torch.device, dtype: torch.dtype, softcap: float, size: float) -> None:
    """Case N06: cap · tanh(s / cap), from its linear to its saturated end."""
    q, k, v = check.qkv(1, 70, 133, 2, 32, dtype=dtype, device=device)
    check.check(q * size, k * size, v, softcap=softcap)
    check.check(q * size, k * size, v, softcap=softcap, causal=True, softmax_scale=-0.5)


@pytest.mark.parametrize("softcap", [50.0, 1.0])
def test_softcap_wide_heads_window(device: torch.device, softcap: float) -> None:
    """Case N06 as reported: head size 256, a window of 16."""
    q, k, v = check.qkv(1, 100, 100, 2, 256, num_heads_k=1, dtype=torch.bfloat16, device=device)
    check.check(q, k, v, softcap=softcap, causal=True, window_size=(15, 0))
    check.check(20 * q, k, v, softcap=softcap, causal=True, window_size=(15, 0))


def test_softcap_bounds_infinite_scores(device: torch.device) -> None:
    """tanh of a score too large for fp32 is 1, not NaN."""
    q = torch.full((1, 3, 1, 32), 1e30, device=device)
    k = torch.cat([q[:, :1], -q[:, :1]], dim=1)
    v = check.randn(1, 2, 1, 32, dtype=torch.float32, device=device)
    check.check(q, k, v, softcap=2.0)


def test_huge_equal_logits(device: torch.device) -> None:
    """Case N01: finite, and one key gives its value."""
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device=device)
    out, lse = flash_attention(x, x, x, return_lse=True)
    assert torch.equal(out, x)
    assert lse.isfinite().all()
    check.check(x, x, x)


@TWO_TYPES
def test_huge_logits_one_ulp_apart(device: torch.device, dtype: torch.dtype) -> None:
    """Case N01: the larger key takes everything, even against 133 others."""
    q = torch.full((1, 5, 1, 64), 133120.0, dtype=dtype, device=device)
    k = torch.full((1, 133, 1, 64), 133120.0, dtype=dtype, device=device)
    k[:, 77] = 133120.0 + 1024.0  # one bf16 ulp
    v = check.randn(1, 133, 1, 64, dtype=dtype, device=device)
    out = flash_attention(q, k, v)
    assert torch.equal(out, v[:, 77:78].expand_as(out))
    check.check(q, k, v)
    check.check(-q, k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 300, 1, 64)], ids=str)
def test_values_times_three(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Case N04."""
    q, k, v = (3 * check.randn(*shape, dtype=dtype, device=device, seed=i) for i in range(3))
    check.check(q, k, v, causal=True)


@pytest.mark.full
@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (1, 1024, 1, 128)], ids=str)
def test_values_times_three_as_reported(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    test_values_times_three(device, dtype, shape)


@TWO_TYPES
@pytest.mark.parametrize("order", ["rising", "falling", "zigzag"])
def test_maxima_that_move(device: torch.device, dtype: torch.dtype, order: str) -> None:
    """Scores that climb from block to block by less and by more than what moves the running reference."""
    for step in (0.01, 0.05, 1.0, 30.0):
        q, k, v = check.qkv(1, 40, 300, 2, 32, dtype=dtype, device=device)
        ramp = torch.arange(300, device=device) * step
        ramp = {
            "rising": ramp,
            "falling": ramp.flip(0),
            "zigzag": ramp * (1 - 2 * (torch.arange(300, device=device) % 2)),
        }[order]
        q[..., 0], k[..., 0] = 1.0, (ramp * 32**0.5)[None, :, None]
        check.check(q, k, v)


def test_tiny_and_huge_values(device: torch.device) -> None:
    """Subnormal, tiny and huge values of v pass through."""
    q, k, v = check.qkv(1, 10, 20, 1, 32, dtype=torch.float32, device=device)
    check.check(q, k, v * 1e-30)
    check.check(q, k, v * 1e30)
    half = [x.half() for x in (q, k)]
    check.check(*half, (v.clamp(-2, 2) * 3e4).half())
    check.check(*half, (v * 1e-6).half())
