"""A module ``flash_attn`` whose functions are this package's, and the helpers that flash-attn's tests import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy import flash_attn_interface


def unpad_input(
    x: Tensor, mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of x (batch, seqlen, …) where mask (batch, seqlen), bool, or unused_mask, is True, packed.

    Returns them, their places in the flattened x, the offsets of the entries (batch + 1,), int32, the longest entry,
    and how many rows of each ``mask`` itself names.
    """
    kept = mask if unused_mask is None else mask | unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), mask.sum(-1, dtype=torch.int32)


def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`, 0 elsewhere: (batch, seqlen, …)."""
    out = x.new_zeros(batch * seqlen, *x.shape[1:]).index_put((indices,), x)
    return out.unflatten(0, (batch, seqlen))


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    **_: Any,
) -> Tensor:
    """Rotary embedding of the first dimensions of x (batch, seqlen, heads, head_dim); cos, sin (positions, half)."""
    half = cos.shape[-1]
    positions = torch.arange(x.shape[1], device=x.device) + torch.as_tensor(seqlen_offsets, device=x.device).view(-1, 1)
    cos, sin = (table[positions].float().unsqueeze(-2) for table in (cos, sin))  # (batch or 1, seqlen, 1, half)
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def block_size(*_: Any) -> int:
    """Keys whose probabilities S_dmask relates to one maximum: all of a row."""
    return 1 << 30


def install() -> None:
    """Makes ``import flash_attn`` find this, and ``import einops`` a stand-in where there is none."""
    names = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}
    _module("flash_attn", **names)
    _module("flash_attn.flash_attn_interface", **names, _get_block_size_n=block_size, USE_TRITON_ROCM=False)
    _module("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input)
    _module("flash_attn.layers")
    _module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    if importlib.util.find_spec("einops") is None:
        path = Path(__file__).with_name("einops_stand_in.py")
        spec = importlib.util.spec_from_file_location("einops", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["einops"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _module(name: str, **members: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []  # a package: it may have submodules
    vars(module).update(members)
