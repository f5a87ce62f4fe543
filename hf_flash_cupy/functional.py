"""The user's functions: checks, defaults, and errors that name the user's argument."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import checks, dlpack, ops
from .errors import MissingDependency, UnsupportedProblem
from .launch import ForwardPlan, Geometry
from .problem import AttentionProblem
from .reference import attention_reference, varlen_reference

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


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
        v: (batch, seqlen_k, num_heads_k, head_dim_v). Batch 1 broadcasts; any strides; head sizes 1 to 256.
        causal: row i sees keys j ≤ i + seqlen_k − seqlen_q (aligned at the bottom right).
        window_size: (left, right): row i sees i + seqlen_k − seqlen_q − left ≤ j ≤ i + seqlen_k − seqlen_q + right;
            −1 = unbounded.
        softmax_scale: factor of q·k before everything else; None = head_dim ** −0.5.
        softcap: s ← softcap · tanh(s / softcap) before any mask; 0 = off.
        alibi_slopes, sinks, bias, dropout_p: not supported by this version's kernels; refused by name.
        mask: bool, True = attend, broadcastable to (batch, num_heads, seqlen_q, seqlen_k); never copied to that size.
        key_intervals: int32 (batch or 1, num_heads or 1, seqlen_q, 2): row i attends lo ≤ j < hi. mask, causal, window
            and key_intervals combine by intersection.
        deterministic: the forward always is.
        return_lse: also return the natural-log log-sum-exp of each row's scores.
        algorithm: "fa2".

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), contiguous, in the inputs' dtype (mixed dtypes: autocast's if on,
        else v's); with ``return_lse`` also lse (batch, num_heads, seqlen_q), float32. Rows that see no key: out 0,
        lse −inf. Keys hidden from every row never influence anything, even when they hold NaN.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, naming the argument.
        UnsupportedProblem: what no kernel can do yet, among it gradients.
    """
    if not isinstance(q, Tensor):
        call = {key: value for key, value in locals().items() if key not in ("q", "k", "v")}
        return dlpack.call(flash_attention, (q, k, v), call)
    if alibi_slopes is not None or sinks is not None or bias is not None or dropout_p != 0.0 or algorithm != "fa2":
        checks.refuse_options(alibi_slopes, sinks, bias, dropout_p, algorithm)
    q, k, v = prepare(q, k, v, 4)
    if type(window_size) is not tuple:
        window_size = checks.pair(window_size)
    if mask is not None or key_intervals is not None:
        checks.masks_are_tensors(mask, key_intervals)
    batch = q.shape[0] if q.shape[0] == k.shape[0] == v.shape[0] else checks.batch(q, k, v)
    out_shape = (batch, q.shape[1], q.shape[2], v.shape[3])
    lse_shape = (batch, q.shape[2], q.shape[1]) if return_lse else None
    arguments = (causal, window_size, softmax_scale, softcap)
    tf32 = q.dtype == torch.float32 and uses_tf32(q)
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        describe(q, k, v, *arguments, mask, key_intervals, tf32=tf32)
        return _empty(q, out_shape, lse_shape)
    key = (
        *(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(q.dtype, q.device, k.device, v.device),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        arguments,
        None if mask is None else _layout(mask),
        None if key_intervals is None else _layout(key_intervals),
        tf32,
    )

    def make() -> ForwardPlan:
        return ForwardPlan(*describe(q, k, v, *arguments, mask, key_intervals, tf32=tf32), q.device)

    try:
        plan = ops.plan_for(key, make)
    except MissingDependency as error:
        if q.is_cuda:
            raise
        names = ("causal", "window_size", "softmax_scale", "softcap", "mask", "key_intervals")
        options = dict(zip(names, (*arguments, mask, key_intervals), strict=True))
        return _reference(attention_reference, (q, k, v), options, return_lse, str(error))
    out, lse = ops.forward(plan, q, k, v, out_shape, lse_shape, mask, key_intervals, None)
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
        The rest as in :func:`flash_attention`.

    Returns:
        out (total_q, num_heads, head_dim_v) and, with ``return_lse``, lse (num_heads, total_q). Rows of no
        entry, as those beyond the last offset: out 0, lse −inf.
    """
    checks.refuse_options(alibi_slopes, sinks, None, dropout_p, algorithm)
    q, k, v = prepare(q, k, v, 3)
    checks.varlen(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    cu_seqlens = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    problem, geometry = describe(
        *(q[None], k[None], v[None], causal, checks.pair(window_size), softmax_scale, softcap, None, None),
        tf32=uses_tf32(q),
        entries=cu_seqlens_q.shape[0] - 1,
        max_seqlen_q=max(int(max_seqlen_q), 1),
    )
    out_shape = (q.shape[0], q.shape[1], v.shape[2])
    lse_shape = (q.shape[1], q.shape[0]) if return_lse else None
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return _empty(q, out_shape, lse_shape)
    try:
        plan = ops.plan_for((problem, geometry, q.device), lambda: ForwardPlan(problem, geometry, q.device))
    except MissingDependency as error:
        if q.is_cuda:
            raise
        options = {
            "causal": causal,
            "window_size": window_size,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
        }
        return _reference(varlen_reference, (q, k, v, *cu_seqlens), options, return_lse, str(error))
    out, lse = ops.forward(plan, q, k, v, out_shape, lse_shape, None, None, cu_seqlens)
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Which kernel :func:`flash_attention` would run for these tensors, and why; launches and compiles nothing."""
    from .explanation import explanation

    return explanation(q, k, v, **options)


def prepare(q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype, a contiguous last dimension, and no gradient asked for."""
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and q.dim() == k.dim() == v.dim() == dimensions):
        checks.dimensions(q, k, v, dimensions)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedProblem(
            "q, k or v requires a gradient: this version has the forward pass only. Call under torch.no_grad() or "
            'torch.inference_mode(), or train with attn_implementation="sdpa".'
        )
    if not (q.is_cuda or q.device.type == "cpu"):
        checks.device(q)
    autocast = torch.is_autocast_enabled(q.device.type)
    dtype = torch.get_autocast_dtype(q.device.type) if autocast else v.dtype
    if not (q.dtype == k.dtype == v.dtype == dtype):
        checks.dtypes(q, k, v)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    mask: Tensor | None,
    key_intervals: Tensor | None,
    *,
    tf32: bool,
    entries: int | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[AttentionProblem, Geometry]:
    """Checks every argument and puts the call into numbers. ``entries``: sequences of a packed call, else None."""
    checks.tensors(q, k, v)
    batch = checks.batch(q, k, v)
    seqlen_q, num_heads, head_dim = q.shape[1:]
    seqlen_k, num_heads_k, head_dim_v = v.shape[1:]
    window = checks.window(causal, window_size, seqlen_q + seqlen_k)
    checks.numbers(softmax_scale, softcap)
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    mask_strides = checks.mask_strides(mask, (batch, num_heads, seqlen_q, seqlen_k), q.device)
    interval_strides = checks.interval_strides(key_intervals, (batch, num_heads, seqlen_q), q.device)
    geometry = Geometry(
        batch=batch if entries is None else entries,
        num_heads=num_heads,
        num_heads_k=num_heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q_strides=_strides(q, batch),
        k_strides=_strides(k, batch),
        v_strides=_strides(v, batch),
        out_strides=(seqlen_q * num_heads * head_dim_v, num_heads * head_dim_v, head_dim_v),
        lse_strides=(num_heads * seqlen_q, seqlen_q),
        mask_strides=mask_strides,
        interval_strides=interval_strides,
        window=window,
        softmax_scale=scale,
        softcap=float(softcap),
    )
    problem = AttentionProblem(
        dtype=_DTYPES[q.dtype],  # type: ignore[arg-type]
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q if max_seqlen_q is None else max_seqlen_q,
        vector=_vector(q, k, v),
        intervals=key_intervals is not None,
        mask=mask is not None,
        softcap=softcap > 0,
        positive_scale=softcap > 0 or float(torch.tensor(scale, dtype=torch.float32)) > 0,
        varlen=entries is not None,
        tf32=tf32 and q.dtype == torch.float32,
    )
    return problem, geometry


def _strides(x: Tensor, batch: int) -> tuple[int, int, int]:
    """(batch, row, head) of a (batch or 1, seqlen, heads, head_dim) tensor; a broadcast batch has stride 0."""
    stride = x.stride()
    return (0 if x.shape[0] != batch or batch == 1 else stride[0], stride[1], stride[2])


def _vector(*tensors: Tensor) -> bool:
    """Whether every row of the tensors (and of out, which follows v) starts on 16 bytes and is whole 16-byte chunks."""
    for x in tensors:
        size = x.element_size()
        sizes = [x.shape[-1], *(s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)]
        if x.data_ptr() % 16 or any(number * size % 16 for number in sizes):
            return False
    return True


def _empty(q: Tensor, out_shape: tuple[int, ...], lse_shape: tuple[int, ...] | None) -> Any:
    """What a call without rows or without keys gives."""
    out = torch.zeros(out_shape, dtype=q.dtype, device=q.device)
    if lse_shape is None:
        return out
    return out, torch.full(lse_shape, -math.inf, dtype=torch.float32, device=q.device)


def _layout(x: Tensor) -> tuple[object, ...]:
    return (x.shape, x.stride(), x.dtype, x.device)


def uses_tf32(q: Tensor) -> bool:
    """Whether torch itself would use TF32 for a product with ``q``."""
    return q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _reference(
    function: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    return_lse: bool,
    reason: str,
) -> Any:
    _warn_reference(reason)
    out, lse = function(*tensors, **options, compute_dtype=torch.float32)
    out = out.to(tensors[0].dtype).contiguous()
    return (out, lse) if return_lse else out


@cache
def _warn_reference(reason: str) -> None:
    warnings.warn(f"hf_flash_cupy runs plain PyTorch operations on the CPU, not its kernels. {reason}", stacklevel=4)
