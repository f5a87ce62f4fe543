"""Tests of what only a CUDA device shows: streams, graphs, devices, memory, processes. All marked ``gpu``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
for folder in (FOLDER, FOLDER.parent / "attention"):
    sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
