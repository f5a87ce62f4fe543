"""``torch.ops.hf_flash_cupy.attend_cache`` and ``append_and_attend``: attention with a cache for torch.compile, modes.

There a call is a node of a graph, and what it writes in place is said by its schema. No gradient, as without a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kvcache
from .call import Call, Options, uses_tf32

_EXTRAS = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes", "sinks")
_ARGUMENTS = ", ".join(f"Tensor? {name}" for name in _EXTRAS) + (
    ", bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, int? num_splits"
)


def attention(call: Call, num_splits: int | None) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` by the custom operators."""
    q, k, v, extras, options = call
    others = (
        *(extras.get(name) for name in _EXTRAS),
        *(options.causal, *options.window_size, options.softmax_scale, options.softcap, num_splits),
    )
    operators: Any = torch.ops.hf_flash_cupy
    out: tuple[Tensor, Tensor]
    if "k_new" in extras:
        out = operators.append_and_attend(q, k, v, extras["k_new"], extras["v_new"], *others)
    else:
        out = operators.attend_cache(q, k, v, *others)
    return out


def _run(q: Tensor, k: Tensor, v: Tensor, news: dict[str, Tensor], others: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    extras = {name: x for name, x in zip(_EXTRAS, others, strict=False) if x is not None} | news
    causal, left, right, scale, softcap, num_splits = others[len(_EXTRAS) :]
    options = Options(causal, (left, right), scale, softcap, tf32=uses_tf32(q))
    out, lse = kvcache.forward(Call(q, k, v, extras, options), num_splits, need_lse=True)
    assert lse is not None
    return out, lse


@torch.library.custom_op(
    "hf_flash_cupy::attend_cache",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _run(q, k_cache, v_cache, {}, others)


@torch.library.custom_op(
    "hf_flash_cupy::append_and_attend",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _append_and_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_new: Tensor, v_new: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return _run(q, k_cache, v_cache, {"k_new": k_new, "v_new": v_new}, others)


@_append_and_attend.register_fake
@_attend.register_fake
def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _head_dim = q.shape
    out = q.new_empty((batch, rows, heads, v_cache.shape[3]))
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)
