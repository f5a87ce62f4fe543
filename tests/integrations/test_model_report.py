"""hf-flash-cupy doctor MODEL: what it says of models that are accelerated, partly, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_flash_cupy import UnsupportedProblem, cli, sm90, warm
from hf_flash_cupy.integrations.model_report import report

from .matrix.registry import ROWS
from .matrix.rows import Row
from .matrix.shrink import tiny_config
from .tiny import CONFIGS


def saved(folder: Path, row: Row) -> str:
    tiny_config(row.model_type or row.name, row.config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma2", ["2 of 2 attention layers", "causal, window 4, softcap", "softcap_host", "head size 16"]),
        ("gpt_oss", ["2 of 2 attention layers", "4 heads on 2 of keys", "sinks", "causal, window 4"]),
        ("llama4_text", ["chunks 4", "intervals_host"]),
        ("deepseek_v3", ["head size 24 (v: 16)"]),
        ("deepseek_v32", ["selected keys", "mask_host"]),
        ("t5", ["bias_host"]),
        ("gpt_neo", ["2 of 2 attention layers", "causal, window 4"]),
        ("sam", ["SamVisionSdpaAttention", "additive, bias", "bias_host"]),
        ("falcon", ["2 of 2 attention layers", "FalconAttention", "4 heads on 1 of keys"]),
        ("llava", ["vision: 2 of 2 attention layers", "CLIPAttention"]),
    ],
)
def test_what_layers_ask_for_and_get(name: str, said: list[str], tmp_path: Path) -> None:
    lines, accelerated = report(saved(tmp_path, ROWS[name]))
    text = "\n".join(lines)
    assert accelerated, text
    for words in said:
        assert words in text


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_an_attention_of_its_own_is_said(name: str, tmp_path: Path) -> None:
    lines, accelerated = report(saved(tmp_path, ROWS[name]))
    assert not accelerated
    assert "0 of 2 attention layers accelerated" in lines[1]
    assert any("its own (eager) attention" in line for line in lines)


@pytest.mark.parametrize("serves", [False, True])
def test_the_kernels_of_an_h200(serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As execute chooses them: compute capability 9.0's own where it serves the call, decoding's for the next token."""
    monkeypatch.setattr(warm, "architectures", lambda: ["90"])
    monkeypatch.setattr(sm90, "serves", lambda device: serves)
    lines, accelerated = report("llama")
    assert accelerated
    assert "compute capability 9.0, bfloat16" in lines[0]
    prompt, following = lines[-2:]
    assert ("fa2_forward_sm90_bf16_d128" in prompt) == serves
    assert serves or "fa2_forward_bf16_d128" in prompt
    assert "next token: fa2_decode_bf16_d128" in following


def test_an_encoder_has_no_next_token() -> None:
    lines, _ = report("bert")
    assert "prompt of 2,048: fa2_forward" in lines[-1]


def test_a_head_size_without_a_kernel_is_refused_by_name(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.head_dim = 520
    config.save_pretrained(tmp_path)
    lines, accelerated = report(str(tmp_path))
    assert not accelerated
    assert any("refused: q has head_dim 520" in line for line in lines)


def test_what_is_no_model() -> None:
    with pytest.raises(UnsupportedProblem, match="model type such as llama"):
        report("./no-such-folder")


def test_the_command() -> None:
    """A model type by its default configuration: 32 layers of 7 billion parameters, none of them made."""
    result = CliRunner().invoke(cli.app, ["doctor", "llama"])
    assert result.exit_code == 0, result.output
    assert "Llama: 32 of 32 attention layers accelerated" in result.output
    assert "fa2_forward_" in result.output
    assert CliRunner().invoke(cli.app, ["doctor", "bloom"]).exit_code == 1
