"""flash-attn's names and signatures: the same numbers as our own functions, and what S_dmask says."""

from __future__ import annotations

import inspect
from typing import Any

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import UnsupportedProblem, flash_attention, flash_attention_varlen
from hf_flash_cupy import flash_attn_interface as interface
from hf_flash_cupy.reference import attention_reference

FP16, FP32 = torch.float16, torch.float32
OPTIONS: dict[str, Any] = {"causal": True, "window_size": (20, -1), "softcap": 3.0, "softmax_scale": 0.2}


def tensors(device: torch.device, num_heads_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return check.qkv(2, 60, 60, 4, 64, num_heads_k=num_heads_k, dtype=FP16, device=device)


def test_signatures_are_flash_attns() -> None:
    """Names, order and defaults of flash-attn 2.8."""
    tail = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None"
    tail += " deterministic=False return_attn_probs=False"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    cache = "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None"
    cache += " cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0"
    cache += " rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    expected = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_varlen_func": f"q k v {lengths} {tail} block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q kv {lengths} {tail}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_with_kvcache": cache,
    }
    for name, text in expected.items():
        found = inspect.signature(getattr(interface, name)).parameters.values()
        words = [x.name if x.default is x.empty else f"{x.name}={x.default}" for x in found]
        assert " ".join(words) == text
        assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in found)
    assert sorted(interface.__all__) == sorted(expected)


def test_dense(device: torch.device) -> None:
    q, k, v = tensors(device)
    expected, expected_lse = flash_attention(q, k, v, return_lse=True, **OPTIONS)
    assert check.identical(interface.flash_attn_func(q, k, v, **OPTIONS), expected)
    out, lse, sampled = interface.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), return_attn_probs=True, **OPTIONS)
    assert check.identical(out, expected)
    assert check.identical(lse, expected_lse)
    assert sampled.numel() == 0
    q, k, v = tensors(device, num_heads_k=4)
    packed = torch.stack([q, k, v], 2)
    assert check.identical(interface.flash_attn_qkvpacked_func(packed), flash_attention(q, k, v))


def test_windows_and_caps_that_mean_nothing(device: torch.device) -> None:
    q, k, v = tensors(device)
    window = torch.tensor([-5, 3])
    out = interface.flash_attn_func(q, k, v, window_size=window, softcap=-1.0)
    assert check.identical(out, flash_attention(q, k, v, window_size=(-1, 3)))


def test_packed(device: torch.device) -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors(device, num_heads_k=4))
    offsets = torch.tensor([0, 50, 120], dtype=torch.int32, device=device)
    lengths = (offsets, offsets, 70, 70)
    expected, expected_lse = flash_attention_varlen(q, k, v, *lengths, causal=True, return_lse=True)
    out, lse, sampled = interface.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)
    assert check.identical(out, expected)
    assert check.identical(lse, expected_lse)
    assert sampled.numel() == 0
    kv, qkv = torch.stack([k, v], 1), torch.stack([q, k, v], 1)
    assert check.identical(interface.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True), expected)
    assert check.identical(interface.flash_attn_varlen_qkvpacked_func(qkv, offsets, 70, causal=True), expected)


def test_packed_gradients_come_packed(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(device, num_heads_k=4))
    packed = torch.stack([x.detach() for x in (q, k, v)], 2).requires_grad_()
    interface.flash_attn_qkvpacked_func(packed, deterministic=True).sum().backward()
    flash_attention(q, k, v, deterministic=True).sum().backward()
    for i, x in enumerate((q, k, v)):
        assert check.identical(packed.grad[:, :, i].contiguous(), x.grad)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (7, 3)}], ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_sampled_probabilities(device: torch.device, options: dict[str, Any], alibi: bool) -> None:
    """The output follows from S_dmask: relative probabilities, dropped where negative."""
    q, k, v = check.qkv(2, 60, 150, 4, 64, num_heads_k=2, dtype=FP32, device=device)
    slopes = check.randn(2, 4, dtype=FP32, device=device).abs() if alibi else None
    out, lse, sampled = interface.flash_attn_func(q, k, v, 0.3, alibi_slopes=slopes, return_attn_probs=True, **options)
    assert sampled.shape == (2, 4, 128, 256)
    assert not sampled[:, :, 60:].any()
    assert not sampled[..., 150:].any()
    keep = sampled[:, :, :60, :150] >= 0
    options = {**options, "alibi_slopes": slopes}
    truth, truth_lse = attention_reference(q, k, v, keep=keep, dropout_p=round(0.3 * 65536) / 65536, **options)
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    assert abs(keep.float().mean().item() - 0.7) < 0.02
    relative = sampled[:, :, :60, :150].abs()
    plain, _ = attention_reference(q, k, v, **options)
    weights = relative / relative.sum(-1, keepdim=True)
    again = weights.double() @ v.double().transpose(1, 2).repeat_interleave(2, dim=1)
    torch.testing.assert_close(again.transpose(1, 2), plain, rtol=1e-4, atol=1e-5)


def test_sampled_probabilities_are_those_of_one_entry_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = check.qkv(3, 20, 30, 2, 64, dtype=FP32, device=device)
    slopes = check.randn(3, 2, dtype=FP32, device=device).abs()

    def sampled() -> Tensor:
        torch.manual_seed(5)
        return interface.flash_attn_func(q, k, v, 0.3, alibi_slopes=slopes, return_attn_probs=True)[2]

    together = sampled()
    monkeypatch.setattr(interface, "_SAMPLED_AT_ONCE", 1)
    assert check.identical(sampled().sign(), together.sign())
    torch.testing.assert_close(sampled(), together)


def test_sampled_probabilities_of_packed_sequences(device: torch.device) -> None:
    q, k, v = (x[0] for x in check.qkv(1, 120, 120, 4, 64, dtype=FP32, device=device))
    offsets = torch.tensor([0, 50, 110], dtype=torch.int32, device=device)
    out, _, sampled = interface.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 60, 60, 0.3, causal=True, return_attn_probs=True
    )
    assert sampled.shape == (2, 4, 128, 128)
    for i, (begin, end) in enumerate(((0, 50), (50, 110))):
        entry = slice(begin, end)
        keep = sampled[i : i + 1, :, : end - begin, : end - begin] >= 0
        options = {"causal": True, "keep": keep, "dropout_p": round(0.3 * 65536) / 65536}
        truth, _ = attention_reference(q[None, entry], k[None, entry], v[None, entry], **options)
        torch.testing.assert_close(out[None, entry].double(), truth, rtol=1e-4, atol=1e-5)


def test_what_is_not_there_is_refused_by_name(device: torch.device) -> None:
    q, k, v = tensors(device)
    offsets = torch.tensor([0, 60], dtype=torch.int32, device=device)
    with pytest.raises(UnsupportedProblem, match="block_table"):
        interface.flash_attn_varlen_func(q[0], k, v, offsets, offsets, 60, 60, block_table=offsets[None])
    with pytest.raises(ValueError, match=r"kv has shape .*; \(…, 2, num_heads, head_dim\)"):
        interface.flash_attn_kvpacked_func(q, k)
