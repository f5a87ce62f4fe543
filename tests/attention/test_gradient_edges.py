"""Gradients where the numbers or the tensors are unusual: each case was wrong once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import MissingDependency, UnsupportedProblem, flash_attention, flash_attention_varlen
from hf_flash_cupy.flash_attn_interface import flash_attn_func
from hf_flash_cupy.reference import attention_reference

FP32 = torch.float32
ALGORITHMS = pytest.mark.parametrize("algorithm", ["fa2", "fa1"])


def qkv(device: torch.device, rows: int = 9, keys: int = 9, heads: int = 2) -> list[Tensor]:
    tensors = check.qkv(1, rows, keys, heads, 8, dtype=FP32, device=device)
    return [x.requires_grad_() for x in tensors]


def assert_gradients(ours: Iterator[Tensor] | tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    for mine, exact in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-4, atol=1e-5)


@ALGORITHMS
@pytest.mark.parametrize("deterministic", [False, True])
def test_negative_alibi_slopes(device: torch.device, deterministic: bool, algorithm: str) -> None:
    """Rows beyond the last, which fill up a block, have the largest scores of all."""
    given = qkv(device, 4, 70, 1)
    slopes = torch.tensor([-2.0], device=device)
    out = flash_attention(*given, alibi_slopes=slopes, deterministic=deterministic, algorithm=algorithm)
    truth = attention_reference(*given, alibi_slopes=slopes)[0]
    assert_gradients(torch.autograd.grad(out.sum(), given), torch.autograd.grad(truth.sum(), given))


@ALGORITHMS
def test_lse_gradient_of_rows_without_keys(device: torch.device, algorithm: str) -> None:
    given = qkv(device, 70, 3, 1)
    out, lse = flash_attention(*given, causal=True, return_lse=True, algorithm=algorithm)
    dlse = torch.zeros_like(lse)
    dlse[..., :67] = torch.nan
    for gradient in torch.autograd.grad((out, lse), given, (torch.zeros_like(out), dlse)):
        assert not gradient.any()


def test_negative_views(device: torch.device) -> None:
    q, k, v = (x.detach() for x in qkv(device))
    bias, dout = torch.randn(9, 9, device=device), torch.randn(1, 9, 2, 8, device=device)
    negative = torch._neg_view
    assert torch.equal(flash_attention(negative(q), k, v), flash_attention(-q, k, v))
    assert torch.equal(flash_attention(q, k, v, bias=negative(bias)), flash_attention(q, k, v, bias=-bias))
    q.requires_grad_()
    out = flash_attention(q, k, v)
    ours, truth = (torch.autograd.grad(out, q, x, retain_graph=True)[0] for x in (negative(dout), -dout))
    assert torch.equal(ours, truth)


@ALGORITHMS
def test_packed_rows_of_no_entry_have_no_sink(device: torch.device, algorithm: str) -> None:
    q, k, v = (x[0] for x in qkv(device))
    sinks = torch.randn(2, device=device, requires_grad=True)
    offsets = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = flash_attention_varlen(
        q, k, v, offsets, offsets, 0, 0, sinks=sinks, return_lse=True, algorithm=algorithm
    )
    assert (lse == -torch.inf).all()
    assert not torch.autograd.grad(out.sum(), sinks)[0].any()


def test_saved_tensors_of_another_layout(device: torch.device) -> None:
    given = qkv(device)

    def turn(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turn):
        out = flash_attention(*given)
    ours = torch.autograd.grad(out.square().sum(), given)
    assert_gradients(ours, torch.autograd.grad(attention_reference(*given)[0].square().sum(), given))


def test_many_gradients_at_once(device: torch.device) -> None:
    given = qkv(device)
    out = flash_attention(*given)
    douts = torch.randn(3, *out.shape, device=device)
    together = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        assert_gradients((x[i] for x in together), torch.autograd.grad(out, given, douts[i], retain_graph=True))


def test_slopes_have_no_gradient_under_any_transformation(device: torch.device) -> None:
    q, k, v = (x.detach() for x in qkv(device))
    slopes = torch.rand(2, device=device)
    with pytest.raises(UnsupportedProblem, match="alibi_slopes requires a gradient"):
        torch.func.grad(lambda x: flash_attention(q, k, v, alibi_slopes=x).square().sum())(slopes)
    with pytest.raises(UnsupportedProblem, match="alibi_slopes requires a gradient"):
        flash_attention(q, k, v, alibi_slopes=slopes.requires_grad_())


def test_fake_tensors_beside_real_ones_are_no_memory(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = qkv(device)[0].detach()
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(q)
    assert flash_attention(q, fake, fake).shape == q.shape


def test_hessian_is_refused_by_name(device: torch.device) -> None:
    q, k, v = (x.detach() for x in qkv(device))
    with pytest.raises(UnsupportedProblem, match="derivative"):
        torch.func.hessian(lambda x: flash_attention(x, k, v).sum())(q)


def test_numbers_that_float32_cannot_hold(device: torch.device) -> None:
    given = qkv(device)
    for name, value in (("softmax_scale", 1e39), ("softmax_scale", 10**400), ("softcap", 1e39)):
        with pytest.raises(ValueError, match=f"{name}="):
            flash_attention(*given, **{name: value})


def test_the_interface_names_its_arguments(device: torch.device) -> None:
    q, k, v = (x.detach() for x in qkv(device))
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_func(q, k, v, window_size=(1.5, 2))
    with pytest.raises(ValueError, match="softcap"):
        flash_attn_func(q, k, v, softcap="a")
    with pytest.raises(TypeError, match="q is a NoneType"):
        flash_attn_func(None, k, v)
    sampled = flash_attn_func(torch.cat([q, q]), k, v, 0.3, return_attn_probs=True)[2]
    assert sampled.shape[0] == 2
    assert flash_attn_func(q, torch.cat([k, k]), torch.cat([v, v]), 0.3, return_attn_probs=True)[2].shape[0] == 2


def test_a_missing_dependency_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(MissingDependency("No compiler.", "apt install g++")))
    assert (str(error), error.mend) == ("No compiler. To mend: apt install g++", "apt install g++")


@ALGORITHMS
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e3, *(pytest.param(size, marks=pytest.mark.full) for size in (1e5, 1e7)), 1e9])
def test_large_logits(
    device: torch.device, size: float, dtype: torch.dtype, deterministic: bool, algorithm: str
) -> None:
    """Probabilities are those of the forward pass, however far from one number lse is: equal keys share dv evenly."""
    rows, keys = 20, 70
    q = torch.ones(1, rows, 1, 16, device=device, dtype=dtype)
    k, v = (
        torch.ones(1, keys, 1, 16, device=device, dtype=dtype),
        check.randn(1, keys, 1, 16, dtype=dtype, device=device),
    )
    given = [x.requires_grad_() for x in (q, k, v)]
    for sign in (1, -1):
        out = flash_attention(
            *given, softmax_scale=sign * size * 1.1 / 16, deterministic=deterministic, algorithm=algorithm
        )
        dv = torch.autograd.grad(out.sum(), v)[0]
        torch.testing.assert_close(dv, torch.full_like(dv, rows / keys), rtol=2e-3, atol=0)


@ALGORITHMS
@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min, 1e9])
def test_rows_of_one_huge_bias(device: torch.device, value: float, algorithm: str) -> None:
    """Models write -1e9 for "hidden": a row that has nothing else weighs its keys evenly, in its gradients, too."""
    q, k, v = qkv(device, 5, 40)
    bias = torch.zeros(1, 1, 5, 40, device=device)
    bias[0, 0, 2] = value
    bias.requires_grad_()
    out = flash_attention(q, k, v, bias=bias, algorithm=algorithm)
    dout = torch.zeros_like(out)
    dout[:, 2] = 1
    dv = torch.autograd.grad(out, v, dout)[0]
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 40), rtol=1e-4, atol=0)


@ALGORITHMS
def test_fp32_logits_of_hundreds(device: torch.device, algorithm: str) -> None:
    given = check.qkv(1, 65, 129, 2, 64, dtype=FP32, device=device)
    given[0].mul_(60)
    given = [x.requires_grad_() for x in given]
    dout = check.randn(*given[0].shape, dtype=FP32, device=device, seed=9)
    truth = torch.autograd.grad(attention_reference(*given)[0], given, dout.double())
    eager = torch.autograd.grad(check.eager_attention(*given)[0], given, dout)
    ours = torch.autograd.grad(flash_attention(*given, algorithm=algorithm), given, dout)
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert (mine - exact).abs().max() <= 3 * (theirs - exact).abs().max() + 4 * 2**-23 * exact.abs().max()


@ALGORITHMS
@pytest.mark.parametrize("sink", [3e38, torch.inf, -3e38, -torch.inf])
def test_huge_sinks(device: torch.device, sink: float, algorithm: str) -> None:
    given = qkv(device)
    sinks = torch.full((2,), sink, device=device, requires_grad=True)
    out, lse = flash_attention(*given, sinks=sinks, return_lse=True, algorithm=algorithm)
    gradients = torch.autograd.grad(out.sum(), (*given, sinks))
    if sink > 0:
        assert not out.any()
        assert not any(x.any() for x in gradients)
        assert (lse > 9e37).all()
    else:
        plain = flash_attention(*given, algorithm=algorithm)
        assert torch.equal(out, plain)
        assert all(x.isfinite().all() for x in gradients)
