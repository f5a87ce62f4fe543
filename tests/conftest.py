"""What every test shares: where the cache is, which tests need a GPU, how hypothesis runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before the package is imported: the user's cache is left alone, and ours is warm the next time.
os.environ.setdefault("HF_FLASH_CUPY_CACHE_DIR", str(Path(__file__).parents[1] / ".cache"))
# No test may depend on a hub: whatever tries fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: a configuration's first example compiles its kernel. Derandomised: a red run can be repeated.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
