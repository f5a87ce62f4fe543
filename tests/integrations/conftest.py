"""Transformers models run this package's kernels on the CPU here, unless a test says otherwise."""

from __future__ import annotations

import pytest

import hf_flash_cupy.integrations.transformers as integration
from hf_flash_cupy.integrations import notices


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "kernels")
    monkeypatch.setattr(notices, "_said", set())  # every test hears its own warnings


@pytest.fixture(autouse=True, scope="session")
def registered() -> None:
    integration.register()
