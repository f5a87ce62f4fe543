"""The backward pass visits the row blocks that see a block of keys: more of them than a warp reads about at once."""

from __future__ import annotations

import attention_check as check
import pytest
import torch
from gradient_check import check_gradients, leaves

ROWS = 2100  # 33 blocks of 64 rows


def packed_intervals(heads: int, num_rows: int = ROWS) -> torch.Tensor:
    """(1, heads, rows, 2): packed sequences, causal inside each; a second head sees the first keys alone."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(1, num_rows, (9,), generator=generator).sort().values
    rows = torch.arange(num_rows)
    which = torch.searchsorted(ends, rows, right=True)
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends])[which]
    packed = torch.stack([begins, rows + 1], -1)
    first = torch.tensor([0, 40]).expand(num_rows, 2)
    return torch.stack([packed, first])[:heads, None].transpose(0, 1).to(torch.int32)


@pytest.mark.parametrize("heads", [1, 2], ids=["one for all heads", "one a head"])
@pytest.mark.parametrize("num_rows", [300, ROWS])
def test_row_blocks_of_packed_sequences(device: torch.device, num_rows: int, heads: int) -> None:
    q, k, v = check.qkv(1, num_rows, num_rows, 2, 32, num_heads_k=1, dtype=torch.bfloat16, device=device)
    check_gradients(leaves(q, k, v), key_intervals=packed_intervals(heads, num_rows).to(device))


def test_rows_that_see_nothing(device: torch.device) -> None:
    """Whole row blocks, at both ends and between, see no key."""
    intervals = packed_intervals(1)
    for begin, end in ((0, 70), (1000, 1200), (1950, ROWS)):
        intervals[:, :, begin:end] = torch.tensor([50, 20])
    q, k, v = check.qkv(1, ROWS, ROWS, 2, 32, dtype=torch.bfloat16, device=device)
    check_gradients(leaves(q, k, v), key_intervals=intervals.to(device))
