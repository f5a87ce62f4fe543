"""Warming the cache: which kernels a model needs, and that a later call finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import cli, warm
from hf_flash_cupy.errors import MissingDependency, UnsupportedProblem
from hf_flash_cupy.jit import cache, compiler, module

runner = CliRunner()


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"hidden_size": 576, "num_attention_heads": 9}, warm.Heads(64, 64)),
        ({"hidden_size": 2048, "num_attention_heads": 8, "head_dim": 256}, warm.Heads(256, 256)),
        (
            {"text_config": {"head_dim": 128, "attn_logit_softcapping": 50.0}},
            warm.Heads(128, 128, softcap=True),
        ),
        ({"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}, warm.Heads(192, 128)),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, warm.Heads(16, 16)),
    ],
)
def test_heads_of_a_model(config: dict[str, object], heads: warm.Heads, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert warm.heads_of_model(str(tmp_path)) == heads


def test_a_model_that_does_not_say_is_refused() -> None:
    with pytest.raises(ValueError, match="--head-dim"):
        warm.heads_of_config({"model_type": "llama"})


def test_a_gpu_model_needs_few_and_many_rows_with_and_without_intervals() -> None:
    names = [config.name for config in warm.configurations(warm.Heads(128, 128), ["bfloat16"], "80")]
    assert len(names) == 4
    assert sum("intervals" in name for name in names) == 2
    assert all(name.startswith("fa2_forward_bf16_d128") and name.endswith("sm80") for name in names)


def test_hopper_has_kernels_of_its_own() -> None:
    """For many rows: causal, short and long, heads with keys of their own and groups of them; and with intervals."""
    names = [config.name for config in warm.configurations(warm.Heads(128, 128), ["bfloat16"], "90")]
    own = [name for name in names if name.startswith("fa2_forward_sm90_bf16_d128")]
    assert sum("intervals" in name for name in own) == 1
    assert sum("causal" in name for name in own) == 4
    assert len(own) == 5
    assert len(names) == 9


def test_a_newer_device_takes_the_newest_known_kernels() -> None:
    assert {config.arch for config in warm.configurations(warm.Heads(64, 64), ["float16"], "87")} == {"86"}
    assert {config.arch for config in warm.configurations(warm.Heads(64, 64), ["float16"], "130")} == {"120"}


def test_what_no_kernel_serves_is_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="512"):
        warm.configurations(warm.Heads(600, 600), ["float16"], "90")


def test_a_warm_cache_spares_the_call_its_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have used the kernel: it starts with none in memory."""
    from hf_flash_cupy.functional import flash_attention

    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module._host_kernels, "_values", {})
    answer = runner.invoke(cli.app, ["cache", "warm", "--head-dim", "24", "--arch", "host"])
    assert answer.exit_code == 0, answer.output
    assert sum(entry.is_kernel for entry in cache.list_entries()) == 2
    before = module.stats()
    q = torch.randn(1, 5, 1, 24)
    flash_attention(q, q, q, causal=True)
    after = module.stats()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits + 1)


@pytest.mark.slow
def test_a_gpu_is_not_needed_to_warm_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path))
    arch = str(compiler.supported_archs()[-1])
    answer = runner.invoke(cli.app, ["cache", "warm", "--head-dim", "64", "--arch", arch, "--dtype", "float16"])
    assert answer.exit_code == 0, answer.output
    entries = cache.list_entries()
    assert entries
    assert {entry.binary.suffix for entry in entries} == {".cubin"}
    again = runner.invoke(cli.app, ["cache", "warm", "--head-dim", "64", "--arch", arch, "--dtype", "float16"])
    assert again.output.count("0.00 s") == len(entries)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--head-dim"),
        (["some/model", "--head-dim", "64"], "one of the two"),
        (["some/model", "--head-dim-v", "64"], "--head-dim-v"),
        (["/no/such/folder"], "/no/such/folder: there is no such folder"),
        (["--head-dim", "64", "--arch", "70"], "--arch 70: supported are host, 75, 80"),
        (["--head-dim", "64", "--arch", "77"], "--arch 77: supported are host, 75, 80"),
        (["--head-dim", "64", "--arch", "hopper"], "--arch hopper: supported are host, 75, 80"),
        (["--head-dim", "64", "--dtype", "int8", "--arch", "host"], "--dtype int8"),
        (["--head-dim", "600", "--arch", "host"], "head_dim 600"),
        (["--head-dim", "-3", "--arch", "host"], "'--head-dim'"),
        (["--head-dim", "64", "--head-dim-v", "-3", "--arch", "host"], "'--head-dim-v'"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], words: str) -> None:
    answer = runner.invoke(cli.app, ["cache", "warm", *arguments], env={"COLUMNS": "200"})
    assert answer.exit_code == cli.WRONG_USE, answer.output
    assert words in " ".join(answer.output.replace("│", " ").split())


def test_a_card_between_two_is_known_and_without_nvrtc_those_with_tiles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_archs", lambda: (70, 75, 87))
    assert warm.architectures(["87", "90", "host"]) == ["87", "90", "host"]

    def missing() -> tuple[int, ...]:
        raise MissingDependency("no NVRTC", "pip install it")

    monkeypatch.setattr(compiler, "supported_archs", missing)
    assert warm.architectures(["90"]) == ["90"]
    with pytest.raises(ValueError, match="--arch 87: supported are host, 75, 80, 86, 89, 90"):
        warm.architectures(["87"])
