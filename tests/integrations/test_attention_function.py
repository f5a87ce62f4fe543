"""The attention function by itself: masks, arguments, dtypes and gradients against float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals
from hf_flash_cupy.integrations.transformers import attention_forward
from hf_flash_cupy.reference import attention_reference

from .calls import CAUSAL, ENCODER, SILENT, check, qkv


class TestWithoutMask:
    def test_causal_is_what_the_call_says_then_what_the_module_says(self) -> None:
        check(qkv(), module=CAUSAL, expected={"causal": True})
        check(qkv(), module=ENCODER, expected={})
        check(qkv(), module=CAUSAL, is_causal=False, expected={})
        check(qkv(), module=ENCODER, is_causal=True, expected={"causal": True})

    def test_a_module_that_says_nothing_is_not_causal(self) -> None:
        check(qkv(), module=SILENT, expected={})

    def test_fewer_rows_than_keys_are_the_newest(self) -> None:
        check(qkv(rows=3, keys=8), expected={"causal": True})  # C01
        check(qkv(rows=1, keys=77), expected={})  # C04

    def test_a_window_of_w_lets_w_keys_through(self) -> None:
        """C05, the visible keys read off: with v = identity the output is the probabilities."""
        q, k, _ = qkv(rows=16, keys=16)
        v = torch.eye(16).expand(2, 2, 16, 16)
        out, _ = attention_forward(CAUSAL, q, k, v, None, scaling=None, sliding_window=4)
        row, key = torch.arange(16)[:, None], torch.arange(16)
        visible = (key <= row) & (key > row - 4)
        assert torch.equal(out.transpose(1, 2) > 0, visible.expand(2, 4, 16, 16))

    def test_a_window_on_both_sides(self) -> None:
        check(qkv(), module=ENCODER, sliding_window=3, expected={"window_size": (2, 2)})

    def test_key_padding(self) -> None:
        padding = torch.ones(2, 9, dtype=torch.long)
        padding[0, :4] = 0
        check(qkv(), padding, expected={"causal": True, "mask": padding.bool()[:, None, None, :]})


class TestMasks:
    def test_an_explicit_mask_is_the_whole_truth(self) -> None:
        mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
        check(qkv(), mask, is_causal=True, sliding_window=2, expected={"mask": mask})

    @pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 4, 9, 9), (2, 1, 1, 9), (1, 4, 9, 1)])
    def test_any_broadcast_shape(self, shape: tuple[int, ...]) -> None:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
        check(qkv(), mask, expected={"mask": mask})

    @pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
    def test_a_float_mask_that_only_hides_is_a_bool_mask(self, hidden: float) -> None:
        visible = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
        check(qkv(), torch.where(visible, 0.0, hidden), expected={"mask": visible})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_least_number_hides_with_a_bias_on_top(self, dtype: torch.dtype) -> None:
        """finfo.min + finfo.min is −inf, finfo.min + 20 in float16 is not finfo.min: all hide, whole rows included."""
        visible = torch.ones(9, 9, dtype=torch.bool).tril()
        visible[5] = False
        least = torch.finfo(dtype).min
        mask = torch.where(visible, 0.0, least).to(dtype) + torch.tensor([0.0, 20.0, least] * 3).to(dtype)
        mask = torch.where(visible, 0.0, mask)
        out = check(qkv(), mask[None, None], expected={"mask": visible})
        assert (out[:, 5] == 0).all()

    def test_a_mask_longer_than_the_keys_is_cut(self) -> None:
        mask = torch.ones(2, 1, 9, 12, dtype=torch.bool).tril()
        check(qkv(), mask, expected={"mask": mask[..., :9]})
        described = KeyIntervals(2, 9, 12, torch.device("cpu"), right=0)
        check(qkv(), IntervalMask(described), expected={"mask": mask[..., :9]})

    def test_keys_longer_than_the_mask_are_cut(self) -> None:
        """Unfilled slots of a static cache, whatever they hold."""
        q, k, v = qkv(keys=12)
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
        k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
        for given in (mask, IntervalMask(KeyIntervals(2, 9, 9, torch.device("cpu"), right=0))):
            out, _ = attention_forward(CAUSAL, q, k, v, given, scaling=None)
            expected, _ = attention_forward(CAUSAL, q, k[:, :, :9], v[:, :, :9], None, scaling=None)
            assert torch.equal(out, expected)

    def test_intervals(self) -> None:
        described = KeyIntervals(2, 9, 9, torch.device("cpu"), left=3, right=0, lo=torch.tensor([[2], [0]]))
        check(qkv(), IntervalMask(described), expected={"mask": described.dense()})

    def test_rows_without_keys_are_zero(self) -> None:
        """M02."""
        mask = torch.ones(1, 1, 6, 10, dtype=torch.bool)
        mask[:, :, 2] = False
        out = check(qkv(1, 2, 2, 6, 10, 64, 64), mask, expected={"mask": mask})
        assert (out[:, 2] == 0).all()

    @pytest.mark.parametrize(
        ("mask", "error"),
        [(torch.ones(2, 1, 9, 9, dtype=torch.long), "dtype"), (torch.ones(2, 9, 9), "dimensions")],
    )
    def test_other_masks_are_refused(self, mask: Tensor, error: str) -> None:
        with pytest.raises(ValueError, match=f"attention_mask.*{error}"):
            attention_forward(CAUSAL, *qkv(), mask, scaling=None)


class TestArguments:
    @pytest.mark.parametrize("scaling", [1.0, 0.1234567])
    def test_scaling(self, scaling: float) -> None:
        check(qkv(), scaling=scaling, expected={"causal": True, "softmax_scale": scaling})

    @pytest.mark.parametrize("softcap", [50.0, 1.0])
    def test_softcap(self, softcap: float) -> None:
        """N06; the second saturates."""
        check(qkv(), softcap=softcap, expected={"causal": True, "softcap": softcap})

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (6, 3)])
    def test_grouped_heads_come_from_the_shapes(self, heads: tuple[int, int]) -> None:
        check(qkv(heads=heads[0], heads_k=heads[1]), expected={"causal": True})

    def test_v_may_be_narrower(self) -> None:
        check(qkv(dim=24, dim_v=16), expected={"causal": True})

    def test_learned_queries_have_batch_one(self) -> None:
        q, k, v = qkv()
        check((q[:1].expand(2, -1, -1, -1), k, v), module=ENCODER, expected={})
        out, _ = attention_forward(ENCODER, q[:1], k, v, None, scaling=None)
        again, _ = attention_forward(ENCODER, q[:1].expand(2, -1, -1, -1), k, v, None, scaling=None)
        assert torch.equal(out, again)

    def test_any_strides(self) -> None:
        """A fused projection's slices, and storage in the other order."""
        fused = torch.randn(2, 9, 3 * 64, generator=torch.Generator().manual_seed(0))
        q, k, v = (x.view(2, 9, 4, 16).transpose(1, 2) for x in fused.split(64, dim=-1))
        assert not q.is_contiguous()
        check((q, k, v), expected={"causal": True})
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
        assert q.stride(-1) != 1
        check((q, k, v), expected={"causal": True})

    @pytest.mark.parametrize("ids", [torch.arange(256).expand(3, 1, 256), torch.arange(256)])
    def test_position_ids_say_nothing_about_packing(self, ids: Tensor) -> None:
        """M07."""
        check(qkv(1, 4, 2, 256, 256, 16, 16), position_ids=ids, expected={"causal": True})

    def test_unknown_keywords_are_ignored(self) -> None:
        check(qkv(), use_cache=True, logits_to_keep=0, output_router_logits=False, expected={"causal": True})

    def test_empty(self) -> None:
        q, k, v = qkv(batch=1)
        out, _ = attention_forward(CAUSAL, q[:0], k[:0], v[:0], None, scaling=None)
        assert out.shape == (0, 9, 4, 16)


class TestSequences:
    LENGTHS = torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)

    def truth(self, tensors: tuple[Tensor, Tensor, Tensor], **kwargs: Any) -> Tensor:
        ends = self.LENGTHS.tolist()
        parts = []
        for start, stop in itertools.pairwise(ends):
            part = [x[:, :, start:stop].transpose(1, 2) for x in tensors]
            parts.append(attention_reference(*part, **kwargs)[0])
        return torch.cat(parts, dim=1)

    @pytest.mark.parametrize("module", [CAUSAL, ENCODER], ids=["causal", "encoder"])
    @pytest.mark.parametrize("window", [None, 3])
    def test_without_a_mask(self, module: Any, window: int | None) -> None:
        tensors = qkv(1, rows=12, keys=12)
        packed = {
            "cu_seq_lens_q": self.LENGTHS,
            "cu_seq_lens_k": self.LENGTHS,
            "max_length_q": 5,
            "max_length_k": 5,
        }
        out, _ = attention_forward(module, *tensors, None, scaling=None, sliding_window=window, **packed)
        width = -1 if window is None else window - 1
        truth = self.truth(tensors, causal=module.is_causal, window_size=(width, width))
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-6)

    def test_with_a_mask_that_knows_no_packing(self) -> None:
        tensors = qkv(1, rows=12, keys=12)
        triangle = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
        padded = KeyIntervals(1, 12, 12, torch.device("cpu"), right=0, lo=torch.zeros(1, 1).long())
        plain = KeyIntervals(1, 12, 12, torch.device("cpu"), right=0)
        for mask in (triangle, IntervalMask(padded), IntervalMask(plain)):
            out, _ = attention_forward(CAUSAL, *tensors, mask, scaling=None, cu_seq_lens_q=self.LENGTHS)
            torch.testing.assert_close(out.double(), self.truth(tensors, causal=True), rtol=0, atol=1e-6)

    def test_rows_beyond_the_last_sequence_are_zero(self) -> None:
        tensors = qkv(1, rows=14, keys=14)
        mask = torch.ones(1, 1, 14, 14, dtype=torch.bool).tril()
        for given in (None, mask):
            out, _ = attention_forward(CAUSAL, *tensors, given, scaling=None, cu_seq_lens_q=self.LENGTHS)
            assert (out[:, 12:] == 0).all()

    def test_sequences_need_batch_one(self) -> None:
        with pytest.raises(ValueError, match="cu_seq_lens_q"):
            attention_forward(CAUSAL, *qkv(), None, scaling=None, cu_seq_lens_q=self.LENGTHS)


class TestDtypes:
    """T07."""

    def test_mixed_dtypes_follow_v(self) -> None:
        q, k, v = qkv()
        out, _ = attention_forward(CAUSAL, q, k, v.bfloat16(), None, scaling=None)
        assert out.dtype == torch.bfloat16
        check((q.bfloat16(), k.bfloat16(), v.bfloat16()), expected={"causal": True})

    @pytest.mark.parametrize("v_dtype", [torch.float32, torch.bfloat16])
    def test_autocast(self, v_dtype: torch.dtype) -> None:
        q, k, v = qkv()
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = attention_forward(CAUSAL, q, k, v.to(v_dtype), None, scaling=None)
        plain, _ = attention_forward(CAUSAL, q.bfloat16(), k.bfloat16(), v.bfloat16(), None, scaling=None)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, plain)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_parameters(self, mode: Any) -> None:
        """T05."""
        q, k, v = qkv()
        with mode():
            parameters = [torch.nn.Parameter(x) for x in (q, k, v)]
            out, _ = attention_forward(CAUSAL, *parameters, None, scaling=None)
        assert torch.equal(out, attention_forward(CAUSAL, q, k, v, None, scaling=None)[0])


class TestModifications:
    """What models pass beside a mask, and its gradients."""

    @pytest.mark.parametrize("name", ["s_aux", "sinks"])
    def test_sinks(self, name: str) -> None:
        sinks = torch.linspace(-1, 2, 4)
        check(qkv(), expected={"causal": True, "sinks": sinks}, **{name: sinks})

    @pytest.mark.parametrize("shape", [(1, 4, 9, 9), (2, 4, 9, 9), (1, 4, 1, 9)], ids=str)
    def test_position_bias(self, shape: tuple[int, ...]) -> None:
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
        check(qkv(), mask, ENCODER, {"bias": bias, "mask": mask}, position_bias=bias)
        check(qkv(), None, CAUSAL, {"bias": bias, "causal": True}, position_bias=bias)

    def test_position_bias_and_float_mask_add_up(self) -> None:
        bias, mask = torch.randn(2, 1, 4, 9, 9, generator=torch.Generator().manual_seed(1)).unbind(0)
        check(qkv(), mask, ENCODER, {"bias": bias + mask}, position_bias=bias)

    def test_a_float_mask_that_weighs_and_hides(self) -> None:
        mask = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
        mask[:, :, 3:5, 2] = torch.finfo(mask.dtype).min
        mask[1, :, 6] = torch.finfo(mask.dtype).min
        hidden = mask.masked_fill(mask < -1e30, -torch.inf)
        check(qkv(), mask, ENCODER, {"bias": hidden})

    def test_bias_within_sequences(self) -> None:
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        own = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()
        bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1))
        check(qkv(batch=1), None, ENCODER, {"bias": bias, "mask": own}, position_bias=bias, cu_seq_lens_q=offsets)

    def test_sinks_and_softcap_within_sequences(self) -> None:
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        own = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()
        sinks = torch.linspace(-1, 2, 4)
        expected = {"mask": own, "sinks": sinks, "softcap": 2.0}
        check(qkv(batch=1), None, ENCODER, expected, s_aux=sinks, softcap=2.0, cu_seq_lens_q=offsets)

    @pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
    def test_gradients(self, algorithm: str) -> None:
        tensors = {name: x.requires_grad_() for name, x in zip("qkv", qkv(), strict=True)}
        tensors["sinks"] = torch.linspace(-1, 2, 4).requires_grad_()
        tensors["bias"] = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
        q, k, v, sinks, bias = tensors.values()
        out, _ = attention_forward(
            CAUSAL, q, k, v, None, scaling=None, s_aux=sinks, position_bias=bias, algorithm=algorithm
        )
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        truth, _ = attention_reference(*turned, sinks=sinks, bias=bias, causal=True)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        got = torch.autograd.grad((out * weights).sum(), list(tensors.values()))
        expected = torch.autograd.grad((truth * weights).sum(), list(tensors.values()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("mode", ["kernels", "sdpa"])
    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_r02_dropout_follows_the_module(
        self, mode: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", mode)
        module = SimpleNamespace(training=False, is_causal=True)

        def run() -> Tensor:
            return attention_forward(module, *qkv(), None, scaling=None, dropout=0.3, softcap=softcap)[0]

        for _ in range(2):
            module.training = False
            assert torch.equal(run(), run())
            module.training = True
            assert not torch.equal(run(), run())
