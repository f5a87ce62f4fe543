"""What lies between a call and its kernels: gradients' plumbing, with plans that compute by plain operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference_plans import Calls, install
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_flash_cupy import UnsupportedProblem, flash_attention, flash_attention_varlen
from hf_flash_cupy.reference import attention_reference, varlen_reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return install(monkeypatch)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch: int = 2, rows: int = 5, keys: int = 7, heads: int = 4, heads_k: int = 2) -> list[Tensor]:
    shapes = [(batch, rows, heads, 8), (batch, keys, heads_k, 8), (batch, keys, heads_k, 16)]
    return [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], leaves: dict[str, Tensor], weigh_lse: bool = True, **options: Any
) -> dict[str, Tensor]:
    """By every leaf, of a random linear form in out and lse."""
    out, lse = function(**leaves, **options)
    loss = (out * randn(*out.shape, seed=8)).sum()
    if weigh_lse:
        loss = loss + (torch.where(lse.isfinite(), lse, 0) * randn(*lse.shape, seed=9)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def ours(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return flash_attention(*arguments, return_lse=True, **options)  # type: ignore[no-any-return]


def assert_as_reference(leaves: dict[str, Tensor], tolerance: float = 1e-5, **options: Any) -> None:
    got, expected = gradients(ours, leaves, **options), gradients(attention_reference, leaves, **options)
    for name, leaf in leaves.items():
        assert (got[name].shape, got[name].dtype) == (leaf.shape, leaf.dtype)
        torch.testing.assert_close(got[name].double(), expected[name].double(), atol=tolerance, rtol=tolerance)


def contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def named(*tensors: Tensor) -> dict[str, Tensor]:
    return dict(zip("qkv", tensors, strict=True))


class TestInputs:
    @pytest.mark.parametrize("weigh_lse", [False, True])
    def test_out_and_lse_have_gradients(self, weigh_lse: bool) -> None:
        assert_as_reference(named(*qkv()), causal=True, weigh_lse=weigh_lse)

    def test_lse_alone(self) -> None:
        q, k, v = qkv()
        _, lse = flash_attention(q, k, v, return_lse=True)
        dq, dv = torch.autograd.grad(lse.sum(), (q, v))
        expected = torch.autograd.grad(attention_reference(q, k, v)[1].sum(), q)[0]
        torch.testing.assert_close(dq, expected.float())
        assert not dv.any()

    @pytest.mark.parametrize("which", ["q", "k", "v", "kv"])
    def test_batch_of_one_sums(self, which: str) -> None:
        leaves = named(*qkv())
        for name in which:
            leaves[name] = leaves[name][:1].detach().requires_grad_()
        assert_as_reference(leaves)

    @pytest.mark.parametrize("which", ["q", "k", "v"])
    def test_only_one_needs_a_gradient(self, which: str) -> None:
        leaves = named(*(x.detach() for x in qkv()))
        leaves[which].requires_grad_()
        out = flash_attention(**leaves)
        out.sum().backward()
        assert [name for name, x in leaves.items() if x.grad is not None] == [which]

    def test_mixed_dtypes(self) -> None:
        q, k, v = qkv()
        leaves = named(q, k.detach().half().requires_grad_(), v.detach().bfloat16().requires_grad_())
        assert ours(**leaves)[0].dtype == torch.bfloat16
        assert_as_reference(leaves, tolerance=0.05)

    def test_autocast(self) -> None:
        leaves = named(*qkv())
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = ours(**leaves)
        assert out.dtype == torch.bfloat16
        for x in torch.autograd.grad(out.sum(), list(leaves.values())):
            assert x.dtype == torch.float32

    def test_parameters_and_modes(self) -> None:
        q, k, v = (torch.nn.Parameter(x.detach()) for x in qkv())
        expected = flash_attention(q, k, v)
        assert expected.requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = flash_attention(q, k, v)
            assert torch.equal(out, expected)
            assert not out.requires_grad

    def test_flash_attention_1(self, calls: Calls) -> None:
        leaves = named(*qkv())
        expected = gradients(attention_reference, leaves)
        for name, x in gradients(partial(ours, algorithm="fa1"), leaves).items():
            torch.testing.assert_close(x, expected[name])
        assert calls.forward[0][0].algorithm == calls.backward[0][0].algorithm == "fa1"

    def test_last_dimension_strided(self) -> None:
        leaves = named(*qkv())
        leaves["q"] = leaves["q"].detach().mT.contiguous().mT.requires_grad_()
        assert leaves["q"].stride(-1) != 1
        assert_as_reference(leaves)


class TestUpstreamGradient:
    @pytest.mark.parametrize("kind", ["expanded", "permuted", "slice", "last"])
    def test_any_strides(self, kind: str, calls: Calls) -> None:
        q, k, v = qkv()
        out = flash_attention(q, k, v)
        upstream = {
            "expanded": lambda: torch.ones(()).expand(out.shape),
            "permuted": lambda: randn(2, 4, 5, 16).transpose(1, 2),
            "slice": lambda: randn(2, 5, 4, 48)[..., 16:32],
            "last": lambda: randn(2, 5, 16, 4).mT,
        }[kind]()
        got = torch.autograd.grad(out, (q, k, v), upstream)
        expected = torch.autograd.grad(attention_reference(q, k, v)[0], (q, k, v), upstream.double())
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b.float())

    def test_a_graph_kept_runs_again(self) -> None:
        q, k, v = qkv()
        out = flash_attention(q, k, v)
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        second = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_inputs_changed_in_place_are_refused(self) -> None:
        q, k, v = qkv()
        mask = torch.ones(5, 7, dtype=torch.bool)
        doubled = q * 2
        for changed in (doubled, mask):
            out = flash_attention(doubled, k, v, mask=mask)
            changed.logical_not_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    def test_saved_tensors_may_travel(self) -> None:
        """Hooks may give back tensors of other strides than were saved."""
        q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in qkv())
        upstream = randn(2, 5, 4, 16)
        expected = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), upstream)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
        ):
            out = flash_attention(q, k, v)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), upstream), expected, strict=True):
            torch.testing.assert_close(a, b)


class TestBiasAndSinks:
    @pytest.mark.parametrize("shape", [(2, 4, 5, 7), (4, 5, 7), (5, 7), (1, 4, 1, 7), (2, 1, 5, 1), (7,), ()], ids=str)
    def test_bias_is_summed_over_what_was_broadcast(self, shape: tuple[int, ...], calls: Calls) -> None:
        assert_as_reference({**named(*qkv()), "bias": randn(*shape, seed=5).requires_grad_()})
        assert calls.bias[0][1].bias_shape == (1,) * (4 - len(shape)) + shape

    @pytest.mark.parametrize(
        ("dtype", "read_as"), [(torch.float16, "element"), (torch.float64, "fp32"), (torch.float32, "fp32")]
    )
    def test_bias_of_any_dtype(self, dtype: torch.dtype, read_as: str, calls: Calls) -> None:
        leaves = named(*(x.detach().half().requires_grad_() for x in qkv()))
        assert_as_reference({**leaves, "bias": randn(4, 5, 7, dtype=dtype).requires_grad_()}, tolerance=2e-3)
        assert calls.forward[0][0].bias == read_as

    def test_bias_without_gradient_costs_nothing(self, calls: Calls) -> None:
        q, k, v = qkv()
        flash_attention(q, k, v, bias=randn(5, 7)).sum().backward()
        assert len(calls.backward) == 1

    def test_bias_that_hides_a_row(self) -> None:
        bias = randn(5, 7, seed=5)
        bias[2], bias[:, 3] = -math.inf, -math.inf
        assert_as_reference({**named(*qkv()), "bias": bias.requires_grad_()}, weigh_lse=False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("weigh_lse", [False, True])
    def test_sinks(self, dtype: torch.dtype, weigh_lse: bool) -> None:
        sinks = randn(4, seed=6, dtype=dtype)
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        leaves = {**named(*qkv()), "sinks": sinks.requires_grad_()}
        assert_as_reference(leaves, tolerance, weigh_lse=weigh_lse, window_size=(2, 0))

    def test_sinks_alone_need_no_kernel(self, calls: Calls) -> None:
        leaves = named(*(x.detach() for x in qkv()))
        sinks = randn(4, seed=6).requires_grad_()
        got = gradients(lambda sinks: ours(**leaves, sinks=sinks), {"sinks": sinks})["sinks"]
        expected = gradients(lambda sinks: attention_reference(**leaves, sinks=sinks), {"sinks": sinks})["sinks"]
        torch.testing.assert_close(got, expected)
        assert not calls.backward

    def test_a_sink_of_minus_infinity_is_none(self) -> None:
        q, k, v = qkv()
        sinks = torch.full((4,), -math.inf).requires_grad_()
        mask = torch.ones(5, 7, dtype=torch.bool)
        mask[1] = False
        out = flash_attention(q, k, v, sinks=sinks, mask=mask)
        out.sum().backward()
        assert torch.equal(sinks.grad, torch.zeros(4))
        torch.testing.assert_close(out, flash_attention(q, k, v, mask=mask))

    def test_alibi_slopes_have_no_gradient(self) -> None:
        q, k, v = qkv()
        with pytest.raises(UnsupportedProblem, match=r"alibi_slopes requires a gradient.*detach"):
            flash_attention(q, k, v, alibi_slopes=randn(4).requires_grad_())
        assert_as_reference(named(q, k, v), alibi_slopes=randn(2, 4).abs())


class TestEmpty:
    @pytest.mark.parametrize("changes", [{"batch": 0}, {"rows": 0}, {"keys": 0}], ids=str)
    def test_no_rows_or_no_keys(self, changes: dict[str, int]) -> None:
        leaves = named(*qkv(**changes))
        heads = leaves["q"].shape[2]
        leaves["sinks"] = randn(heads, seed=6).requires_grad_()
        leaves["bias"] = randn(heads, leaves["q"].shape[1], leaves["k"].shape[1]).requires_grad_()
        assert_as_reference(leaves)

    def test_no_heads(self) -> None:
        leaves = named(*qkv(heads=0, heads_k=0))
        leaves["sinks"] = torch.zeros(0).requires_grad_()
        out, lse = ours(**leaves)
        assert (out.shape, lse.shape) == ((2, 5, 0, 16), (2, 0, 5))
        (out.sum() + lse.sum()).backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in leaves.values())

    def test_no_keys_and_no_sinks(self) -> None:
        leaves = named(*qkv(keys=0))
        out, lse = ours(**leaves)
        assert not out.any()
        assert (lse == -torch.inf).all()
        (out.sum() + lse.sum()).backward()
        assert all(x.grad is not None and not x.grad.any() for x in leaves.values())


class TestVarlen:
    OFFSETS = (torch.tensor([0, 0, 3, 8], dtype=torch.int32), torch.tensor([0, 2, 2, 9], dtype=torch.int32))

    def packed(self) -> dict[str, Tensor]:
        return {name: x.detach().flatten(0, 1).requires_grad_() for name, x in named(*qkv()).items()}

    def test_gradients(self) -> None:
        leaves = {**self.packed(), "sinks": randn(4, seed=6).requires_grad_()}

        def packed(**leaves: Tensor) -> tuple[Tensor, Tensor]:
            offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.OFFSETS, strict=True))
            return flash_attention_varlen(  # type: ignore[no-any-return]
                **leaves, **offsets, max_seqlen_q=5, max_seqlen_k=7, return_lse=True, causal=True
            )

        def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
            return varlen_reference(q, k, v, *self.OFFSETS, sinks=sinks, causal=True)

        got, expected = gradients(packed, leaves), gradients(reference, leaves)
        for name in leaves:
            torch.testing.assert_close(got[name].double(), expected[name].double(), atol=1e-5, rtol=1e-5)
        assert not got["q"][8:].any()

    def test_no_entries(self) -> None:
        leaves = self.packed()
        offsets = torch.zeros(1, dtype=torch.int32)
        out = flash_attention_varlen(
            **leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=0, max_seqlen_k=0
        )
        out.sum().backward()
        assert not out.any()
        assert all(x.grad is not None and not x.grad.any() for x in leaves.values())


class TestDropout:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint_repeats_the_mask(self, use_reentrant: bool) -> None:
        q, k, v = qkv()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, dropout_p=0.3)  # type: ignore[no-any-return]

        torch.manual_seed(7)
        expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
        torch.manual_seed(7)
        out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
        out.square().sum().backward()
        for x, gradient in zip((q, k, v), expected, strict=True):
            assert torch.equal(x.grad, gradient)

    def test_every_call_draws_anew(self) -> None:
        q, k, v = (x.detach() for x in qkv())
        torch.manual_seed(7)
        first, second = (flash_attention(q, k, v, dropout_p=0.3) for _ in range(2))
        torch.manual_seed(7)
        assert torch.equal(first, flash_attention(q, k, v, dropout_p=0.3))
        assert not torch.equal(first, second)


class TestDeterministic:
    @pytest.mark.parametrize(
        ("asked", "torch_wide", "expected"),
        [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
    )
    def test_passed_to_the_backward_alone(
        self, asked: bool | None, torch_wide: bool, expected: bool, calls: Calls
    ) -> None:
        q, k, v = qkv()
        before = torch.are_deterministic_algorithms_enabled()
        try:
            torch.use_deterministic_algorithms(torch_wide)
            flash_attention(q, k, v, deterministic=asked).sum().backward()
        finally:
            torch.use_deterministic_algorithms(before)
        assert [problem.deterministic for problem, _ in calls.backward] == [expected]
        assert [problem.deterministic for problem, _ in calls.forward] == [False]


class TestRefusals:
    def test_second_derivative(self) -> None:
        q, k, v = qkv()
        out = flash_attention(q, k, v)
        with pytest.raises(UnsupportedProblem, match="second derivative of attention"):
            torch.autograd.grad(out.sum(), q, create_graph=True)
