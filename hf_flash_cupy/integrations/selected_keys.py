"""Sparse attention whose model says, for each query row, which keys or blocks of keys it attends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy.errors import UnsupportedProblem


def selected_keys(module: Any, q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The selection as a bool mask (batch, num_heads or 1, seqlen_q, seqlen_k), True = attend, or None without one.

    It costs its seqlen_q × seqlen_k bools in every layer; that is what eager attention of these models makes too.

    Args:
        module: the calling layer; for ``block_indices`` its ``indexer.block_size`` is read.
        q, k: (batch, num_heads, seqlen_q, head_dim), (batch, num_heads_k, seqlen_k, head_dim).
        kwargs: ``indices`` (batch, seqlen_q, count), keys of DeepSeek sparse attention; ``block_indices`` (batch,
            groups of heads, seqlen_q, count), blocks of MiniMax sparse attention; −1 selects nothing.

    Raises:
        UnsupportedProblem: blocks of a size that the layer does not say.
    """
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if indices is not None:
        return _chosen(indices[:, None], k.shape[2])
    if blocks is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise UnsupportedProblem(
            "block_indices: attention to selected blocks of keys is supported where the layer has indexer.block_size. "
            'Load this model with attn_implementation="eager".'
        )
    seqlen_k = k.shape[2]
    chosen = _chosen(blocks, -(-seqlen_k // size))  # (batch, groups, seqlen_q, blocks)
    keys = chosen.repeat_interleave(size, dim=-1)[..., :seqlen_k]
    return keys.repeat_interleave(q.shape[1] // blocks.shape[1], dim=1)


def _chosen(indices: Tensor, count: int) -> Tensor:
    """bool (…, count): which of ``count`` are among ``indices`` (…, any); negative ones are none of them."""
    safe = torch.where(indices < 0, count, indices).long()
    none = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    return none.scatter_(-1, safe, True)[..., :count]
