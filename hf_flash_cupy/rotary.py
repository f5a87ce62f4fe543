"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.4.2) of queries and new keys, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Turns the first 2 · half elements of each head of x (batch, seqlen, heads, head_dim), in x's dtype.

    cos, sin: (seqlen_rotary, half), the tables; positions: (batch, seqlen), clamped into them. Pairs are neighbours
    (``interleaved``) or half apart; they are turned in fp32.
    """
    half = cos.shape[-1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table.float()[positions].unsqueeze(-2) for table in (cos, sin))  # (batch, seqlen, 1, half)
    turned, rest = x[..., : 2 * half].float().contiguous(), x[..., 2 * half :]
    dim = -1 if interleaved else -2
    pairs = (half, 2) if interleaved else (2, half)
    a, b = turned.view(*turned.shape[:-1], *pairs).unbind(dim)
    result = torch.stack([a * c - b * s, a * s + b * c], dim=dim).flatten(-2)
    return torch.cat([result.to(x.dtype), rest], dim=-1)


def check(cos: Tensor | None, sin: Tensor | None, q: Tensor, appends: bool) -> bool:
    """Whether there is anything to turn; raises for tables that do not fit q (batch, seqlen, heads, head_dim)."""
    if cos is None and sin is None:
        return False
    if cos is None or sin is None:
        raise ValueError(f"{'rotary_cos' if cos is None else 'rotary_sin'} is None: both tables are needed.")
    if not appends:
        raise ValueError("rotary_cos and rotary_sin turn new keys as well: k and v are needed with them.")
    checks.are_tensors({"rotary_cos": cos, "rotary_sin": sin})
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not table.is_floating_point():
            raise TypeError(f"{name} is {table.dtype}; floating point is needed.")
        if table.shape != cos.shape or table.dim() != 2 or not 0 < 2 * table.shape[-1] <= q.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; (seqlen_rotary, rotary_dim / 2) is needed, rotary_dim at most "
                f"head_dim {q.shape[-1]}, the same for both tables."
            )
        if table.device != q.device:
            raise ValueError(f"{name} is on {table.device}, q on {q.device}: move them to one device.")
    if cos.shape[0] == 0:
        raise ValueError("rotary_cos has no positions: at least one is needed.")
    return True
