"""The Hopper backward at head size 256, whose two warpgroups hand each other P and dS: what goes wrong there shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_check import CPU, qkv
from changed_sources import use_changed_sources
from hopper_check import fresh_plans
from hopper_gradients import check_hopper_gradients

CHANGED = "operands change while a product is under way"
FAULTS = {  # text of the kernel, what stands there instead, and what is told
    "P taken before it is there": (
        "    mbarrier_wait(shared_.p_written(), Traits::single_parity(row_slots_));\n",
        "",
        "isnan differs",
    ),
    "P not passed on": ("    release(shared_.p_written());\n", "", "deadlock"),
    "dO multiplied before it is there": (
        "    await_dout();\n  }\n  // dP - delta is",
        "  }\n  // dP - delta is",
        CHANGED,
    ),
    "dO given back by one warpgroup": ("init(dout_released(slot), kWarps)", "init(dout_released(slot), 4)", CHANGED),
    "q given back by one warpgroup": ("init(q_released(slot), kWarps)", "init(q_released(slot), 4)", CHANGED),
    "the same half of dq twice": ("dq_panel(warpgroup_, part)", "dq_panel(warpgroup_, 0)", "dq: error"),
    "a half of dq in the other's place": ("tile.base + (panel *", "tile.base + ((panel ^ 1) *", "dq: error"),
}


@pytest.fixture(autouse=True)
def hopper_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90a")
    with fresh_plans():
        yield


def check() -> None:
    """Five row blocks, so that every place is used again; four key blocks, the last of them ragged."""
    q, k, v = qkv(1, 260, 200, 2, 256, dtype=torch.bfloat16, device=CPU, num_heads_k=1)
    check_hopper_gradients(q, k, v)


@pytest.mark.slow
def test_without_a_fault() -> None:
    check()


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    right, wrong, message = FAULTS[fault]
    use_changed_sources(monkeypatch, tmp_path, "fa2/backward_sm90*.cuh", right, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check()
