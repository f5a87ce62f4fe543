"""Attention by torch's operators: what a Transformers model on a CPU runs unless asked for the kernels."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from hf_flash_cupy.integrations.key_intervals import KeyIntervals
from hf_flash_cupy.integrations.request import AttentionRequest, within_sequences
from hf_flash_cupy.reference import attention_reference


def attend(request: AttentionRequest) -> tuple[Tensor, str]:
    """``out`` (batch, seqlen_q, num_heads, head_dim_v), contiguous, and the name of what computed it."""
    request = within_sequences(request)
    if request.softcap or request.sinks is not None:
        return _reference(request), "reference"
    q, k, v = request.q, request.k, request.v
    square_causal = request.window == (-1, 0) and q.shape[2] == k.shape[2]  # SDPA aligns at the top left
    unmasked = request.mask is None and request.intervals is None and request.bias is None
    by_flag = unmasked and square_causal
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if by_flag else _mask(request),
        dropout_p=request.dropout_p,
        is_causal=by_flag,
        scale=request.softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).contiguous(), "sdpa"


def _mask(request: AttentionRequest) -> Tensor | None:
    """Everything that hides keys, and the bias, as the one mask that SDPA takes."""
    masks = [] if request.mask is None else [request.mask]
    if request.intervals is not None:
        masks.append(request.intervals.dense())
    left, right = (size if size >= 0 else None for size in request.window)
    if left is not None or right is not None:
        q, k = request.q, request.k
        shift = k.shape[2] - q.shape[2]
        window = KeyIntervals(1, q.shape[2], k.shape[2], q.device, shift=shift, left=left, right=right)
        masks.append(window.dense())
    mask = reduce(torch.logical_and, masks) if masks else None
    if request.bias is None:
        return mask
    bias = request.bias.to(request.q.dtype)
    return bias if mask is None else bias.masked_fill(~mask, float("-inf"))


def _reference(request: AttentionRequest) -> Tensor:
    keep = None
    if request.dropout_p:
        q, k = request.q, request.k
        shape = (max(q.shape[0], k.shape[0]), *q.shape[1:3], k.shape[2])
        keep = torch.rand(shape, device=q.device) >= request.dropout_p
    q, k, v = (x.transpose(1, 2) for x in (request.q, request.k, request.v))
    out, _ = attention_reference(
        q,
        k,
        v,
        causal=request.causal,
        window_size=request.window_size,
        softmax_scale=request.softmax_scale,
        softcap=request.softcap,
        sinks=request.sinks,
        bias=request.bias,
        mask=request.mask,
        dropout_p=request.dropout_p,
        keep=keep,
        key_intervals=None if request.intervals is None else request.intervals.intervals,
        compute_dtype=torch.float32,
    )
    return out.to(v.dtype).contiguous()


def attend_with_probabilities(request: AttentionRequest) -> tuple[Tensor, Tensor]:
    """``out`` (batch, seqlen_q, num_heads, head_dim_v) and the probabilities (batch, num_heads, seqlen_q, seqlen_k).

    As eager attention of Transformers' models: softmax in float32, probabilities in the inputs' dtype and after
    dropout, sinks in the denominator alone. Rows that see no key: zeros, where eager has a uniform row.
    """
    request = within_sequences(request)
    q, k, v = request.q, request.k, request.v
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if request.softmax_scale is None else request.softmax_scale
    scores = (q @ k.transpose(2, 3)).float() * scale  # (batch, num_heads, seqlen_q, seqlen_k)
    if request.softcap:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    mask = _mask(request)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    maximum = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # no inf − inf
    if request.sinks is not None:
        sinks = request.sinks.float()[:, None, None]
        maximum = torch.maximum(maximum, sinks)
    weights = torch.exp(scores - maximum.detach())
    denominator = weights.sum(-1, keepdim=True)
    if request.sinks is not None:
        denominator = denominator + torch.exp(sinks - maximum.detach())
    weights = (weights / denominator.clamp(min=torch.finfo(torch.float32).tiny)).to(v.dtype)
    weights = drop(weights, request.dropout_p, training=request.dropout_p > 0)
    return (weights @ v).transpose(1, 2).contiguous(), weights
