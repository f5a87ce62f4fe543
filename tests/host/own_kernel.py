"""Kernels that tests write themselves, built for the host among copies of the package's sources."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_flash_cupy import env
from hf_flash_cupy.jit import module, source
from hf_flash_cupy.problem import KernelConfig


def build(folder: Path, text: str, name: str, params: str, num_threads: int, **fields: Any) -> module.HostKernel:
    """The kernel ``name`` of the source ``text``; ``folder`` gets the sources, ``fields`` go to its configuration."""
    root = folder / "cuda_src"
    shutil.copytree(source.sources_root(), root)
    (root / f"{name}.cuh").write_text(text)
    config = KernelConfig(
        kernel=name,
        name=f"{name}_host",
        include=f"{name}.cuh",
        params=params,
        arch="host",
        num_threads=num_threads,
        min_blocks=1,
        **{"constants": (), **fields},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "sources_root", lambda: root)
        return module.get_host_kernel(config, env.sanitize())
