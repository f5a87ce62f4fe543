"""The CUDA sources with a fault in them, to prove that the CPU tells of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_flash_cupy.jit import module, source


def use_changed_sources(monkeypatch: pytest.MonkeyPatch, folder: Path, files: str, right: str, wrong: str) -> None:
    """``wrong`` in place of ``right``, which stands once in ``files``, a pattern; kernels come from such a copy."""
    root = folder / "cuda_src"
    shutil.copytree(source.sources_root(), root)
    found = 0
    for file in root.glob(files):
        text = file.read_text()
        found += text.count(right)
        file.write_text(text.replace(right, wrong))
    assert found == 1
    monkeypatch.setattr(source, "sources_root", lambda: root)
    monkeypatch.setattr(module, "_host_kernels", module._Memory())
