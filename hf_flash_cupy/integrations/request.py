"""What one attention layer asks for, in this package's words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy import sm90, sm90_backward
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.integrations.key_intervals import IntervalMask, KeyIntervals
from hf_flash_cupy.integrations.selected_keys import selected_keys

WAY_OUT = 'Load this model with attn_implementation="sdpa", or "eager" where it has no sdpa.'

# Keywords of model files that change the result and that nothing here serves: never to be ignored.
_UNSERVED = {
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


@dataclass(slots=True)  # not frozen, and filled in place: a frozen one takes longer to make than a decode step has
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
    def has_extras(self) -> bool:
        """Whether there is anything beside q, k, v and numbers."""
        hides = self.mask is not None or self.intervals is not None or self.bias is not None
        return hides or self.sinks is not None or self.dropout_p != 0.0

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
        _without_mask(request, attention_mask, sliding_window, bool(causal))
    else:
        _with_mask(request, attention_mask)
    if "indices" in kwargs or "block_indices" in kwargs:
        selected = selected_keys(module, q, k, kwargs)
        if selected is not None:
            selected = selected[..., : request.k.shape[2]]
            request.mask = selected if request.mask is None else request.mask & selected
    if kwargs.get("cu_seq_lens_q") is not None:
        _with_sequences(request, kwargs)
    return request


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast's dtype where it is on, else v's: rotary embeddings and norms leave q and k in float32."""
    device_type = v.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else v.dtype
    if q.dtype == k.dtype == v.dtype == dtype:
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _without_mask(request: AttentionRequest, padding: Tensor | None, sliding_window: int | None, causal: bool) -> None:
    """No mask, or nothing but key padding (batch, seqlen_k): causality and window are the caller's word."""
    width = sliding_window - 1 if sliding_window else -1
    request.causal, request.window_size = causal, (width, -1 if causal else width)
    if padding is not None:
        request.mask = padding.bool()[:, None, None, : request.k.shape[2]]


def _with_mask(request: AttentionRequest, mask: Tensor) -> None:
    """A four-dimensional mask is the whole truth, causality and window included.

    It may be longer than the keys, and the keys (unfilled slots of a static cache) longer than it.
    """
    if mask.ndim != 4:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: two or four dimensions are supported.")
    seqlen_k = request.k.shape[2]
    if 1 < mask.shape[3] < seqlen_k:
        seqlen_k = mask.shape[3]
        request.k, request.v = request.k[:, :, :seqlen_k], request.v[:, :, :seqlen_k]
        if request.bias is not None:
            request.bias = request.bias[..., :seqlen_k]
    described = mask.described if isinstance(mask, IntervalMask) else None
    if described is not None:
        _with_intervals(request, described)
    else:
        dense = mask.dense() if isinstance(mask, IntervalMask) else mask
        _with_dense(request, dense[..., :seqlen_k])


def _with_intervals(request: AttentionRequest, described: KeyIntervals) -> None:
    seqlen_q, seqlen_k = request.q.shape[2], request.k.shape[2]
    if described.seqlen_q != seqlen_q:
        raise ValueError(f"attention_mask has {described.seqlen_q} rows, query {seqlen_q}.")
    if described.seqlen_k > seqlen_k:
        described = described.take_keys(0, seqlen_k)
    if described.key_mask is not None:
        request.mask = described.key_mask[:, None, None, :]
    if described.offsets is not None and not _hopper_goes_by_intervals(request):
        request.causal, request.window_size = True, (-1 if described.left is None else described.left, -1)
        longest = _longest(None, seqlen_q, described.offsets)
        request.sequences = Sequences(described.offsets, described.offsets, longest, longest)
        return
    window = described.window_size
    if window is None:
        request.intervals = described
        return
    left, right = window
    request.causal, request.window_size = right == 0, (left, -1 if right == 0 else right)


def _hopper_goes_by_intervals(request: AttentionRequest) -> bool:
    """Whether the backward pass skips as much by key intervals, and faster: compute capability 9.0's own does."""
    return (
        sm90.serves(request.q.device)
        and request.softcap == request.dropout_p == 0
        and request.mask is request.bias is None
        and sm90_backward.serves_tensors(request.q.dtype, request.q.shape[-1], request.v.shape[-1])
    )


def _with_dense(request: AttentionRequest, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        request.mask = mask
        return
    if not mask.is_floating_point():
        raise ValueError(f"attention_mask of dtype {mask.dtype}: bool or a float dtype is supported.")
    # The least number of a dtype hides a key, a bias added to it or not: a row of nothing else sees no key. Whether
    # the mask does anything but hide is not asked: the answer would have to be read back from the device.
    bias = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    request.bias = bias if request.bias is None else request.bias + bias


def _with_sequences(request: AttentionRequest, kwargs: dict[str, Any]) -> None:
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if request.q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs all sequences in one row, not a batch of {request.q.shape[0]}.")
    request.sequences = Sequences(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q=_longest(kwargs.get("max_length_q"), request.q.shape[2], cu_seqlens_q),
        max_seqlen_k=_longest(kwargs.get("max_length_k"), request.k.shape[2], cu_seqlens_q),
    )


def _longest(given: Any, total: int, cu_seqlens: Tensor) -> int:
    """``given`` if it is known without asking the device, else the mean: it chooses a tile, and nothing hangs on it."""
    if isinstance(given, int) and given > 0:
        return given
    return -(-total // max(cu_seqlens.shape[0] - 1, 1))


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
