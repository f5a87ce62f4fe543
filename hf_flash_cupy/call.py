"""One call of attention in numbers: what it asks for, its tensors beside q, k and v, and the plan key they make."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import checks
from .plans import Geometry
from .problem import AttentionProblem

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# The tensors of a call beside q, k and v, by their names in the parameter struct; only those that are given.
Extras = dict[str, Tensor]
Strides = tuple[int, int, int]  # (batch, row, head)


class Options(NamedTuple):
    """What a call asks for beside its tensors."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    algorithm: str = "fa2"
    tf32: bool = False
    max_seqlen_q: int = 0  # of a packed call: rows of the longest entry
    heads_first: bool = False  # q, k and v come as (batch, num_heads, seqlen, head_dim); out never does


class Call(NamedTuple):
    """A call whose tensors have the dtypes and last strides that kernels read."""

    q: Tensor  # (batch or 1, seqlen_q, num_heads, head_dim) unless heads_first; packed: (total_q, num_heads, head_dim)
    k: Tensor  # (batch or 1, seqlen_k, num_heads_k, head_dim)
    v: Tensor  # (batch or 1, seqlen_k, num_heads_k, head_dim_v)
    extras: Extras
    options: Options


def extras(
    q: Tensor,
    *,
    mask: Any = None,
    key_intervals: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
) -> Extras:
    """The given tensors in the dtypes that kernels read, and the dropout's random numbers. ``q`` is in its last dtype.

    Conversions are torch's, so that gradients find their way back through them.
    """
    given = {
        "mask": mask,
        "key_intervals": key_intervals,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    found = {name: x for name, x in given.items() if x is not None}
    checks.are_tensors(found)
    if not torch.compiler.is_compiling():
        found = {name: x.resolve_neg() for name, x in found.items()}
    if bias is not None:
        checks.floats("bias", bias)
        bias = found["bias"]
        converted = bias if bias.dtype == q.dtype else bias.float()
        found["bias"] = converted[(None,) * (4 - bias.dim())] if bias.dim() < 4 else converted
    if alibi_slopes is not None and alibi_slopes.dim() and alibi_slopes.stride(-1) != 1:
        found["alibi_slopes"] = found["alibi_slopes"].contiguous()
    if sinks is not None:
        checks.floats("sinks", sinks)
        found["sinks"] = found["sinks"].float().contiguous()
    checks.dropout(dropout_p)
    if dropout_p:
        found["philox"] = torch.randint(2**62, (2,), device=q.device)  # {seed, offset}
    return found


def seqlen_first(call: Call) -> Call:
    """The same call without ``heads_first``, whose views cost a decoding step as much as all the rest."""
    q, k, v, extras, options = call
    if not options.heads_first:
        return call
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Call(q, k, v, extras, options._replace(heads_first=False))


def plan_key(call: Call) -> Hashable:
    """Equal for calls that the same plan serves; whatever a check could refuse is part of it."""
    q, k, v, extras, options = call
    return (
        *(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(q.dtype, q.device, k.device, v.device),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        options,
        tuple((name, x.shape, x.stride(), x.dtype, x.device) for name, x in extras.items()) if extras else (),
    )


def describe(call: Call) -> tuple[AttentionProblem, Geometry]:
    """Checks every argument and puts the call into numbers."""
    q, k, v, extras, options = seqlen_first(call)
    varlen = "cu_seqlens_q" in extras
    if varlen:
        checks.varlen(q, extras["cu_seqlens_q"], extras["cu_seqlens_k"], options.max_seqlen_q)
        q, k, v = q[None], k[None], v[None]
    checks.tensors(q, k, v)
    checks.algorithm(options.algorithm)
    batch = checks.batch(q, k, v)
    entries = extras["cu_seqlens_q"].shape[0] - 1 if varlen else batch
    strides = (_strides(q, batch), _strides(k, batch), _strides(v, batch))
    geometry = geometry_of(q, v, v.shape[1], strides, extras, options, batch, entries)
    return problem_of(q, k, v, extras, options, geometry.softmax_scale), geometry


def geometry_of(
    q: Tensor,
    v: Tensor,
    seqlen_k: int,
    strides: tuple[Strides, Strides, Strides],
    extras: Extras,
    options: Options,
    batch: int,
    entries: int,
) -> Geometry:
    """The numbers of a call, once numbers and tensors beside q, k and v are checked. ``strides``: of q, k and v."""
    seqlen_q, num_heads, head_dim = q.shape[1:]
    num_heads_k, head_dim_v = v.shape[2:]
    checks.numbers(options.softmax_scale, options.softcap)
    scores = (batch, num_heads, seqlen_q, seqlen_k)
    checks.sinks(extras.get("sinks"), num_heads, q.device)
    return Geometry(
        *(entries, num_heads, num_heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v),
        *strides,
        out_strides=(seqlen_q * num_heads * head_dim_v, num_heads * head_dim_v, head_dim_v),
        lse_strides=(num_heads * seqlen_q, seqlen_q),
        mask_strides=checks.mask_strides(extras.get("mask"), scores, q.device),
        interval_strides=checks.interval_strides(extras.get("key_intervals"), scores[:3], q.device),
        window=checks.window(options.causal, options.window_size, seqlen_q + seqlen_k),
        softmax_scale=head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale),
        softcap=float(options.softcap),
        bias_strides=checks.bias_strides(extras.get("bias"), scores, q.device),
        bias_shape=tuple(extras["bias"].shape) if "bias" in extras else (0, 0, 0, 0),  # type: ignore[arg-type]
        alibi_batch_stride=checks.alibi_batch_stride(extras.get("alibi_slopes"), entries, num_heads, q.device),
        dropout_p=float(options.dropout_p),
    )


def problem_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, scale: float) -> AttentionProblem:
    """What of a checked call decides which kernel runs; q, k and v have four dimensions."""
    bias = extras.get("bias")
    varlen = "cu_seqlens_q" in extras
    return AttentionProblem(
        dtype=_DTYPES[q.dtype],  # type: ignore[arg-type]
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        seqlen_q=max(int(options.max_seqlen_q), 1) if varlen else q.shape[1],
        vector=is_vector(q, k, v),
        intervals="key_intervals" in extras,
        mask="mask" in extras,
        softcap=options.softcap > 0,
        positive_scale=options.softcap > 0 or bool(np.float32(scale) > 0),
        varlen=varlen,
        tf32=options.tf32 and q.dtype == torch.float32,
        alibi="alibi_slopes" in extras,
        bias="none" if bias is None else "element" if bias.dtype == q.dtype else "fp32",
        dropout=options.dropout_p > 0,
        algorithm=options.algorithm,  # type: ignore[arg-type]
    )


def uses_tf32(q: Tensor) -> bool:
    """Whether torch itself would use TF32 for a product with ``q``."""
    return q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _strides(x: Tensor, batch: int) -> Strides:
    """Of a (batch or 1, seqlen, heads, head_dim) tensor; a broadcast batch has stride 0."""
    stride = x.stride()
    return (0 if x.shape[0] != batch or batch == 1 else stride[0], stride[1], stride[2])


def is_vector(*tensors: Tensor) -> bool:
    """Whether every row of the tensors (and of out, which follows v) starts on 16 bytes and is whole 16-byte chunks."""
    bits = 0
    for x in tensors:
        numbers = x.shape[-1]
        for stride, count in zip(x.stride()[:-1], x.shape, strict=False):
            if count > 1:
                numbers |= stride
        bits |= x.data_ptr() | numbers * x.element_size()
    return bits % 16 == 0
