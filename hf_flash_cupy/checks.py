"""Checks of the user's arguments: each error names the argument, what is supported, and what to do."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from .errors import UnsupportedProblem
from .problem import MAX_HEAD_DIM, Algorithm

_MAX_SEQLEN = 2**31 - 1 - 512  # positions are 32-bit in the kernels, and a block may reach beyond the end
ALGORITHMS = get_args(Algorithm)
_LARGEST_FLOAT32 = 3.4028234e38
_SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dropout(dropout_p: Any) -> None:
    if not isinstance(dropout_p, int | float) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: a probability in [0, 1) is needed.")


def algorithm(name: Any) -> None:
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r}: {' and '.join(map(repr, ALGORITHMS))} are supported.")


def dimensions(q: Any, k: Any, v: Any, count: int) -> None:
    """Raises unless q, k and v are tensors of ``count`` dimensions."""
    layout = "(batch, seqlen, heads, head_dim)" if count == 4 else "(total, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor like q is needed.")
        if x.dim() != count:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {layout} is needed.")


def device(q: Tensor) -> None:
    if q.device.type not in ("cuda", "cpu"):
        raise UnsupportedProblem(f"q is on {q.device}; CUDA GPUs and the CPU are supported.")


def dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _SUPPORTED_DTYPES:
            raise TypeError(f"{name} is {x.dtype}; float16, bfloat16 and float32 are supported. Convert with .to().")


def batch(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The batch size; 1 broadcasts."""
    sizes = {x.shape[0] for x in (q, k, v)} - {1}
    if len(sizes) > 1:
        raise ValueError(
            f"q, k, v have batch sizes {q.shape[0]}, {k.shape[0]}, {v.shape[0]}: they must be equal (1 broadcasts)."
        )
    return sizes.pop() if sizes else 1


def tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtypes, devices and sizes of q, k, v (batch, seqlen, heads, head_dim)."""
    dtypes(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move them to one device.")
        if x.shape[1] > _MAX_SEQLEN:
            raise UnsupportedProblem(f"{name} has {x.shape[1]} positions; at most {_MAX_SEQLEN} are supported.")
    device(q)
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}: both need the same seqlen and heads (dims 1 and 2)."
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]}, k {k.shape[3]}: they must be equal.")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError("head_dim is 0: every head needs at least one element.")
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] > MAX_HEAD_DIM:
            raise UnsupportedProblem(
                f"{name} has head_dim {x.shape[3]}; 1 to {MAX_HEAD_DIM} are supported. "
                'Use attn_implementation="sdpa" for this model.'
            )
    if (k.shape[2] == 0 and q.shape[2]) or (k.shape[2] and q.shape[2] % k.shape[2]):
        raise ValueError(f"q has {q.shape[2]} heads, k {k.shape[2]}: the first must be a multiple of the second.")


def pair(window_size: Any) -> tuple[int, int]:
    """``window_size`` as a tuple of two integers; 3.0 counts as 3, since a plan's key cannot tell them apart."""
    try:
        left, right = (int(size) if size == int(size) else operator.index(size) for size in window_size)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"window_size={window_size!r}: a pair (left, right) of integers is needed.") from None
    return left, right


def window(causal: bool, window_size: tuple[int, int], widest: int) -> tuple[int, int]:
    """(left, right) keys around the diagonal that a row sees, −1 = all. ``widest``: a size that covers everything."""
    left, right = pair(window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size={window_size!r}: sizes are −1 (unbounded), 0 or positive.")
    left, right = (-1 if size >= widest else size for size in (left, right))
    return left, 0 if causal else right


def numbers(softmax_scale: Any, softcap: Any) -> None:
    if softmax_scale is not None and not _is_float32(softmax_scale):
        raise ValueError(f"softmax_scale={softmax_scale!r}: None or a finite number (of float32) is needed.")
    if not _is_float32(softcap) or float(softcap) < 0:
        raise ValueError(f"softcap={softcap!r}: 0 (off) or a positive number is needed.")


def _is_float32(number: Any) -> bool:
    return isinstance(number, Real) and -_LARGEST_FLOAT32 <= number <= _LARGEST_FLOAT32  # type: ignore[operator]


def are_tensors(given: dict[str, Any]) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed.")


def floats(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        hint = " A bool mask goes to mask." if x.dtype == torch.bool and name == "bias" else ""
        raise TypeError(f"{name} is {x.dtype}; a float dtype is needed.{hint}")


def mask_strides(mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> tuple[int, int, int, int]:
    """Strides of ``mask`` broadcast to (batch, num_heads, seqlen_q, seqlen_k)."""
    if mask is None:
        return (0, 0, 0, 0)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}; bool is needed (True = attend). Additive masks go to bias.")
    batch, heads, rows, keys = _broadcast("mask", mask, shape, device).stride()
    return (batch, heads, rows, keys)


def interval_strides(
    key_intervals: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> tuple[int, int, int]:
    """Strides of ``key_intervals`` broadcast to (batch, num_heads, seqlen_q, 2)."""
    if key_intervals is None:
        return (0, 0, 0)
    if key_intervals.dtype != torch.int32:
        raise TypeError(f"key_intervals is {key_intervals.dtype}; int32 is needed.")
    if key_intervals.dim() == 0 or key_intervals.shape[-1] != 2:
        raise ValueError(f"key_intervals has shape {tuple(key_intervals.shape)}; (…, seqlen_q, 2) is needed.")
    if key_intervals.stride(-1) != 1:
        raise ValueError("key_intervals: lo and hi of a row must be neighbours in memory; call .contiguous().")
    batch, heads, rows, _ = _broadcast("key_intervals", key_intervals, (*shape, 2), device).stride()
    return (batch, heads, rows)


def bias_strides(bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> tuple[int, int, int, int]:
    """Strides of ``bias`` broadcast to (batch, num_heads, seqlen_q, seqlen_k)."""
    if bias is None:
        return (0, 0, 0, 0)
    batch, heads, rows, keys = _broadcast("bias", bias, shape, device).stride()
    return (batch, heads, rows, keys)


def alibi_batch_stride(slopes: Tensor | None, batch: int, num_heads: int, device: torch.device) -> int:
    """Stride of ``alibi_slopes`` (num_heads,) or (batch, num_heads) from one batch entry to the next."""
    if slopes is None:
        return 0
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes is {slopes.dtype}; float32 is needed. Convert with .float().")
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != num_heads:
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; ({num_heads},) or ({batch}, {num_heads}) is needed."
        )
    return _broadcast("alibi_slopes", slopes, (batch, num_heads), device).stride(0)


def sinks(logits: Tensor | None, num_heads: int, device: torch.device) -> None:
    if logits is None:
        return
    if logits.shape != (num_heads,):
        raise ValueError(f"sinks has shape {tuple(logits.shape)}; one logit a head, ({num_heads},), is needed.")
    _broadcast("sinks", logits, (num_heads,), device)


def varlen(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int) -> None:
    """Offsets of a packed call. Their values stay on the device: the kernel clamps them into the tensors."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            raise TypeError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}; an int32 tensor is needed.")
        if x.dim() != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch + 1,) is needed.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move them to one device.")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} offsets, cu_seqlens_k {cu_seqlens_k.shape[0]}: "
            "they must be equal."
        )
    if not isinstance(max_seqlen_q, int | torch.SymInt) or max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q={max_seqlen_q!r}: an integer, 0 or more, is needed.")


def _broadcast(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}: move them to one device.")
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, which does not broadcast to {shape}.") from None
