"""hf-flash-cupy doctor MODEL: what it says of models that are accelerated, partly, or not at all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import UnsupportedProblem, cli, env
from hf_flash_cupy.integrations import model_layers, model_report
from hf_flash_cupy.integrations.model_report import report
from hf_flash_cupy.jit import compiler

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


@pytest.mark.parametrize("forced", [False, True])
def test_the_kernels_of_an_h200(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As execute chooses them: compute capability 9.0's own where it serves the call, decoding's for the next token."""
    monkeypatch.setattr(env, "forced_arch", lambda: "90" if forced else None)
    lines, accelerated = report("llama", "90")
    assert accelerated
    assert "compute capability 9.0, bfloat16" in lines[0]
    prompt, following = lines[-2:]
    assert ("fa2_forward_sm90_bf16_d128" in prompt) != forced
    assert not forced or "fa2_forward_bf16_d128" in prompt
    assert "next token: fa2_decode_bf16_d128" in following


@pytest.mark.parametrize(
    ("arch", "head", "kernels"),
    [("75", "compute capability 7.5, float16", "sm75"), ("103", "compute capability 10.3, bfloat16", "sm100")],
)
def test_the_kernels_of_another_card(arch: str, head: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10.3 has no tiles of its own and takes those of 10.0."""
    monkeypatch.setattr(compiler, "supported_archs", lambda: (75, 100, 103))
    lines, _ = report("llama", arch)
    assert head in lines[0]
    assert all(line.endswith(kernels) for line in lines[-2:])


def test_on_a_cpu_it_says_what_a_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_FLASH_CUPY_CPU", raising=False)
    assert "scaled_dot_product_attention in place of these kernels" in report("bert", "host")[0][-1]
    assert "scaled_dot_product" not in report("bert", "89")[0][-1]
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "kernels")
    assert "scaled_dot_product" not in report("bert", "host")[0][-1]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm_ocr", "paddleocr_vl", "video_llama_3"])
def test_a_tower_that_takes_patches_and_their_grid_is_run(name: str) -> None:
    lines, accelerated = report(name, "host")
    text = "\n".join(lines)
    tower = re.search(r"^vision: (\d+) of (\d+) attention layers accelerated$", text, re.MULTILINE)
    assert tower is not None, text
    assert int(tower[1]) == int(tower[2]) > 0
    assert accelerated


def test_a_tower_that_cannot_be_run_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_towers(model: Any) -> Iterator[dict[str, torch.Tensor]]:
        if "grid_thw" in inspect.signature(model.forward).parameters:
            yield {}
        else:
            yield from attempts(model)

    attempts = model_layers.attempts
    monkeypatch.setattr(model_layers, "attempts", without_towers)
    lines, accelerated = report("qwen2_vl", "host")
    assert any(line.startswith("vision: could not be run here without inputs; not judged") for line in lines)
    assert accelerated


def test_a_model_that_cannot_be_run_is_no_success() -> None:
    """The type's defaults do not fit each other; a checkpoint's do."""
    lines, accelerated = report("glm4v", "host")
    assert not accelerated
    assert any("default configuration" in line for line in lines)


def test_a_model_without_attention() -> None:
    lines, accelerated = report("mamba")
    assert lines[1:] == ["Mamba: no attention layers, so there is nothing to accelerate"]
    assert accelerated


def test_an_encoder_has_no_next_token() -> None:
    lines, _ = report("bert", "host")
    assert "prompt of 2,048: fa2_forward" in lines[3]
    assert not any("next token" in line for line in lines)


def test_a_head_size_without_a_kernel_is_refused_by_name(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.head_dim = 520
    config.save_pretrained(tmp_path)
    lines, accelerated = report(str(tmp_path))
    assert not accelerated
    assert any("refused: q has head_dim 520" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no-such-folder", "There is no such folder"),
        ("/no/such/folder", "There is no such folder"),
        ("llam", "did you mean llama?"),
        ("LlamaForCausalLM", "did you mean llama?"),
        ("Qwen2_5_VLForConditionalGeneration", "did you mean qwen2_5_vl?"),
        ("", "doctor ''"),
    ],
)
def test_what_is_surely_no_model_is_refused_without_a_hub(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(model: str) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(model_report, "load_config", ask)
    with pytest.raises(UnsupportedProblem, match=re.escape(words)):
        report(name)
    answer = CliRunner().invoke(cli.app, ["doctor", name])
    assert isinstance(answer.exception, UnsupportedProblem)


@pytest.mark.parametrize("name", ["roberta-base", "xlm-roberta-base", "distilgpt2", "camembert-base", "owner/llam"])
def test_what_may_be_an_id_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(model: str) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(model_report, "load_config", ask)
    with pytest.raises(UnsupportedProblem, match="no route to the hub"):
        report(name)


def test_an_arch_that_there_is_not() -> None:
    with pytest.raises(UnsupportedProblem, match="--arch 77: supported are host, 75"):
        report("llama", "77")
    answer = CliRunner().invoke(cli.app, ["doctor", "--arch", "90"])
    assert answer.exit_code == cli.WRONG_USE


def test_the_command() -> None:
    """A model type by its default configuration: 32 layers of 7 billion parameters, none of them made."""
    result = CliRunner().invoke(cli.app, ["doctor", "llama"])
    assert result.exit_code == 0, result.output
    assert "Llama: 32 of 32 attention layers accelerated" in result.output
    assert "fa2_forward_" in result.output
    assert CliRunner().invoke(cli.app, ["doctor", "bloom"]).exit_code == 1
