"""Gradients of the kernels against float64 truth: within three times the error of eager attention in the same dtype."""

from __future__ import annotations

from typing import Any

import attention_check as check
import pytest
import torch
from gradient_check import check_gradients, compare_all, differentiate, leaves
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_flash_cupy import UnsupportedProblem, flash_attention, flash_attention_varlen
from hf_flash_cupy.reference import attention_reference, varlen_reference

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ALGORITHMS = ("fa2", "fa1")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.values())
@pytest.mark.parametrize("options", [{}, {"causal": True, "weigh_lse": True}], ids=["full", "causal-lse"])
def test_gradients(device: torch.device, dtype: torch.dtype, options: dict[str, Any], algorithm: str) -> None:
    given = leaves(*check.qkv(2, 100, 150, 4, 64, num_heads_k=2, dtype=dtype, device=device))
    check_gradients(given, algorithm=algorithm, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("rows", "keys"), [(37, 129), (129, 37)])
@pytest.mark.parametrize("causal", [False, True])
def test_c03_lengths_differ(device: torch.device, rows: int, keys: int, causal: bool, algorithm: str) -> None:
    given = leaves(*check.qkv(1, rows, keys, 2, 64, dtype=FP16, device=device))
    check_gradients(given, causal=causal, algorithm=algorithm)


class TestLayouts:
    @pytest.mark.parametrize("kind", ["heads-first", "expanded", "slice", "strided"])
    def test_s01_upstream_gradient_of_any_strides(self, device: torch.device, kind: str) -> None:
        """Gradients depend on the values of dout, not on where they lie: bit by bit."""
        given = leaves(*check.qkv(2, 70, 90, 4, 64, dtype=FP16, device=device))
        out = flash_attention(*given.values(), causal=True, deterministic=True)
        wide = check.randn(2, 4, 70, 192, dtype=FP16, device=device, seed=5)
        dout = {
            "heads-first": wide[..., :64].contiguous().transpose(1, 2),
            "expanded": torch.tensor(0.5, dtype=FP16, device=device).expand(2, 70, 4, 64),
            "slice": wide.transpose(1, 2)[..., 63:127],
            "strided": wide[..., ::3].transpose(1, 2),
        }[kind]
        got = torch.autograd.grad(out, list(given.values()), dout, retain_graph=True)
        same = torch.autograd.grad(out, list(given.values()), dout.clone(memory_format=torch.contiguous_format))
        assert all(check.identical(a, b) for a, b in zip(got, same, strict=True))

    def test_s03_each_tensor_has_its_own_strides(self, device: torch.device) -> None:
        q, k, v = check.qkv(2, 70, 90, 4, 64, dtype=BF16, device=device)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = torch.cat([v, v], dim=-1)[..., :64]
        assert len({x.stride()[1:3] for x in (q, k, v)}) == 3
        check_gradients(leaves(q, k, v), causal=True)

    @pytest.mark.parametrize("which", ["q", "k", "v"])
    def test_a_batch_of_one_broadcasts(self, device: torch.device, which: str) -> None:
        given = leaves(*check.qkv(3, 40, 50, 2, 64, dtype=FP32, device=device))
        given[which] = given[which].detach()[:1].requires_grad_()
        check_gradients(given)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("num_heads_k", [1, 2])
    def test_s06_query_groups(self, device: torch.device, num_heads_k: int, algorithm: str) -> None:
        given = leaves(*check.qkv(2, 100, 100, 8, 64, num_heads_k=num_heads_k, dtype=BF16, device=device))
        check_gradients(given, causal=True, algorithm=algorithm)

    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize(
        "head_dim",
        [
            8,
            72,
            128,
            256,
            *(pytest.param(size, marks=pytest.mark.full) for size in (40, 56, 64, 80, 96, 112, 160, 192)),
        ],
    )
    def test_s08_head_dims(self, device: torch.device, head_dim: int, algorithm: str) -> None:
        given = leaves(*check.qkv(1, 70, 80, 2, head_dim, num_heads_k=1, dtype=FP16, device=device))
        check_gradients(given, causal=True, algorithm=algorithm)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("head_dim", "head_dim_v"), [pytest.param(192, 128, marks=pytest.mark.full), (64, 128), (33, 17)]
    )
    def test_s10_unequal_head_dims(self, device: torch.device, head_dim: int, head_dim_v: int) -> None:
        tensors = check.qkv(1, 70, 70, 2, head_dim, head_dim_v=head_dim_v, dtype=BF16, device=device)
        check_gradients(leaves(*tensors), causal=True)


class TestNumbers:
    def test_n01_large_logits(self, device: torch.device) -> None:
        given = leaves(*(torch.full((1, 1, 1, 64), 133120.0, dtype=BF16, device=device) for _ in range(3)))
        out = flash_attention(**given)
        out.sum().backward()
        assert not given["q"].grad.any()
        assert not given["k"].grad.any()
        assert (given["v"].grad == 1).all()

    @pytest.mark.parametrize(
        ("shape", "causal"), [((1, 1, 1, 16), False), pytest.param((1, 1024, 1, 128), True, marks=pytest.mark.slow)]
    )
    def test_n04_one_key_and_larger_values(
        self, device: torch.device, shape: tuple[int, int, int, int], causal: bool
    ) -> None:
        batch, length, heads, head_dim = shape
        tensors = check.qkv(batch, length, length, heads, head_dim, dtype=FP16, device=device)
        given = leaves(*(3 * x for x in tensors))
        check_gradients(given, causal=causal)
        if length == 1:
            flash_attention(**given).sum().backward()
            assert not given["q"].grad.any()

    def test_n05_scaled_loss(self, device: torch.device) -> None:
        """dP, delta and dS are fp32: they overflow where fp16 would."""
        given = leaves(*check.qkv(1, 256, 256, 2, 64, dtype=FP16, device=device))
        check_gradients(given, dout_scale=2.0**14)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("softcap", [50.0, 1.0])
    def test_n06_softcap(self, device: torch.device, softcap: float, algorithm: str) -> None:
        tensors = check.qkv(1, 70, 70, 2, 256, num_heads_k=1, dtype=BF16, device=device)
        given = leaves(*(4 * x for x in tensors))
        check_gradients(given, softcap=softcap, window_size=(16, 0), algorithm=algorithm)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("weigh_lse", [False, True])
    def test_n07_sinks(self, device: torch.device, weigh_lse: bool, algorithm: str) -> None:
        tensors = check.qkv(2, 60, 60, 8, 64, num_heads_k=2, dtype=BF16, device=device)
        sinks = check.randn(8, dtype=BF16, device=device, seed=9)
        given = leaves(*tensors, sinks=sinks)
        check_gradients(given, window_size=(8, 0), weigh_lse=weigh_lse, algorithm=algorithm)


class TestModifications:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("shape", [(2, 4, 60, 70), (1, 4, 60, 70), (60, 70), (2, 1, 1, 70), (4, 1, 70)], ids=str)
    @pytest.mark.parametrize("dtype", [FP16, FP32], ids=["element", "fp32"])
    def test_bias(self, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, algorithm: str) -> None:
        tensors = check.qkv(2, 60, 70, 4, 64, num_heads_k=2, dtype=FP16, device=device)
        given = leaves(*tensors, bias=check.randn(*shape, dtype=dtype, device=device, seed=9))
        check_gradients(given, algorithm=algorithm)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_alibi(self, device: torch.device, algorithm: str) -> None:
        tensors = check.qkv(2, 60, 70, 4, 64, dtype=FP16, device=device)
        slopes = check.randn(2, 4, dtype=FP32, device=device, seed=9).abs()
        check_gradients(leaves(*tensors), alibi_slopes=slopes, causal=True, algorithm=algorithm)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_mask_with_hidden_rows_and_keys(self, device: torch.device, algorithm: str) -> None:
        tensors = check.qkv(2, 60, 70, 4, 64, dtype=FP16, device=device)
        mask = check.randn(2, 1, 60, 70, dtype=FP32, device=device, seed=9) > 0
        mask[:, :, 7], mask[0, :, :, 11] = False, False
        given = leaves(*tensors)
        check_gradients(given, mask=mask, algorithm=algorithm)
        flash_attention(**given, mask=mask).sum().backward()
        assert not given["q"].grad[:, 7].any()
        assert not given["k"].grad[0, 11].any()

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_key_intervals(self, device: torch.device, algorithm: str) -> None:
        tensors = check.qkv(2, 60, 70, 4, 64, dtype=FP16, device=device)
        lo = torch.arange(60, device=device) // 2
        intervals = torch.stack([lo, lo + torch.arange(60, device=device) % 30], dim=-1).int()
        check_gradients(leaves(*tensors), key_intervals=intervals, algorithm=algorithm)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
    def test_dropout(self, device: torch.device, dtype: torch.dtype, algorithm: str) -> None:
        given = leaves(*check.qkv(2, 60, 70, 4, 64, num_heads_k=2, dtype=dtype, device=device))
        check_gradients(given, dropout_p=0.3, causal=True, algorithm=algorithm)


class TestRandomState:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_r01_checkpoint_repeats_the_dropout(self, device: torch.device, use_reentrant: bool) -> None:
        given = leaves(*check.qkv(2, 60, 70, 4, 64, dtype=FP16, device=device))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, dropout_p=0.1, deterministic=True)  # type: ignore[no-any-return]

        torch.manual_seed(3)
        expected = torch.autograd.grad(attend(**given).square().sum(), list(given.values()))
        torch.manual_seed(3)
        checkpoint(attend, *given.values(), use_reentrant=use_reentrant).square().sum().backward()
        for x, gradient in zip(given.values(), expected, strict=True):
            assert check.identical(x.grad, gradient)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_r04_thirty_runs_are_equal(self, device: torch.device, algorithm: str) -> None:
        batch, length = (4, 512) if device.type == "cuda" else (1, 130)
        given = leaves(*check.qkv(batch, length, length, 8, 64, num_heads_k=2, dtype=BF16, device=device))
        dout = check.randn(*given["q"].shape, dtype=BF16, device=device, seed=5)
        torch.use_deterministic_algorithms(True)
        try:
            out = flash_attention(**given, causal=True, algorithm=algorithm)
            runs = [torch.autograd.grad(out, list(given.values()), dout, retain_graph=True) for _ in range(30)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(check.identical(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
        check_gradients(given, causal=True, deterministic=True, algorithm=algorithm)


class TestVarlen:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("beyond", [0, 9])
    def test_v01_entries_without_rows_or_keys(
        self, device: torch.device, head_dim: int, beyond: int, algorithm: str
    ) -> None:
        offsets = [
            torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 0, 120, 204, 204], [0, 25, 42, 51, 81])
        ]
        packed = check.qkv(1, 204 + beyond, 81 + beyond, 4, head_dim, num_heads_k=1, dtype=FP16, device=device)
        given = leaves(*(x[0] for x in packed))
        dout = check.randn(*given["q"].shape, dtype=FP16, device=device, seed=5)
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
        options = {"causal": True, **lengths}
        got = differentiate(
            lambda **x: flash_attention_varlen(
                **x, **options, max_seqlen_q=120, max_seqlen_k=30, return_lse=True, algorithm=algorithm
            ),
            given,
            dout,
            None,
        )
        doubles = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        truth = differentiate(lambda **x: varlen_reference(**x, **options), doubles, dout, None)
        eager = differentiate(
            lambda **x: varlen_reference(**x, **options, compute_dtype=FP32),
            {name: x.detach().half().float().requires_grad_() for name, x in given.items()},
            dout,
            None,
        )
        eager = {name: x.half() for name, x in eager.items()}
        compare_all(got, truth, eager, given, dict.fromkeys(given, 0.0))
        assert not got["q"][204:].any()
        assert not got["k"][81:].any()
        assert not got["k"][:25].any()

    @pytest.mark.parametrize("shapes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=["batch", "rows", "keys"])
    def test_v04_empty(self, device: torch.device, shapes: tuple[int, int, int]) -> None:
        batch, rows, keys = shapes
        given = leaves(*check.qkv(batch, rows, keys, 2, 64, dtype=FP16, device=device))
        out, lse = flash_attention(**given, return_lse=True)
        (out.sum() + torch.where(lse.isfinite(), lse, 0).sum()).backward()
        assert not out.any()
        for x in given.values():
            assert x.grad.shape == x.shape
            assert not x.grad.any()

    def test_v04_no_entries(self, device: torch.device) -> None:
        given = leaves(*(x[0] for x in check.qkv(1, 5, 7, 2, 64, dtype=FP16, device=device)))
        offsets = torch.zeros(1, dtype=torch.int32, device=device)
        flash_attention_varlen(*given.values(), offsets, offsets, 0, 0).sum().backward()
        assert all(not x.grad.any() for x in given.values())


class TestTorch:
    @pytest.mark.slow
    def test_t01_compiled(self, device: torch.device) -> None:
        given = leaves(*check.qkv(2, 60, 60, 4, 64, dtype=FP32, device=device))

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, causal=True, deterministic=True).square().sum()  # type: ignore[no-any-return]

        expected = torch.autograd.grad(step(**given), list(given.values()))
        got = torch.autograd.grad(torch.compile(step, fullgraph=True)(**given), list(given.values()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    def test_t03_second_derivative(self, device: torch.device) -> None:
        given = leaves(*check.qkv(1, 5, 7, 2, 64, dtype=FP32, device=device))
        out = flash_attention(**given)
        with pytest.raises(UnsupportedProblem, match="second derivative"):
            torch.autograd.grad(out.sum(), given["q"], create_graph=True)

    def test_t05_parameters(self, device: torch.device) -> None:
        q, k, v = (nn.Parameter(x) for x in check.qkv(1, 5, 7, 2, 64, dtype=FP32, device=device))
        flash_attention(q, k, v).sum().backward()
        expected = torch.autograd.grad(attention_reference(q, k, v)[0].sum(), (q, k, v))
        for x, gradient in zip((q, k, v), expected, strict=True):
            torch.testing.assert_close(x.grad, gradient)

    def test_t07_autocast(self, device: torch.device) -> None:
        """As after a norm under autocast: q and k in float32, v in bfloat16; gradients in the inputs' dtypes."""
        q, k, v = check.qkv(1, 60, 70, 2, 64, dtype=FP32, device=device)
        given = leaves(q, k, v.bfloat16())
        with torch.autocast(device.type, BF16):
            out = flash_attention(**given, deterministic=True)
        assert out.dtype == BF16
        out.sum().backward()
        rounded = leaves(*(x.detach().bfloat16() for x in given.values()))
        flash_attention(**rounded, deterministic=True).sum().backward()
        for name, x in given.items():
            assert x.grad.dtype == x.dtype
            assert torch.equal(x.grad, rounded[name].grad.to(x.dtype))
