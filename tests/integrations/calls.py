"""Calls of the attention function as a layer makes them, compared with float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_flash_cupy.integrations.transformers import attention_forward
from hf_flash_cupy.reference import attention_reference

CAUSAL = SimpleNamespace(training=False, is_causal=True, layer_idx=0)
ENCODER = SimpleNamespace(training=False, is_causal=False, layer_idx=0)
SILENT = SimpleNamespace(training=False)


def qkv(
    batch: int = 2,
    heads: int = 4,
    heads_k: int = 2,
    rows: int = 9,
    keys: int = 9,
    dim: int = 16,
    dim_v: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, rows, dim), (batch, heads_k, keys, dim), (batch, heads_k, keys, dim_v)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None = None,
    module: Any = CAUSAL,
    expected: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compares with the float64 reference called with ``expected``: at most twice as far off as float32's."""
    out, weights = attention_forward(module, *tensors, mask, **{"scaling": None, **kwargs})
    transposed = [x.transpose(1, 2) for x in tensors]
    truth, _ = attention_reference(*transposed, **(expected or {}))
    plain, _ = attention_reference(*transposed, **(expected or {}), compute_dtype=torch.float32)
    assert weights is None
    assert out.is_contiguous()
    assert out.shape == truth.shape
    floor = 4 * torch.finfo(out.dtype).eps * float(truth.abs().max())
    tolerance = 2 * float((plain.to(out.dtype) - truth).abs().max()) + floor
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=tolerance)
    return out
