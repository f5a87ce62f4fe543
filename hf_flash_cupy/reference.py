"""Attention written out: the oracle of the tests, and what a CPU without a C++ compiler runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    key_intervals: Tensor | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) v with every score modification of :func:`hf_flash_cupy.flash_attention`, differentiable.

    q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_heads_k, head_dim or head_dim_v).
    ``keep`` (batch, num_heads, seqlen_q, seqlen_k), bool: the probabilities that dropout keeps, times
    1 / (1 - dropout_p); the others become 0. Returns out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch,
    num_heads, seqlen_q), both in ``compute_dtype``. Needs memory for every score: batch × num_heads × seqlen_q ×
    seqlen_k.
    """
    batch = max(q.shape[0], k.shape[0], v.shape[0])
    num_heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    visible = visible_keys(batch, num_heads, seqlen_q, seqlen_k, q.device, causal, window_size, mask, key_intervals)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    seen = visible.any(dim=2).unsqueeze(-1)  # (batch, heads, seqlen_k, 1): hidden keys may hold anything
    q, k, v = (x.to(compute_dtype).transpose(1, 2).expand(batch, -1, -1, -1) for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    k, v = (torch.where(seen, x, 0) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.mT * scale  # (batch, num_heads, seqlen_q, seqlen_k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(compute_dtype).expand(batch, num_heads)[:, :, None, None]
        scores = scores - slopes * _diagonal_distance(seqlen_q, seqlen_k, q.device).abs()
    if bias is not None:
        scores = scores + bias.to(compute_dtype)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(compute_dtype)[None, :, None, None].expand(batch, -1, seqlen_q, 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    empty = (lse == -torch.inf).unsqueeze(-1)  # rows without keys: 0, not NaN
    probabilities = torch.exp(scores - lse.unsqueeze(-1).masked_fill(empty, 0)).masked_fill(empty, 0)
    probabilities = probabilities[..., :seqlen_k]
    if keep is not None:
        probabilities = torch.where(keep, probabilities / (1 - dropout_p), 0)
    out = probabilities @ v
    return out.transpose(1, 2), lse


def varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`attention_reference` of packed sequences, one after the other.

    q (total_q, num_heads, head_dim), k and v (total_k, num_heads_k, …), alibi_slopes (num_heads,) or (entries,
    num_heads). Returns out (total_q, num_heads, head_dim_v) and lse (num_heads, total_q); rows beyond the last offset:
    0 and −inf.
    """
    dtype = options.get("compute_dtype", torch.float64)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype)
    offsets_q, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(offsets_q) - 1):
        rows, keys = slice(offsets_q[i], offsets_q[i + 1]), slice(offsets_k[i], offsets_k[i + 1])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[i : i + 1]
        part, part_lse = attention_reference(
            q[None, rows], k[None, keys], v[None, keys], alibi_slopes=slopes, **options
        )
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def visible_keys(
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    causal: bool,
    window_size: tuple[int, int],
    mask: Tensor | None,
    key_intervals: Tensor | None,
) -> Tensor:
    """(batch, num_heads, seqlen_q, seqlen_k) bool, True = attends: the intersection of all that hides keys."""
    distance = _diagonal_distance(seqlen_q, seqlen_k, device)
    left, right = window_size[0], 0 if causal and window_size[1] < 0 else window_size[1]
    if causal:
        right = min(right, 0)
    visible = torch.ones(batch, num_heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    if mask is not None:
        visible = visible & mask
    if key_intervals is not None:
        keys = torch.arange(seqlen_k, device=device)
        lo, hi = key_intervals.unsqueeze(-2).unbind(-1)  # (batch or 1, heads or 1, seqlen_q, 1) each
        visible = visible & (keys >= lo) & (keys < hi)
    return visible


def _diagonal_distance(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k): how far key j lies right of row i's diagonal, aligned at the bottom right."""
    rows = torch.arange(seqlen_q, device=device).unsqueeze(-1)
    return torch.arange(seqlen_k, device=device) - (rows + seqlen_k - seqlen_q)
