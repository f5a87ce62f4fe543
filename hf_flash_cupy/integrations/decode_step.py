"""A step of decoding by the shortest road: one row, whose like has gone the long road before.

Between two layers the CPU's caches see so much else that what a call costs in a loop it costs several times over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy import env, ops
from hf_flash_cupy.call import Call, Options
from hf_flash_cupy.integrations.key_intervals import IntervalMask
from hf_flash_cupy.integrations.recording import is_recording

# Every keyword that the long road looks at.
KEYWORDS = frozenset(
    {"output_attentions", "s_aux", "sinks", "position_bias", "indices", "block_indices", "block_table", "read_index"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)


def step(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    is_causal: bool | None,
    algorithm: str,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output, as the long road would give it; None where that has to be taken. Arguments: as those of a layer."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_recording() or q.ndim != 4 or q.shape[2] != 1:
        return None
    if not KEYWORDS.isdisjoint(kwargs) or (dropout and module.training):
        return None
    if mask is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        left = right = sliding_window - 1 if sliding_window else -1
    else:
        described = mask.described if type(mask) is IntervalMask else None
        window = None if described is None or described.key_mask is not None else described.window_size
        if described is None or window is None or described.seqlen_q != 1 or described.seqlen_k != k.shape[2]:
            return None
        left, right = window
        causal = right == 0
    if not _as_kernels_read_them(q, k, v):
        return None
    scale = None if scaling is None else float(scaling)
    options = Options(
        *(causal, (left, -1 if causal else right), scale, float(softcap or 0.0), 0.0, algorithm), heads_first=True
    )
    return ops.known_attention(Call(q, k, v, {}, options))


def _as_kernels_read_them(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing would be converted, and kernels run. (Strides are part of what a known call is known by.)"""
    if not q.dtype == k.dtype == v.dtype or q.is_neg() or k.is_neg() or v.is_neg():
        return False
    if q.is_cuda:
        return q.dtype != torch.float32 and not torch.is_autocast_enabled("cuda")  # float32: TF32 may be on or off
    return not torch.is_autocast_enabled("cpu") and env.cpu_mode() == "kernels"
