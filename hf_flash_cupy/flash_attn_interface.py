"""flash-attn 2.8's functions on this package's kernels: the same names, signatures, defaults and return values.

``sys.modules["flash_attn"] = hf_flash_cupy.flash_attn_interface`` lets code written for flash-attn run unchanged.

Common arguments:
    dropout_p: probabilities are dropped with this chance; 0.0 outside of training.
    softmax_scale: factor of q·k; None = head_dim ** −0.5.
    causal, window_size: aligned at the bottom right; (left, right) of a window, negative = unbounded.
    softcap: > 0 caps the scores.
    alibi_slopes: float32 (num_heads,) or (batch, num_heads).
    deterministic: gradients bit-equal from run to run.
    return_attn_probs: also return softmax_lse and S_dmask. softmax_lse is the natural-log log-sum-exp, float32
        (batch, num_heads, seqlen_q), packed (num_heads, total_q). S_dmask has something in it only with dropout: each
        probability relative to its row's largest, negative where it was dropped, in q's dtype, (batch, num_heads,
        seqlen_q, seqlen_k) with both lengths rounded up to multiples of 128. It is computed by plain operations of
        torch and takes memory for every score: for tests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import checks, dropout_mask, functional, kvcache, ops, rotary
from .call import Call, Options, extras
from .errors import UnsupportedProblem
from .reference import attention_reference

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_ROUND = 128  # sizes of S_dmask
_SAMPLED_AT_ONCE = 1 << 24  # its elements; each takes some 100 bytes on the way


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_heads_k, …).

    Returns out like q, or (out, softmax_lse, S_dmask). The other arguments are the module's.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    return _attention(q, k, v, {}, options, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of kv (batch, seqlen_k, 2, num_heads_k, head_dim)."""
    k, v = _unpacked("kv", kv, 2)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    return _attention(q, k, v, {}, options, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    return _attention(q, k, v, {}, options, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, num_heads, head_dim), k and v (total_k, num_heads_k, …).

    cu_seqlens_q, cu_seqlens_k: int32 (entries + 1,), where each entry begins and the last ends. Returns out like q, or
    (out, softmax_lse, S_dmask). The other arguments are the module's.
    """
    if block_table is not None:
        raise UnsupportedProblem(
            "block_table: a paged key-value cache is not supported. Gather the pages into k and v first."
        )
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    options = options._replace(max_seqlen_q=int(max_seqlen_q))
    return _attention(q, k, v, lengths, options, alibi_slopes, deterministic, return_attn_probs, int(max_seqlen_k))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of kv (total_k, 2, num_heads_k, head_dim)."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal),
        *(window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of qkv (total, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal),
        *(window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, num_heads, head_dim) to a cache, after k and v were appended in place.

    k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_k, head_dim), or with block_table pages (num_blocks,
    page_size, num_heads_k, head_dim), page_size a multiple of 16.
    k, v: (batch, seqlen_new, num_heads_k, head_dim), written behind the first cache_seqlens keys; what does not fit is
    left out.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): k is turned from position cache_seqlens on; q too if causal or
    with a window, else all of it at cache_seqlens. rotary_interleaved: pairs are neighbours, not rotary_dim / 2 apart.
    cache_seqlens: an integer or int32 (batch,): keys in the cache; needed with k.
    cache_batch_idx: int32 (batch,): which entry of the cache is whose; not with block_table.
    cache_leftpad: int32 (batch,): where the keys of an entry begin; not with block_table.
    block_table: int32 (batch, pages). num_splits: parts of the keys; 0 = chosen by the sizes.
    Returns out like q, or with return_softmax_lse (out, softmax_lse). The rest are the module's. No gradient.
    """
    lengths = {
        "cache_seqlens": cache_seqlens,
        "block_table": block_table,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }
    call = functional.cache_call(q, k_cache, v_cache, k, v, lengths, alibi_slopes=alibi_slopes)
    call = call._replace(options=_options(0.0, softmax_scale, causal, window_size, softcap))
    if rotary.check(rotary_cos, rotary_sin, call.q, k is not None):
        kvcache.check(call.q, call.k, call.v, call.extras, num_splits or None)
        call = _rotated(call, rotary_cos, rotary_sin, rotary_interleaved)
    out, lse = ops.attention_with_cache(call, num_splits or None, need_lse=return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


def _rotated(call: Call, cos: Any, sin: Any, interleaved: bool) -> Call:
    """The call with queries and new keys turned to their positions."""
    first = call.extras["cache_seqlens"].long()[:, None]  # (batch, 1)
    places = torch.arange(max(call.q.shape[1], call.extras["k_new"].shape[1]), device=call.q.device)
    positions = first + places  # (batch, seqlen)
    local = call.options.causal or call.options.window_size != (-1, -1)
    of_q = positions[:, : call.q.shape[1]] if local else first.expand(-1, call.q.shape[1])
    k_new = call.extras["k_new"]
    return call._replace(
        q=rotary.rotate(call.q, cos, sin, of_q, interleaved),
        extras=call.extras | {"k_new": rotary.rotate(k_new, cos, sin, positions[:, : k_new.shape[1]], interleaved)},
    )


def _options(dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float) -> Options:
    left, right = (max(size, -1) for size in checks.pair(window_size))
    if isinstance(softcap, int | float):
        softcap = max(float(softcap), 0.0)
    return Options(causal, (left, right), softmax_scale, softcap, dropout_p)


def _unpacked(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """k and v (and q) of a tensor (…, count, num_heads, head_dim)."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; a torch.Tensor is needed.")
    if packed.dim() < 4 or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; (…, {count}, num_heads, head_dim) is needed.")
    return packed.unbind(-3)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: dict[str, Tensor],
    options: Options,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    max_seqlen_k: int = 0,
) -> Any:
    q, k, v = functional.prepare(q, k, v, 3 if lengths else 4)
    beside = extras(q, alibi_slopes=alibi_slopes, dropout_p=options.dropout_p)
    if lengths:
        checks.varlen(q, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], options.max_seqlen_q)
        beside |= {name: x.contiguous() for name, x in lengths.items()}
    call = Call(q, k, v, beside, options)
    out, lse = functional.attend(call, deterministic or None, need_lse=return_attn_probs)
    if not return_attn_probs:
        return out
    with torch.no_grad():
        sampled = _sampled(call, max_seqlen_k) if options.dropout_p else q.new_empty(0)
    return out, lse, sampled


def _sampled(call: Call, max_seqlen_k: int) -> Tensor:
    """S_dmask (batch, num_heads, seqlen_q, seqlen_k), both lengths rounded up, in q's dtype."""
    q, k, _, beside, options = call
    entries: list[tuple[Tensor, Tensor]]
    if q.dim() == 4:
        batch = max(q.shape[0], k.shape[0])
        q, k = q.expand(batch, -1, -1, -1), k.expand(batch, -1, -1, -1)
        rows, keys = q.shape[1], k.shape[1]
        step = max(_SAMPLED_AT_ONCE // max(q.shape[2] * rows * keys, 1), 1)
        entries = list(zip(torch.split(q, step), torch.split(k, step), strict=True)) if batch else []
    else:
        offsets_q, offsets_k = (pairwise(beside[f"cu_seqlens_{x}"].tolist()) for x in "qk")
        entries = [(q[None, a:b], k[None, c:d]) for (a, b), (c, d) in zip(offsets_q, offsets_k, strict=True)]
        rows, keys = options.max_seqlen_q, max_seqlen_k
        for name, most, dimension in (("max_seqlen_q", rows, 0), ("max_seqlen_k", keys, 1)):
            longest = max((entry[dimension].shape[1] for entry in entries), default=0)
            if longest > most:
                raise ValueError(f"{name}={most}: an entry has {longest}, and S_dmask must hold it.")
    sizes = (-(-rows // _ROUND) * _ROUND, -(-keys // _ROUND) * _ROUND)
    batch = sum(len(one_q) for one_q, _ in entries)
    result = torch.zeros(batch, q.shape[-2], *sizes, dtype=q.dtype, device=q.device)
    slopes = beside.get("alibi_slopes")
    names = ("causal", "window_size", "softmax_scale", "softcap")
    given = {name: getattr(options, name) for name in names}
    end = 0
    for one_q, one_k in entries:
        first, end = end, end + len(one_q)
        shape = (len(one_q), one_q.shape[2], one_q.shape[1], one_k.shape[1])
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[first:end]
        identity = torch.eye(shape[3], device=q.device)[None, :, None].expand(shape[0], -1, one_k.shape[2], -1)
        out, _ = attention_reference(one_q, one_k, identity, alibi_slopes=own, **given, compute_dtype=torch.float32)
        relative = out.transpose(1, 2)  # the probabilities themselves: v is the identity
        if relative.numel() == 0:
            continue
        largest = relative.amax(-1, keepdim=True)
        relative = (relative / largest.masked_fill(largest == 0, 1)).to(q.dtype)
        keep = dropout_mask.kept(beside["philox"], shape, options.dropout_p, first_entry=first)
        # A dropped probability of 0 is negative too: −0 would count as kept.
        dropped = -relative.clamp(min=torch.finfo(q.dtype).smallest_normal)
        result[first:end, :, : shape[2], : shape[3]] = torch.where(keep, relative, dropped)
    return result
