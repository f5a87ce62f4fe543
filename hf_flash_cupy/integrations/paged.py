"""Continuous batching (``generate_batch``): sequences packed end to end, keys and values in pages.

Transformers 5.17 gives a function named ``paged|…`` the new keys and values and lets it update the cache; from 5.24 on
the model does that, and the function, whose name must contain ``flash``, gets what the cache returned. Where every
sequence decodes one token, both may hand over the pages themselves with a block table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.functional import flash_attention_with_kvcache
from hf_flash_cupy.integrations.recording import run_recorded
from hf_flash_cupy.integrations.request import WAY_OUT
from hf_flash_cupy.integrations.transformers import attention_forward


class Pages(NamedTuple):
    """One layer's part of a paged cache."""

    keys: Tensor  # (num_blocks, page_size, num_heads_k, head_dim)
    values: Tensor  # (num_blocks, page_size, num_heads_k, head_dim_v)
    block_table: Tensor  # int32 (batch, max_blocks)


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    read_index: Any = None,
    write_index: Any = None,
    block_table: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer under a ``paged|…`` name, the cache's update included (Transformers 5.17).

    Args:
        module: the calling layer; ``layer_idx`` and ``sliding_window`` are read.
        query: (1, num_heads, total_q, head_dim), the batch's new tokens end to end.
        key: (1, num_heads_k, total_q, head_dim), of the same tokens.
        value: (1, num_heads_k, total_q, head_dim_v).
        attention_mask: None; lengths and window say what is visible.
        cache: the ``PagedAttentionCache``.
        cu_seq_lens_q: int32 (sequences + 1,); sequences of no tokens fill up the batch of a captured graph.
        cu_seq_lens_k: likewise over cached and new keys; of hybrid models one for each kind of layer.
        max_seqlen_q: tokens of the longest sequence.
        max_seqlen_k: keys of the longest one, likewise for each kind of layer.
        read_index, write_index: where the cache reads and writes, for each group of layers.
        block_table: int32 (groups, sequences, max_blocks), where every sequence decodes one token.
        sliding_window: keys a row sees, its own included.
        kwargs: as of :func:`attention_forward`.

    Returns:
        (1, total_q, num_heads, head_dim_v) and None.

    Raises:
        ValueError: there is no paged cache: this is no continuous batching.
    """
    if cache is None:
        raise ValueError(
            'An attention named "paged|cupy_…" is for continuous batching (generate_batch) alone: there is no paged '
            'cache. Load the model with attn_implementation="cupy_fa2" and let generate_batch choose.'
        )
    window = sliding_window or getattr(module, "sliding_window", None) or None
    layer_type = "sliding_attention" if window else "full_attention"
    lengths_k = cu_seq_lens_k[layer_type] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest_k = max_seqlen_k[layer_type] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    common = {
        **kwargs,
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": lengths_k,
        "sliding_window": window,
    }
    if block_table is not None:
        return _decode(module, query, key, value, _pages(cache, module.layer_idx, block_table), **common), None
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    key, value = (x.transpose(0, 1)[None] for x in (key, value))  # (1, num_heads_k, total_k, head_dim)
    common |= {"max_length_q": max_seqlen_q, "max_length_k": longest_k, "is_causal": True}
    return attention_forward(module, query, key, value, attention_mask, **common)


def flash_alias_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    read_index: Any = None,
    write_index: Any = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attention_forward` under a name with ``flash`` in it, which continuous batching calls too (from 5.24 on).

    The model has updated the cache and gives the keys that it returned, or, with ``block_table`` (sequences,
    max_blocks), the new ones beside the pages ``k_cache`` and ``v_cache`` that they go to. ``read_index`` and
    ``write_index`` have been used by then.
    """
    if block_table is None:
        return attention_forward(module, query, key, value, attention_mask, **kwargs)
    if k_cache is None or v_cache is None:
        raise UnsupportedProblem(f"block_table came without the pages k_cache and v_cache. {WAY_OUT}")
    return _decode(module, query, key, value, Pages(k_cache, v_cache, block_table), **kwargs), None


def _pages(cache: Any, layer_idx: int, block_table: Tensor) -> Pages:
    group, layer = cache.layer_index_to_group_indices[layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return Pages(cache.key_cache[layer].view(shape), cache.value_cache[layer].view(shape), block_table[group])


def _decode(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    *,
    cu_seq_lens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """One new token of every sequence against its pages, to which its key and value are appended."""
    # (1, heads, sequences, head_dim) -> (sequences, 1, heads, head_dim)
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    # The new token is counted in; sequences that fill up the batch have no key at all.
    filled = (cu_seq_lens_k[1 : q.shape[0] + 1] - cu_seq_lens_k[: q.shape[0]] - 1).int()

    def attend() -> tuple[Tensor, str]:
        out: Tensor = flash_attention_with_kvcache(
            q,
            pages.keys,
            pages.values,
            k,
            v,
            cache_seqlens=filled,
            block_table=pages.block_table,
            causal=True,
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softmax_scale=scaling,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return out.transpose(0, 1), "none"  # (1, sequences, num_heads, head_dim_v)

    return run_recorded(module, attend)
