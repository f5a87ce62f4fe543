"""What one attention layer asks for, in this package's words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals

WAY_OUT = 'Load this model with attn_implementation="sdpa", or "eager" where it has no sdpa.'

# Keywords of model files that change the result and that nothing here serves: never to be ignored.
_UNSERVED = {
    "indices": "attention to selected keys (DeepSeek sparse attention)",
    "block_indices": "attention to selected blocks of keys",
    "block_table": "a paged key-value cache",
    "read_index": "a paged key-value cache",
}


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences packed end to end into the one row of a batch of 1."""

    cu_seqlens_q: Tensor  # int32 (sequences + 1,): where each begins and the last ends
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """One call of an attention function; everything that hides keys combines by intersection."""

    q: Tensor  # (batch or 1, num_heads, seqlen_q, head_dim): learned queries come with batch 1
    k: Tensor  # (batch, num_heads_k, seqlen_k, head_dim)
    v: Tensor  # (batch, num_heads_k, seqlen_k, head_dim_v)
    softmax_scale: float | None  # None: head_dim ** -0.5
    softcap: float  # 0: off
    bias: Tensor | None  # additive, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
    sinks: Tensor | None  # (num_heads,)
    dropout_p: float
    causal: bool = False  # aligned at the bottom right: the rows are the newest
    window_size: tuple[int, int] = (-1, -1)  # aligned likewise
    mask: Tensor | None = None  # bool, True = attend, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
    intervals: KeyIntervals | None = None
    sequences: Sequences | None = None

    @property
    def window(self) -> tuple[int, int]:
        """``window_size`` with causality in it."""
        left, right = self.window_size
        return left, 0 if self.causal else right


def build_request(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> AttentionRequest:
    """Transformers' arguments as one request; ``UnsupportedProblem`` rather than one that matters dropped."""
    for name, meaning in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedProblem(f"{name}: {meaning} is not supported. {WAY_OUT}")
    q, k, v = _in_one_dtype(q, k, v)
    sinks = kwargs.get("s_aux")
    request = AttentionRequest(
        q=q,
        k=k,
        v=v,
        softmax_scale=None if scaling is None else float(scaling),
        softcap=float(softcap or 0.0),
        bias=kwargs.get("position_bias"),
        sinks=kwargs.get("sinks") if sinks is None else sinks,
        dropout_p=float(dropout) if module.training else 0.0,
    )
    if attention_mask is None or attention_mask.ndim == 2:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        request = _without_mask(request, attention_mask, sliding_window, bool(causal))
    else:
        request = _with_mask(request, attention_mask)
    return _with_sequences(request, kwargs)


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast's dtype where it is on, else v's: rotary embeddings and norms leave q and k in float32."""
    device_type = v.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else v.dtype
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _without_mask(
    request: AttentionRequest, padding: Tensor | None, sliding_window: int | None, causal: bool
) -> AttentionRequest:
    """No mask, or nothing but key padding (batch, seqlen_k): causality and window are the caller's word."""
    width = sliding_window - 1 if sliding_window else -1
    mask = None if padding is None else padding.bool()[:, None, None, : request.k.shape[2]]
    return replace(request, causal=causal, window_size=(width, -1 if causal else width), mask=mask)


def _with_mask(request: AttentionRequest, mask: Tensor) -> AttentionRequest:
    """A four-dimensional mask is the whole truth, causality and window included.

    It may be longer than the keys, and the keys (unfilled slots of a static cache) longer than it.
    """
    if mask.ndim != 4:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: two or four dimensions are supported.")
    seqlen_k = request.k.shape[2]
    if 1 < mask.shape[3] < seqlen_k:
        seqlen_k = mask.shape[3]
        request = replace(request, k=request.k[:, :, :seqlen_k], v=request.v[:, :, :seqlen_k])
        if request.bias is not None:
            request = replace(request, bias=request.bias[..., :seqlen_k])
    described = mask.described if isinstance(mask, IntervalMask) else None
    if described is not None:
        return _with_intervals(request, described)
    dense = mask.dense() if isinstance(mask, IntervalMask) else mask
    return _with_dense(request, dense[..., :seqlen_k])


def _with_intervals(request: AttentionRequest, described: KeyIntervals) -> AttentionRequest:
    seqlen_q, seqlen_k = request.q.shape[2], request.k.shape[2]
    if described.seqlen_q != seqlen_q:
        raise ValueError(f"attention_mask has {described.seqlen_q} rows, query {seqlen_q}.")
    if described.seqlen_k > seqlen_k:
        described = described.take_keys(0, seqlen_k)
    mask = None if described.key_mask is None else described.key_mask[:, None, None, :]
    window = described.window_size
    if window is None:
        return replace(request, mask=mask, intervals=described)
    left, right = window
    return replace(request, mask=mask, causal=right == 0, window_size=(left, -1 if right == 0 else right))


def _with_dense(request: AttentionRequest, mask: Tensor) -> AttentionRequest:
    if mask.dtype == torch.bool:
        return replace(request, mask=mask)
    if not mask.is_floating_point():
        raise ValueError(f"attention_mask of dtype {mask.dtype}: bool or a float dtype is supported.")
    hidden = mask <= torch.finfo(mask.dtype).min
    # One bool is read back from the device here, in every layer; bool masks and intervals need no such look.
    if not mask.requires_grad and bool((hidden | (mask == 0)).all()):
        return replace(request, mask=~hidden)
    bias = mask.masked_fill(hidden, -torch.inf)  # the least number a dtype has hides keys: a row of it sees none
    return replace(request, bias=bias if request.bias is None else request.bias + bias)


def _with_sequences(request: AttentionRequest, kwargs: dict[str, Any]) -> AttentionRequest:
    cu_seqlens_q, cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seqlens_q is None:
        return request
    if request.q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs all sequences in one row, not a batch of {request.q.shape[0]}.")
    sequences = Sequences(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q=int(kwargs.get("max_length_q") or request.q.shape[2]),
        max_seqlen_k=int(kwargs.get("max_length_k") or request.k.shape[2]),
    )
    return replace(request, sequences=sequences)


def within_sequences(request: AttentionRequest) -> AttentionRequest:
    """The sequences as key intervals, which combine with a mask: a row keeps to its own sequence's keys.

    Causality and window, aligned at each sequence's own end, go into the intervals. Rows beyond the last
    sequence see nothing.
    """
    if request.sequences is None:
        return request
    q, k = request.q, request.k
    cu_q, cu_k = request.sequences.cu_seqlens_q, request.sequences.cu_seqlens_k
    row = torch.arange(q.shape[2], device=q.device)
    end = 1 + torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
    beyond, end = end == cu_q.shape[0], end.clamp(max=cu_q.shape[0] - 1)
    lo, hi = cu_k[end - 1].long(), cu_k[end].long()
    aligned = row - cu_q[end] + cu_k[end]  # the key position of every row
    left, right = request.window
    if left >= 0:
        lo = torch.maximum(lo, aligned - left)
    if right >= 0:
        hi = torch.minimum(hi, aligned + (right + 1))
    hi = torch.where(beyond, lo, hi)
    whole = request.intervals or KeyIntervals(1, q.shape[2], k.shape[2], q.device)
    intervals = whole.within(lo[None], hi[None])
    return replace(request, causal=False, window_size=(-1, -1), intervals=intervals, sequences=None)
