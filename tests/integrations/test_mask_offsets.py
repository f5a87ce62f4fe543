"""Where packed sequences begin: what a mask says beside its key intervals while something learns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils as hf

from hf_flash_cupy.integrations import masks
from hf_flash_cupy.integrations.key_intervals import IntervalMask
from hf_flash_cupy.integrations.request import build_request

from .test_masks import WINDOW, ids, keep


class TestOffsets:
    """In training, where packed sequences begin: for a backward pass that goes by sequences."""

    IDS = ids("00011112")

    def made(self, function: Any, **given: Any) -> Any:
        arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": function, "device": "cpu"} | given
        mask = masks.attention_mask(**arguments, config=None)
        return mask.described.offsets if isinstance(mask, IntervalMask) else None

    @pytest.mark.parametrize("inner", [hf.causal_mask_function, WINDOW], ids=["causal", "window"])
    def test_begins_and_the_end(self, inner: Any) -> None:
        offsets = self.made(hf.and_masks(inner, hf.packed_sequence_mask_function(self.IDS)))
        assert offsets.dtype == torch.int32
        assert offsets.tolist() == [0, 3, 7, 8]

    def test_not_where_nothing_learns(self) -> None:
        function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(self.IDS))
        with torch.no_grad():
            assert self.made(function) is None

    @pytest.mark.parametrize(
        ("function", "given"),
        [
            (hf.causal_mask_function, {}),
            (hf.packed_sequence_mask_function(IDS), {}),
            (hf.and_masks(WINDOW, hf.packed_sequence_mask_function(ids("00011112", "00000000"))), {"batch_size": 2}),
            (hf.and_masks(WINDOW, hf.packed_sequence_mask_function(IDS)), {"q_length": 3, "q_offset": 5}),
            (hf.and_masks(WINDOW, hf.packed_sequence_mask_function(IDS)), {"attention_mask": keep("11110000")}),
        ],
        ids=["not packed", "not causal", "two rows", "with a cache", "padded"],
    )
    def test_nor_where_they_would_not_say_all(self, function: Any, given: dict[str, Any]) -> None:
        assert self.made(function, **given) is None

    def test_a_part_of_a_mask_has_none(self) -> None:
        function = hf.and_masks(WINDOW, hf.packed_sequence_mask_function(self.IDS))
        mask = masks.attention_mask(1, 8, 8, mask_function=function, config=None, device="cpu")
        for part in (mask[:, :, 2:], mask[..., 1:], mask[:1]):
            assert part.described.offsets is None


@pytest.mark.parametrize(
    ("options", "by_sequences"),
    [
        ({}, False),
        ({"dtype": torch.float32}, True),
        ({"head_dim": 32}, True),
        ({"softcap": 5.0}, True),
        ({"dropout": 0.1}, True),
        ({"arch": "80"}, True),
    ],
    ids=str,
)
def test_hopper_needs_no_sequences(
    options: dict[str, Any], by_sequences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward pass skips what lies between them by their key intervals; where others run, sequences are faster."""
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", options.get("arch", "90a"))
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(TestOffsets.IDS))
    mask = masks.attention_mask(1, 8, 8, mask_function=function, config=None, device="cpu")
    dtype = options.get("dtype", torch.bfloat16)
    q, k, v = (torch.zeros(1, 2, 8, options.get("head_dim", 64), dtype=dtype) for _ in range(3))
    asked = {"scaling": None, "sliding_window": None, "is_causal": None, "kwargs": {}}
    numbers = {"dropout": options.get("dropout", 0.0), "softcap": options.get("softcap")}
    request = build_request(SimpleNamespace(training=True, is_causal=True), q, k, v, mask, **asked, **numbers)
    assert (request.sequences is not None) == by_sequences
    assert (request.intervals is None) == by_sequences


@pytest.mark.parametrize(
    ("numbers", "dtype", "none"),
    [
        ({"head_dim": 64}, torch.bfloat16, True),
        ({"head_dim": 64}, torch.float32, False),
        ({"head_dim": 256}, torch.bfloat16, True),
        ({"head_dim": 512}, torch.bfloat16, False),
        ({"head_dim": 64, "attn_logit_softcapping": 50.0}, torch.bfloat16, False),
        ({"head_dim": 64, "attention_dropout": 0.1}, torch.bfloat16, False),
        ({}, torch.bfloat16, False),
    ],
)
def test_nor_does_its_mask_read_where_they_begin(
    numbers: dict[str, Any], dtype: torch.dtype, none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90a")
    monkeypatch.setattr(masks, "routes_attention", lambda config: True)
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(TestOffsets.IDS))
    given = {"config": SimpleNamespace(**numbers), "dtype": dtype, "device": "cpu"}
    mask = masks.attention_mask(1, 8, 8, mask_function=function, **given)
    assert isinstance(mask, IntervalMask)
    assert (mask.described.offsets is None) == none
