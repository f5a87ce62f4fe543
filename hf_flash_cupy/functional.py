"""The user's functions: checks, defaults, and errors that name the user's argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import checks, dlpack, kvcache, ops
from .call import Call, Options, extras, seqlen_first
from .errors import MissingDependency
from .reference import attention_reference, varlen_reference


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
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
    deterministic: bool | None = None,
    return_lse: bool = False,
    algorithm: str = "fa2",
) -> Any:
    """Exact attention softmax(q kᵀ · scale) v in one fused kernel (Dao 2023, FlashAttention-2, Algorithm 1).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 (compute capability 8.0 or newer) or float32.
        k: (batch, seqlen_k, num_heads_k, head_dim); num_heads is a multiple of num_heads_k (GQA, MQA).
        v: (batch, seqlen_k, num_heads_k, head_dim_v). Batch 1 broadcasts; any strides; head sizes 1 to 512.
        causal: row i sees keys j ≤ i + seqlen_k − seqlen_q (aligned at the bottom right).
        window_size: (left, right): row i sees i + seqlen_k − seqlen_q − left ≤ j ≤ i + seqlen_k − seqlen_q + right;
            −1 = unbounded.
        softmax_scale: factor of q·k before everything else; None = head_dim ** −0.5.
        softcap: s ← softcap · tanh(s / softcap) before any mask or bias; 0 = off.
        alibi_slopes: float32 (num_heads,) or (batch, num_heads): −slope · abs(i + seqlen_k − seqlen_q − j) is added
            (Press et al. 2022).
        sinks: (num_heads,): one more logit a head, in the denominator only.
        bias: added to the scores; any float dtype, broadcastable to (batch, num_heads, seqlen_q, seqlen_k).
        mask: bool, True = attend, broadcastable to (batch, num_heads, seqlen_q, seqlen_k); never copied to that size.
        key_intervals: int32 (batch or 1, num_heads or 1, seqlen_q, 2): row i attends lo ≤ j < hi. mask, causal, window
            and key_intervals combine by intersection.
        dropout_p: probabilities are dropped with this chance and the rest scaled by 1 / (1 − dropout_p), in steps of
            2 ** −16; the random state is torch's, of q's device.
        deterministic: gradients bit-equal from run to run; None = torch.are_deterministic_algorithms_enabled(). The
            forward always is.
        return_lse: also return the natural-log log-sum-exp of each row's scores, sinks included.
        algorithm: "fa2" (Dao 2023) or "fa1" (Dao et al. 2022, FlashAttention, Algorithm 1).

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), contiguous, in the inputs' dtype (mixed dtypes: autocast's if on,
        else v's); with ``return_lse`` also lse (batch, num_heads, seqlen_q), float32. Rows that see no key: out 0,
        lse −inf (= the sink, if there is one). Keys hidden from every row never influence anything, even when they hold
        NaN. Both have gradients, by q, k, v, bias and sinks; second derivatives are refused.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, naming the argument.
        UnsupportedProblem: what no kernel can do.
    """
    if not isinstance(q, Tensor):
        call = {key: value for key, value in locals().items() if key not in ("q", "k", "v")}
        return dlpack.call(flash_attention, (q, k, v), call)
    if algorithm != "fa2":
        checks.algorithm(algorithm)
    q, k, v = prepare(q, k, v, 4)
    if type(window_size) is not tuple:
        window_size = checks.pair(window_size)
    options = Options(causal, window_size, softmax_scale, softcap, dropout_p, algorithm)
    beside = {}
    if not (mask is key_intervals is bias is alibi_slopes is sinks is None and dropout_p == 0.0):
        beside = extras(
            q,
            mask=mask,
            key_intervals=key_intervals,
            bias=bias,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_p=dropout_p,
        )
    out, lse = attend(Call(q, k, v, beside, options), deterministic, need_lse=return_lse)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    algorithm: str = "fa2",
) -> Any:
    """:func:`flash_attention` over packed sequences: entry i attends rows cu_seqlens[i] to cu_seqlens[i + 1] only.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_k, head_dim).
        v: (total_k, num_heads_k, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on q's device, ascending from 0; entries may be empty.
        max_seqlen_q: rows of the longest entry; a wrong one costs speed, not correctness.
        max_seqlen_k: keys of the longest entry; not needed by this algorithm.
        alibi_slopes: (num_heads,) or (entries, num_heads).
        The rest as in :func:`flash_attention`, without mask, key_intervals and bias.

    Returns:
        out (total_q, num_heads, head_dim_v) and, with ``return_lse``, lse (num_heads, total_q). Rows of no
        entry, as those beyond the last offset: out 0, lse −inf, zero gradients.
    """
    if algorithm != "fa2":
        checks.algorithm(algorithm)
    q, k, v = prepare(q, k, v, 3)
    checks.varlen(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    window_size = checks.pair(window_size)
    options = Options(causal, window_size, softmax_scale, softcap, dropout_p, algorithm, max_seqlen_q=int(max_seqlen_q))
    beside = extras(q, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p)
    beside["cu_seqlens_q"], beside["cu_seqlens_k"] = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    out, lse = attend(Call(q, k, v, beside, options), deterministic, need_lse=return_lse)
    return (out, lse) if return_lse else out


def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention to a cache of keys and values, to which new ones are appended in place first; for inference.

    Keys are split among thread blocks and their results combined (Dao et al. 2023, Flash-Decoding). Nothing waits for
    the GPU, so lengths that grow on the device suit CUDA graphs; to torch.compile a call is one operator.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32.
        k_cache: (batch or 1, seqlen_cache, num_heads_k, head_dim); with block_table (num_blocks, page_size,
            num_heads_k, head_dim), page_size a multiple of 16. Any strides, the last 1.
        v_cache: the same with head_dim_v, in k_cache's dtype.
        k, v: (batch, seqlen_new, num_heads_k, head_dim or head_dim_v): written behind the first cache_seqlens[i] keys
            of entry i; what does not fit is left out.
        cache_seqlens: how many keys each entry has before k is appended: int32 (batch,) on q's device, or one number
            for all; None = the whole cache. Needed with k and v. Keys beyond are never read, whatever they hold. An
            entry of a negative length only fills up the batch: it has no keys, and nothing is appended.
        block_table: int32 (batch, max_blocks): the pages of each entry's cache in order.
        causal, window_size: as in :func:`flash_attention`, aligned at the bottom right of the new length.
        softmax_scale, softcap, sinks: as in :func:`flash_attention`.
        num_splits: into how many parts the keys are split, 1 to 256; None = chosen by the sizes. The result's bits
            depend on it, and for a given number not on the batch.
        return_lse: also return the natural-log log-sum-exp of each row's scores, sinks included.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v) in the caches' dtype; with ``return_lse`` also lse (batch,
        num_heads, seqlen_q), float32. Rows that see no key: out 0, lse −inf (= the sink, if there is one).

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, naming the argument.
        UnsupportedProblem: what no kernel can do; gradients among it.
    """
    lengths = {"cache_seqlens": cache_seqlens, "block_table": block_table}
    call = cache_call(q, k_cache, v_cache, k, v, lengths, sinks=sinks)
    options = Options(causal, checks.pair(window_size), softmax_scale, softcap)
    out, lse = ops.attention_with_cache(call._replace(options=options), num_splits, need_lse=return_lse)
    return (out, lse) if return_lse else out


def cache_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: dict[str, Any],
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Call:
    """The call, without options, of tensors as kernels read them; ``lengths``: cache_seqlens and what else is given."""
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None: k and v are appended together.")
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | ({} if k is None else {"k": k, "v": v})
    kvcache.check_tensors(given)
    kvcache.refuse_gradients({"alibi_slopes": alibi_slopes, "sinks": sinks})
    cache_seqlens = lengths["cache_seqlens"]
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: where k and v are to be appended is needed.")
    one_length = isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool)
    lengths = {name: x for name, x in lengths.items() if x is not None}
    checks.are_tensors({name: x for name, x in lengths.items() if name != "cache_seqlens" or not one_length})
    if one_length:
        same = kvcache.same_length(cache_seqlens, q, k_cache, k, lengths.get("block_table"))
        lengths = lengths | {"cache_seqlens": same}
    q, *news = (x.to(v_cache.dtype) for x in (q, k, v) if x is not None)
    if not torch.compiler.is_compiling():
        q, *news = (x.resolve_neg() for x in (q, *news))
    q, *news = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, *news))
    beside = extras(q, alibi_slopes=alibi_slopes, sinks=sinks) | {name: x.contiguous() for name, x in lengths.items()}
    return Call(q, k_cache, v_cache, beside | dict(zip(("k_new", "v_new"), news, strict=False)), Options())


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Which kernel :func:`flash_attention` would run for these tensors, and why; launches and compiles nothing."""
    from .explanation import explanation

    return explanation(q, k, v, **options)


def prepare(q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype and a contiguous last dimension."""
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not (are_tensors and q.dim() == k.dim() == v.dim() == dimensions):
        checks.dimensions(q, k, v, dimensions)
    if not torch.compiler.is_compiling() and (q.is_neg() or k.is_neg() or v.is_neg()):
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    device_type = "cuda" if q.is_cuda else q.device.type
    if device_type not in ("cuda", "cpu"):
        checks.device(q)
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else v.dtype
    if not (q.dtype == k.dtype == v.dtype == dtype):
        checks.dtypes(q, k, v)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def attend(call: Call, deterministic: bool | None, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out`` and ``lse`` (or None) of a call: by the kernels, or on a CPU without a C++ compiler by torch."""
    try:
        return ops.attention(call, deterministic, need_lse)
    except MissingDependency as error:
        if call.q.is_cuda:
            raise
        return _reference(call, error)


def _reference(call: Call, reason: MissingDependency) -> tuple[Tensor, Tensor]:
    """The same by plain operations of torch."""
    q, k, v, beside, options = seqlen_first(call)
    given: dict[str, Any] = dict(beside)
    given |= {name: getattr(options, name) for name in ("causal", "window_size", "softmax_scale", "softcap")}
    function: Callable[..., tuple[Tensor, Tensor]] = attention_reference
    if "cu_seqlens_q" in beside:
        function = varlen_reference
    if given.pop("philox", None) is not None:
        if function is varlen_reference:
            raise reason
        shape = (checks.batch(q, k, v), q.shape[2], q.shape[1], k.shape[1])
        given |= {"dropout_p": options.dropout_p, "keep": torch.rand(shape) >= options.dropout_p}
    _warn_reference(str(reason))
    out, lse = function(q, k, v, **given, compute_dtype=torch.float32)
    return out.to(q.dtype).contiguous(), lse


@cache
def _warn_reference(reason: str) -> None:
    warnings.warn(f"hf_flash_cupy runs plain PyTorch operations on the CPU, not its kernels. {reason}", stacklevel=4)
