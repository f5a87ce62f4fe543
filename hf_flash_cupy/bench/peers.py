"""The implementations that race. Each takes q, k, v (batch, seqlen, heads, head_dim) and returns out alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.functional import flash_attention, flash_attention_varlen

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
CUBLAS = "cublas"  # the product of two 8192 × 8192 matrices, beside the others in every race
CUBLAS_SIZE = 8192


class Unavailable(Exception):
    """This implementation cannot take part; the message says why."""


def _ours(shape: Shape, device: str, algorithm: str) -> Attend:
    options: dict[str, Any] = {"causal": shape.causal, "window_size": (shape.window, -1), "algorithm": algorithm}
    if shape.packed:
        sides = packing(shape, device)
        return lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], *sides, **options)[None]
    return lambda q, k, v: flash_attention(q, k, v, **options)


def packing(shape: Shape, device: str) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of rows and of keys, both (sequences + 1,) int32, and the longest sequence of each."""
    offsets = torch.tensor([0, *accumulate(shape.packed)], dtype=torch.int32, device=device)
    return offsets, offsets, max(shape.packed), max(shape.packed)


def _eager(shape: Shape, device: str) -> Attend:
    """Standard attention (Dao 2022, Algorithm 0) in plain PyTorch operations: every score is written to memory."""
    group = shape.heads // shape.heads_k
    scale = shape.head_dim**-0.5
    hidden = None
    if (seen := dense_mask(shape, device)) is not None:
        hidden = ~seen
    elif shape.causal:
        hidden = torch.ones(shape.seqlen, shape.seqlen, dtype=torch.bool, device=device).triu_(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q * scale) @ k.mT  # (batch, heads, seqlen, seqlen); scaling q saves a pass over them
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        out: Tensor = scores.softmax(dim=-1) @ v
        return out.transpose(1, 2)

    return attend


def dense_mask(shape: Shape, device: torch.device | str) -> Tensor | None:
    """(seqlen, seqlen) bool, True = attends; None for a shape with neither a window nor packed sequences."""
    if shape.window < 0 and not shape.packed:
        return None
    mask = torch.ones(shape.seqlen, shape.seqlen, dtype=torch.bool, device=device)
    if shape.causal:
        mask.tril_()
    if shape.window >= 0:
        mask.triu_(-shape.window)
    if shape.packed:
        numbers = torch.arange(len(shape.packed), device=device)
        sequence = numbers.repeat_interleave(torch.tensor(shape.packed, device=device))  # (seqlen,)
        mask &= sequence[:, None] == sequence
    return mask


def torch_attention(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA, by the backend it chooses itself unless one is set."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = shape.heads != shape.heads_k
    mask = dense_mask(shape, q.device)
    causal = shape.causal and mask is None
    out: Tensor = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _sdpa(shape: Shape, device: str, backend: SDPBackend) -> Attend:
    if shape.window >= 0:
        raise Unavailable("torch's SDPA has no window")
    if shape.packed:
        return _packed_flash(shape, device, backend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch_attention(shape, q, k, v)

    return attend


def _packed_flash(shape: Shape, device: str, backend: SDPBackend) -> Attend:
    """The kernel behind torch's flash backend takes packed sequences, though SDPA itself has no argument for them."""
    if backend is not SDPBackend.FLASH_ATTENTION:
        raise Unavailable("this backend of torch's SDPA has no packed sequences")
    sides = packing(shape, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(q[0], k[0], v[0], *sides, 0.0, shape.causal, False)[0]
        return out[None]

    return attend


def _flex(shape: Shape, device: str) -> Attend:
    if shape.window >= 0 or shape.packed:
        raise Unavailable("rows with a window or packed sequences are raced without FlexAttention")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # each shape compiles its own kernel; torch would stop after eight
    compiled = torch.compile(flex_attention, dynamic=False)
    size = shape.seqlen
    mask = create_block_mask(_not_later, None, None, size, size, device=device) if shape.causal else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Any = compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.heads_k)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return attend


def _not_later(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return row >= key


def _package(shape: Shape, device: str, module: str, distribution: str) -> Attend:
    """``flash_attn_func`` or ``flash_attn_varlen_func`` of another package: flash-attn 2, FA3, FA4."""
    try:
        package = import_module(module)
        function = package.flash_attn_varlen_func if shape.packed else package.flash_attn_func
    except (ImportError, AttributeError, OSError) as error:
        raise Unavailable(f"{distribution} is not installed ({error})") from error

    options: dict[str, Any] = {"causal": shape.causal}
    if shape.window >= 0:
        options["window_size"] = (shape.window, 0)
    if shape.packed:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= zip(names, packing(shape, device), strict=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shape.packed:
            q, k, v = q[0], k[0], v[0]
        out = function(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
        return out[None] if shape.packed else out  # type: ignore[no-any-return]

    return attend


# Those that keep every score come last: their graphs then weigh on nobody else.
IMPLEMENTATIONS: dict[str, Callable[[Shape, str], Attend]] = {
    "cupy_fa1": partial(_ours, algorithm="fa1"),
    "cupy_fa2": partial(_ours, algorithm="fa2"),
    "flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "flash_attn": partial(_package, module="flash_attn", distribution="flash-attn"),
    "fa3": partial(_package, module="fa3_fwd_interface", distribution="fa3-fwd"),
    "fa4": partial(_package, module="flash_attn.cute", distribution="flash-attn-4"),
    "eager": _eager,
    "math": partial(_sdpa, backend=SDPBackend.MATH),
}
LABELS = {
    "flash": "SDPA flash",
    "cudnn": "SDPA cuDNN",
    "efficient": "SDPA efficient",
    "math": "SDPA math",
    "flex": "FlexAttention",
    "flash_attn": "flash-attn",
    "fa3": "FA3",
    "fa4": "FA4",
    CUBLAS: "cuBLAS 8192³",
}
FORWARD_ONLY = {"fa3": "fa3-fwd has no backward"}


def label(name: str) -> str:
    """``name`` as tables show it."""
    return LABELS.get(name, name)


def make(name: str, shape: Shape, direction: str, device: str) -> Attend:
    """The implementation ``name`` for ``shape``. Raises :class:`Unavailable` with the reason."""
    if direction != "forward" and name in FORWARD_ONLY:
        raise Unavailable(FORWARD_ONLY[name])
    return IMPLEMENTATIONS[name](shape, device)
