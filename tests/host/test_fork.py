"""Forked children (workers of a data loader, say) run the host kernels too."""

from __future__ import annotations

import torch
from sanitizer_cases import in_child

from hf_flash_cupy import flash_attention


def test_child_after_parent() -> None:
    """Case D08 on the CPU: the parent has kernels loaded and has run them on several threads."""
    q = torch.randn(2, 130, 4, 32)
    expected = flash_attention(q, q, q)

    def work() -> None:
        assert torch.equal(flash_attention(q, q, q), expected)
        assert flash_attention(q[:, :7], q, q).isfinite().all()  # a shape without a plan

    outcomes = [in_child(work) for _ in range(3)]
    assert [outcome["status"] for outcome in outcomes] == [0, 0, 0], outcomes
