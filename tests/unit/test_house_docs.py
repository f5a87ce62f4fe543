"""The documents say what is: variables, commands, options, files, versions; their code runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import hf_flash_cupy
from hf_flash_cupy import cli, env

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
each_readme = pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def variables(path: Path) -> dict[str, str]:
    rows = re.findall(r"^\| `(HF_FLASH_CUPY_\w+)` \| (.*) \|$", path.read_text(), re.MULTILINE)
    return {name: text.replace(r"\|", "|") for name, text in rows}


def test_the_table_of_variables_is_that_of_the_code() -> None:
    assert variables(READMES[0]) == env.VARIABLES
    assert list(variables(READMES[1])) == list(env.VARIABLES)


def test_no_other_variable_is_read_anywhere() -> None:
    for path in (ROOT / "hf_flash_cupy").rglob("*.py"):
        assert set(re.findall(r"HF_FLASH_CUPY_[A-Z_]+", path.read_text())) <= set(env.VARIABLES), path


def commands(path: Path) -> list[str]:
    """Every command line of the shell blocks and of the text, `cache list` and the like included."""
    lines = [line.partition(" #")[0].strip() for block in blocks(path, "sh") for line in block.splitlines()]
    lines += re.findall(r"`(hf-flash-cupy [^`\n]+)`", path.read_text())
    lines += [f"hf-flash-cupy {line}" for line in re.findall(r"`((?:cache|demo) [^`\n]+)`", path.read_text())]
    return [line.removeprefix("hf-flash-cupy ") for line in lines if line.startswith("hf-flash-cupy ")]


def resolve(words: list[str]) -> Any:
    """The command that ``words`` reach, its group's sub-commands and forwarded ones included."""
    from hf_flash_cupy.anatomy.command import explain
    from hf_flash_cupy.bench.command import bench
    from hf_flash_cupy.evaluation import command as evaluation

    forwarded = {"demo": evaluation.demo}
    for name, function in (("ppl", evaluation.ppl), ("bench", bench), ("explain", explain)):
        forwarded[name] = typer.Typer()
        forwarded[name].command()(function)
    found = typer.main.get_command(forwarded.get(words[0], cli.app))
    for word in words[1:] if words[0] in forwarded else words:
        if not hasattr(found, "commands") or word.startswith("-"):
            break
        assert word in found.commands, f"hf-flash-cupy {' '.join(words)}: {word} is no command"
        found = found.commands[word]
    return found


@each_readme
def test_the_commands_and_their_options_exist(path: Path) -> None:
    named = commands(path)
    assert len(named) >= 4
    for line in named:
        words = shlex.split(line)
        options = {name for parameter in resolve(words).params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options, line


@pytest.mark.parametrize("path", [*READMES, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_the_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = re.sub(r"\bmake\s+", "make ", path.read_text())
    named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE))
    assert named
    assert named <= targets


@each_readme
def test_the_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


@each_readme
def test_the_python_examples_compile(path: Path) -> None:
    examples = blocks(path, "python")
    assert len(examples) == 2
    for example in examples:
        compile(example, path.name, "exec")


@each_readme
def test_the_direct_example_runs(path: Path) -> None:
    (example,) = [block for block in blocks(path, "python") if "import flash_attention" in block]
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    q, k, v = (names[name].double() for name in "qkv")
    row, key = torch.arange(512)[:, None], torch.arange(512)
    hidden = ((key > row) | (key < row - 128)).to(q.device)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(4, 2)) / 8
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(4, 2))
    tolerance = 0.02 if names["dtype"] == torch.bfloat16 else 1e-5
    assert (names["out"] - expected).abs().max() < tolerance
    assert (names["lse"] - scores.logsumexp(-1)).abs().max() < 1e-4


def test_both_readmes_show_the_same_commands() -> None:
    def bare(path: Path) -> list[str]:
        return [line.partition("#")[0].strip() for block in blocks(path, "sh") for line in block.splitlines()]

    assert bare(READMES[0]) == bare(READMES[1])


def test_the_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == hf_flash_cupy.__version__


@pytest.fixture
def crippled_python(tmp_path: Path) -> Path:
    """A python3 whose venv module cannot make environments, as on Debian without python3-venv."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && exit 1\nexec python3 "$@"\n')
    python.chmod(0o755)
    return python


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def test_make_names_the_mend_without_venv(crippled_python: Path, tmp_path: Path) -> None:
    answer = make("perplexity", f"PYTHON={crippled_python}", f"VENV={tmp_path / 'venv'}")
    assert answer.returncode != 0
    assert "apt-get install python3-venv" in answer.stderr


def test_make_names_the_mend_without_python(tmp_path: Path) -> None:
    answer = make("test", f"PYTHON={tmp_path / 'no-python'}", f"VENV={tmp_path / 'venv'}")
    assert answer.returncode != 0
    assert "missing or older than 3.11" in answer.stderr
