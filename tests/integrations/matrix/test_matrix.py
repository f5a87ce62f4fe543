"""Model types against eager, in every mode they have, with this package's kernels in every attention layer."""

from __future__ import annotations

import warnings

import pytest
import torch

from .registry import ROWS
from .runner import Runner

# One of each kind of attention; the others differ in what surrounds it.
QUICK = """
gpt2 mistral gemma2 gpt_oss deepseek_v3 deepseek_v32 llama4_text minimax_m3_vl_text qwen3_next modernbert t5 t5gemma2
whisper swin gemma3 qwen2_5_vl mllama falcon
"""


def check(name: str, device: str, dtype: torch.dtype) -> None:
    row = ROWS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = Runner(row, device, dtype).run()
    assert outcome.equal, outcome.modes
    assert outcome.modes[row.modes[0]] == "ok"
    assert outcome.seen.accelerated == row.accelerated, outcome.seen


@pytest.mark.parametrize("name", QUICK.split())
def test_one_of_each_kind(name: str) -> None:
    check(name, "cpu", torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ROWS if name not in QUICK.split()])
def test_every_model(name: str) -> None:
    check(name, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
def test_every_model_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    check(name, "cuda", dtype)
