"""Calls of few rows that differ from an earlier one in the number of keys only, as each step of decoding does.

Their kernel is known and their checks are made; what changes is written into a copy of the kernel's struct.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from . import checks, decode, plans
from .call import Call, Strides, is_vector
from .plans import Content, Geometry
from .problem import AttentionProblem, KernelConfig

_EXTRAS = {"mask", "key_intervals", "alibi_slopes", "sinks"}  # mask: along its last dimension only
_LONGEST = 2**30  # beyond, checks decide


class Family(NamedTuple):
    """What calls of one :func:`family_key` have in common, as the first of them had it."""

    problem: AttentionProblem
    geometry: Geometry
    config: KernelConfig
    content: Content


def family_key(call: Call) -> Hashable:
    """Equal for calls whose keys and values differ in length and strides only; None where more may differ."""
    q, k, v, extras, options = call
    if q.dim() != 4 or not _EXTRAS.issuperset(extras):
        return None
    others = tuple(
        (name, x.shape[:-1] if name == "mask" else (x.shape, x.stride()), x.dtype, x.device)
        for name, x in extras.items()
    )
    return (
        *(q.shape, q.stride(), _without_length(call, k), _without_length(call, v)),
        *(q.dtype, q.device, k.device, v.device, options, others),
    )


def _without_length(call: Call, x: Tensor) -> tuple[int, int, int]:
    batch, seqlen, heads, head_dim = x.shape
    return (batch, seqlen if call.options.heads_first else heads, head_dim)


def grown(family: Family, call: Call) -> Content | None:
    """The struct for a call of the family; None where the family's kernel does not serve it or checks are needed."""
    q, k, v, extras, options = call
    problem, geometry, config, content = family
    row, head = (2, 1) if options.heads_first else (1, 2)
    seqlen_k = k.shape[row]
    serves = 0 < seqlen_k == v.shape[row] < _LONGEST
    serves &= (seqlen_k >= decode.MIN_KEYS) == (geometry.seqlen_k >= decode.MIN_KEYS)
    if not serves or is_vector(q, k, v) != problem.vector:
        return None
    raw, window = bytearray(content.raw), geometry.window
    plans.write_keys(raw, seqlen_k, _strides(k, row, head), _strides(v, row, head))
    if options.window_size != (-1, -1):
        window = checks.window(options.causal, options.window_size, geometry.seqlen_q + seqlen_k)
        plans.write_window(raw, window)
    if "mask" in extras:
        scores = (geometry.batch, geometry.num_heads, geometry.seqlen_q, seqlen_k)
        plans.write_mask(raw, checks.mask_strides(extras["mask"], scores, q.device))
    if config.kernel != decode.KERNEL:
        return Content(raw, content.blocks)
    return decode.regrown(config, content, raw, decode.reachable_keys(geometry.seqlen_q, seqlen_k, window), q.device)


def _strides(x: Tensor, row: int, head: int) -> Strides:
    strides = x.stride()
    return (strides[0] if x.shape[0] > 1 else 0, strides[row], strides[head])
