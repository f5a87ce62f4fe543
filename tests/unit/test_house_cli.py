"""The command line: what it offers, how arguments reach a sub-command, and how errors become exit codes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import hf_flash_cupy
from hf_flash_cupy import cli
from hf_flash_cupy.errors import CompilationError, MissingDependency, UnsupportedProblem
from hf_flash_cupy.jit import cache

runner = CliRunner()


def build_entry(name: str) -> None:
    def build(folder: Path) -> dict[str, object]:
        (folder / "kernel.so").write_bytes(b"x" * 2048)
        return {}

    cache.fetch(cache.Recipe(name, "0123abcd", "// unit", "kernel.so", build))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_help_names_every_command() -> None:
    answer = runner.invoke(cli.app, ["--help"])
    assert answer.exit_code == 0
    for command in ("ppl", "bench", "explain", "demo", "doctor", "cache"):
        assert command in answer.output


def test_the_version() -> None:
    answer = runner.invoke(cli.app, ["--version"])
    assert answer.exit_code == 0
    assert answer.output == f"hf-flash-cupy {hf_flash_cupy.__version__}\n"


def test_an_unknown_command_is_wrong_use() -> None:
    assert runner.invoke(cli.app, ["no-such-command"]).exit_code == cli.WRONG_USE


def test_cache_where(cache_folder: Path) -> None:
    assert runner.invoke(cli.app, ["cache", "where"]).output.strip() == str(cache_folder)


def test_cache_list_and_clear(cache_folder: Path) -> None:
    build_entry("fa2_forward_test")
    listed = runner.invoke(cli.app, ["cache", "list"]).output
    assert "fa2_forward_test.0123abcd" in listed
    assert "1 kernels" in listed
    assert "1 kernels removed" in runner.invoke(cli.app, ["cache", "clear"]).output
    assert "0 kernels" in runner.invoke(cli.app, ["cache", "list"]).output


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A stand-in for evaluation.command; the list collects what its commands were given."""
    given: list[object] = []
    module = types.ModuleType("hf_flash_cupy.evaluation.command")

    def ppl(attn: str = "eager", max_tokens: int = 0, verbose: bool = typer.Option(False, "-v")) -> None:
        """Stand-in's help."""
        given.append((attn, max_tokens, verbose))
        if attn == "broken":
            raise typer.Exit(4)

    demo = typer.Typer()

    @demo.command()
    def fetch() -> None:
        given.append("fetch")

    @demo.command()
    def where() -> None:
        given.append("where")

    module.ppl, module.demo = ppl, demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return given


def test_ppl_gets_its_arguments(evaluation: list[object]) -> None:
    assert runner.invoke(cli.app, ["ppl", "--attn", "sdpa,cupy_fa2", "-v", "--max-tokens", "64"]).exit_code == 0
    assert evaluation == [("sdpa,cupy_fa2", 64, True)]


def test_ppl_has_its_own_help(evaluation: list[object]) -> None:
    answer = runner.invoke(cli.app, ["ppl", "--help"])
    assert answer.exit_code == 0
    assert "Stand-in's help." in answer.output
    assert evaluation == []


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--attn", "broken"], 4), (["--max-tokens", "many"], 2), (["--unknown"], 2)]
)
def test_exit_codes_of_ppl_pass_through(evaluation: list[object], arguments: list[str], code: int) -> None:
    assert runner.invoke(cli.app, ["ppl", *arguments]).exit_code == code


def test_demo_has_sub_commands(evaluation: list[object]) -> None:
    assert runner.invoke(cli.app, ["demo", "where"]).exit_code == 0
    assert evaluation == ["where"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MissingDependency("No C++ compiler.", "apt-get install g++"), cli.MISSING),
        (UnsupportedProblem("head_dim 600: supported are 1 to 512."), cli.WRONG_USE),
        (CompilationError("kernel.cu(3): error"), cli.FAILED),
    ],
)
def test_errors_on_purpose_are_one_line_and_a_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == code
    assert capsys.readouterr().err == f"hf-flash-cupy: {error}\n"
