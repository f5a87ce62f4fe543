"""What the tests of the Hopper forward share: outputs are poisoned, and it is what ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_check import check, check_varlen, poisoned_allocations
from torch import Tensor

from hf_flash_cupy import execute
from hf_flash_cupy.launch import record_launches

HALVES = (torch.bfloat16, torch.float16)
CUDA = torch.device("cuda", 0)
KERNEL = "fa2_forward_sm90"


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Plans that a test makes with other settings do not outlive it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    execute._local.__dict__.clear()
    with poisoned_allocations():
        yield
    execute._local.__dict__.clear()


def check_hopper(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    with record_launches() as records:
        check(q, k, v, **options)
    assert [record.kernel for record in records] == [KERNEL]


def check_hopper_varlen(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: list[int], offsets_k: list[int], **options: Any
) -> None:
    with record_launches() as records:
        check_varlen(q, k, v, offsets_q, offsets_k, **options)
    assert [record.kernel for record in records] == [KERNEL]
