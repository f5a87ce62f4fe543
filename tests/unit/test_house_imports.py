"""The layers of the package and of the CUDA sources, read from the sources themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_flash_cupy"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "cuda_src" not in path.parts)
SOURCES = sorted(path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in (".cuh", ".h", ".hpp"))

# From the bottom up: a module imports from its own layer and those before it. A folder is its modules.
LAYERS = (
    {"env", "errors"},
    {"problem"},
    {"tiles", "checks", "cards", "tensormap"},
    {"jit", "dispatch", "params", "dlpack", "host", "reference", "dropout_mask", "rotary"},
    {"launch", "lasting", "split_workspace"},
    {"plans"},
    {"call", "decode", "fa1", "fa2_backward", "sm90", "sm90_backward", "sm90_backward_plan", "sm90_plan"},
    {"growing"},
    {"execute"},
    {"kvcache"},
    {"custom_ops", "cache_ops"},
    {"ops"},
    {"functional", "explanation"},
    {"flash_attn_interface"},
    {"integrations", "evaluation", "bench", "anatomy", "diagnoses", "doctor", "warm", "cli", "__main__"},
    {"__init__"},
)
CUPY_USERS = {"jit", "launch"}
TRANSFORMERS_USERS = {"integrations", "evaluation", "bench"}

CPP_LAYERS = ({"common"}, {"isa"}, {"tile"}, {"attn"}, {"fa1", "fa2"})


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank(unit: str) -> int:
    found = [index for index, layer in enumerate(LAYERS) if unit in layer]
    assert found, f"hf_flash_cupy/{unit} is in no layer: add it to LAYERS"
    return found[0]


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") of every import statement below ``tree``, a part of ``path``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from ((module, alias.name) for alias in node.names)


def own_unit(module: str, name: str) -> str | None:
    """The unit of this package that an import reaches, None for another package or the bare package."""
    parts = module.split(".")
    if parts[0] != "hf_flash_cupy":
        return None
    if len(parts) > 1:
        return parts[1]
    if not name or name == "__version__":
        return None
    return name if any(name in layer for layer in LAYERS) else "__init__"


def at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run on import: not those of functions, nor those only a type checker reads."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        pending.extend(ast.iter_child_nodes(node))


def imported_at_once(path: Path) -> set[tuple[str, str]]:
    """What importing ``path`` imports: (module, imported name or "")."""
    return {found for node in at_module_level(ast.parse(path.read_text())) for found in imports(path, node)}


def root(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
class TestModule:
    def test_imports_point_downwards(self, path: Path) -> None:
        own = rank(unit_of(path))
        reached = {own_unit(*found) for found in imports(path, ast.parse(path.read_text()))} - {None}
        upward = sorted(unit for unit in reached if unit and rank(unit) > own)
        assert not upward, f"{unit_of(path)} must not import {upward}"

    def test_optional_packages_are_imported_only_where_they_belong(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        everywhere = {root(module) for module, _ in imports(path, tree)}
        if unit_of(path) not in CUPY_USERS:
            assert not everywhere & {"cupy", "cupy_backends"}
        if unit_of(path) not in TRANSFORMERS_USERS:
            assert "transformers" not in everywhere

    def test_cupy_is_imported_only_when_it_is_used(self, path: Path) -> None:
        assert not {root(module) for module, _ in imported_at_once(path)} & {"cupy", "cupy_backends"}


def test_the_command_line_starts_without_heavy_imports() -> None:
    found = imported_at_once(PACKAGE / "cli.py")
    light = {"__future__", "importlib", "sys", "typing", "typer", "hf_flash_cupy"}
    assert {root(module) for module, _ in found} <= light
    assert {own_unit(*each) for each in found} <= {None, "errors"}


def includes(path: Path) -> list[tuple[str, str]]:
    """(bracket, name) of every #include."""
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)', path.read_text(), re.MULTILINE)


def cpp_rank(folder: str) -> int:
    found = [index for index, layer in enumerate(CPP_LAYERS) if folder in layer]
    assert found, f"cuda_src/{folder} is in no layer: add it to CPP_LAYERS"
    return found[0]


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT / "cuda_src").parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "cuda_src")))
class TestSource:
    def test_includes_point_downwards(self, path: Path) -> None:
        for bracket, name in includes(path):
            if bracket == '"':
                # A bare name is a file of the same folder or the one of isa/ptx or isa/host.
                beside = (path.parent / name).exists()
                target = folder_of(path) if beside else "isa" if "/" not in name else name.partition("/")[0]
                assert cpp_rank(target) <= cpp_rank(folder_of(path)), f"{name} is above {folder_of(path)}"

    def test_only_the_host_side_uses_standard_headers(self, path: Path) -> None:
        if "host" not in path.parts:
            assert [name for bracket, name in includes(path) if bracket == "<"] == []

    def test_only_isa_knows_which_side_it_is_on(self, path: Path) -> None:
        if folder_of(path) not in ("common", "isa"):
            assert not re.findall(r"^\s*#\s*(?:if|ifdef|ifndef)\b.*$", path.read_text(), re.MULTILINE)


def test_there_are_sources_to_read() -> None:
    assert MODULES
    assert SOURCES
