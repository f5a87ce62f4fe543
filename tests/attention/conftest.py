"""The attention tests run twice: with the host kernels on the CPU and, marked ``gpu``, on a CUDA device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import attention_check


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def poisoned_outputs() -> Iterator[None]:
    """Whatever a kernel leaves unwritten is NaN instead of what happened to lie there."""
    with attention_check.poisoned_allocations():
        yield
