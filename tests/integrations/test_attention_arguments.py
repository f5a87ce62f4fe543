"""The attention function's rarer arguments: probabilities, selected keys, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from hf_flash_cupy import UnsupportedProblem
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals
from hf_flash_cupy.integrations.transformers import attention_forward
from hf_flash_cupy.reference import attention_reference

from .calls import CAUSAL, check, qkv
from .test_masks import READS, OperatorNames


class TestProbabilities:
    """output_attentions=True: the exact slow road."""

    CASES: ClassVar[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {  # arguments, what the reference is told
        "plain": ({}, {}),
        "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
        "sinks": ({"s_aux": torch.linspace(-1, 2, 4)}, {"sinks": torch.linspace(-1, 2, 4)}),
        "bias": ({"position_bias": torch.linspace(0, 1, 9)}, {"bias": torch.linspace(0, 1, 9)}),
        "scale": ({"scaling": 0.7}, {"softmax_scale": 0.7}),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_they_are_the_softmax(self, case: str) -> None:
        """With v = identity the output is the probabilities."""
        arguments, expected = self.CASES[case]
        q, k, _ = qkv()
        v = torch.eye(9).expand(2, 2, 9, 9)
        with pytest.warns(UserWarning, match="output_attentions"):
            out, weights = attention_forward(
                CAUSAL, q, k, v, None, **{"scaling": None, **arguments}, output_attentions=True
            )
        truth, _ = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, **expected)
        assert weights is not None
        torch.testing.assert_close(weights.double(), truth.transpose(1, 2), rtol=0, atol=1e-6)
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-6)

    def test_rows_without_keys_are_zero(self) -> None:
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
        mask[:, :, 3] = False
        with pytest.warns(UserWarning, match="output_attentions"):
            out, weights = attention_forward(CAUSAL, *qkv(), mask, scaling=None, output_attentions=True)
        assert weights is not None
        assert (out[:, 3] == 0).all()
        assert (weights[:, :, 3] == 0).all()
        torch.testing.assert_close(weights[:, :, 4].sum(-1), torch.ones(2, 4))

    def test_false_is_no_request(self) -> None:
        check(qkv(), output_attentions=False, expected={"causal": True})


class TestSelectedKeys:
    def test_indices_are_keys_that_a_row_may_see(self) -> None:
        indices = torch.randint(0, 9, (2, 9, 3), generator=torch.Generator().manual_seed(1))
        indices[0, 4, 1] = -1  # nothing
        chosen = torch.zeros(2, 1, 9, 10, dtype=torch.bool).scatter_(-1, indices[:, None] % 10, True)[..., :9]
        triangle = torch.ones(9, 9, dtype=torch.bool).tril()
        described = IntervalMask(KeyIntervals(2, 9, 9, torch.device("cpu"), right=0))
        for mask in (triangle.expand(2, 1, 9, 9), described):
            check(qkv(), mask, expected={"mask": chosen & triangle}, indices=indices.int())

    def test_block_indices_are_blocks_of_a_group_of_heads(self) -> None:
        """Keys 0..8 in blocks of 2: the last has one key."""
        blocks = torch.tensor([[0, 4], [1, -1]])[None, :, None].expand(2, 2, 9, 2)
        module = SimpleNamespace(training=False, is_causal=False, indexer=SimpleNamespace(block_size=2))
        keys = torch.zeros(4, 9, dtype=torch.bool)
        keys[:2, [0, 1, 8]] = True
        keys[2:, [2, 3]] = True
        check(qkv(), None, module, {"mask": keys[None, :, None]}, block_indices=blocks)


REFUSED: dict[str, dict[str, Any]] = {
    "block_indices": {"block_indices": torch.zeros(2, 2, 9, 4, dtype=torch.long)},  # of a layer without an indexer
    "block_table": {"block_table": torch.zeros(1, 2, 4, dtype=torch.int32)},
}


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_would_change_the_result_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(UnsupportedProblem, match=name) as error:
            attention_forward(CAUSAL, *qkv(), None, scaling=None, **REFUSED[name])
        assert "attn_implementation=" in str(error.value)


TRIANGLE = torch.ones(9, 9, dtype=torch.bool).tril()
HOLES = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1]] * 2, dtype=torch.bool)
READING: dict[str, dict[str, Any]] = {
    "float mask": {
        "attention_mask": torch.zeros(9, 9).masked_fill(~TRIANGLE, torch.finfo(torch.float32).min)[None, None]
    },
    "bool mask": {"attention_mask": TRIANGLE[None, None]},
    "padding with holes": {
        "attention_mask": IntervalMask(KeyIntervals(2, 9, 9, torch.device("cpu"), right=0, key_mask=HOLES))
    },
    "key padding": {"attention_mask": HOLES},
    "position bias": {"attention_mask": TRIANGLE[None, None], "position_bias": torch.zeros(1, 4, 9, 9)},
    "indices": {"attention_mask": TRIANGLE[None, None], "indices": torch.zeros(2, 9, 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("case", READING)
def test_no_layer_reads_anything_back_from_the_device(case: str) -> None:
    """On a GPU each look would wait for all work before; test_no_sync.py sees the same there."""
    with OperatorNames() as called:
        attention_forward(CAUSAL, *qkv(), **{"scaling": None, **READING[case]})
    assert called.names
    assert not [name for name in called.names if name.startswith(READS)]
