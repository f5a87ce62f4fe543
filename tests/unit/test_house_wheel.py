"""The wheel: what is in it, and that it works installed alone, from another directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hf_flash_cupy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    answer = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin folder of a new environment: the wheel and, by a path entry, this environment's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A path entry, unlike a site folder, does not run its own .pth files: an editable install stays unseen.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_the_wheel_is_pure(wheel: Path) -> None:
    """J14, J15: one file for every Python, torch and machine, and nothing to build."""
    assert wheel.name == f"hf_flash_cupy-{hf_flash_cupy.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: true" in archive.read(info).decode()
    assert not [name for name in names if name.endswith((".so", ".o", ".cubin", ".pyc"))]
    assert wheel.stat().st_size < 2**20


def test_the_wheel_holds_the_package_and_its_sources_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_flash_cupy").rglob("*.py")}
    sources = {
        "hf_flash_cupy/" + path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cuda_src").rglob("*")
        if path.is_file()
    }
    data = {"hf_flash_cupy/py.typed"}
    assert names == package | sources | data


def test_the_metadata_asks_for_what_the_package_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(info).decode()
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE))
    assert {"torch", "transformers", "numpy"} <= required
    assert not {name for name in required if name.startswith("cupy")}, "CuPy is an extra: there are two of them"
    for extra, cupy in (("cuda12", "cupy-cuda12x[ctk]"), ("cuda13", "cupy-cuda13x[ctk]")):
        assert re.search(rf"^Requires-Dist: {re.escape(cupy)}.*; extra == '{extra}'", metadata, re.MULTILINE)


def test_it_works_from_any_directory(installed: Path, tmp_path: Path) -> None:
    program = (
        "import hf_flash_cupy\n"
        "from hf_flash_cupy.jit.source import sources_root\n"
        "print(hf_flash_cupy.__file__)\n"
        "print(sources_root())\n"
    )
    package, sources = run(installed / "python", "-c", program, cwd=tmp_path).split()
    assert Path(package).is_relative_to(installed.parent)
    assert Path(sources) == Path(package).parent / "cuda_src"
    originals = sorted(path for path in (ROOT / "cuda_src").rglob("*") if path.is_file())
    assert originals
    for original in originals:
        copy = Path(sources) / original.relative_to(ROOT / "cuda_src")
        assert copy.read_bytes() == original.read_bytes()


def test_the_installed_command_runs_a_kernel(installed: Path, tmp_path: Path) -> None:
    """From an empty cache, so that the kernel is compiled from the wheel's own sources."""
    answer = run(installed / "hf-flash-cupy", "doctor", cwd=tmp_path, HF_FLASH_CUPY_CACHE_DIR=str(tmp_path / "cache"))
    assert "host kernel" in answer
    listed = run(
        installed / "hf-flash-cupy",
        "cache",
        "list",
        cwd=tmp_path,
        HF_FLASH_CUPY_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert "fa2_forward" in listed
