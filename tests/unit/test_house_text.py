"""The files as texts: short enough to read, and free of what belongs to one machine."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 385  # the house's limits, 350 and 50, with a tenth of tolerance
MAX_FUNCTION_LINES = 55


def tracked_files() -> list[Path]:
    """Every file that git tracks or would add."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in answer.stdout.splitlines() if (path := ROOT / name).is_file()]


# Put together from parts, or this file would hold them.
FORBIDDEN = tuple(
    "".join(parts)
    for parts in (
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("download.", "pytorch.org"),
        ("registry.", "npmjs"),
        ("deb.", "debian.org"),
        ("conda.", "anaconda.org"),
        ("/work", "/main"),
        ("/work", "/shared"),
        ("/opt", "/wheels"),
        ("/opt", "/pypi"),
        ("/tmp", "/contract"),
        ("/tmp", "/venv"),
    )
)


def test_no_file_names_a_registry_host_or_a_path_of_a_work_machine() -> None:
    files = tracked_files()
    assert files
    found = []
    for path in files:
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if word in text]
    assert found == []


PYTHON = sorted(path for folder in ("hf_flash_cupy", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
CPP = sorted((ROOT / "cuda_src").rglob("*.cuh"))


def test_files_are_short_enough_to_read() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in PYTHON + CPP}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_of_the_package_are_short_enough_to_read() -> None:
    too_long = {}
    for path in (ROOT / "hf_flash_cupy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert too_long == {}


def test_modules_say_what_they_are() -> None:
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in (ROOT / "hf_flash_cupy").rglob("*.py")}
    assert [str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []
