"""Strides, broadcasts, alignments (case S03): only values matter, and nothing is copied that need not be."""

from __future__ import annotations

from collections.abc import Callable

import attention_check as check
import numpy as np
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention

B, S, H, D = 2, 70, 4, 32


def bshd(x: Tensor) -> Tensor:
    return x


def bhsd_view(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    """A slice of (batch, seqlen, 3, heads, head_dim)."""
    return torch.stack([x + 1, x, x - 1], dim=2)[:, :, 1]


def fused_along_heads(x: Tensor) -> Tensor:
    return torch.cat([x + 1, x, x - 1], dim=2)[:, :, x.shape[2] : 2 * x.shape[2]]


def seqlen_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def wider_rows(x: Tensor) -> Tensor:
    """A slice of wider heads whose row stride is no whole number of 16-byte chunks."""
    return torch.cat([x, x[..., :3] + 1], dim=-1)[..., : x.shape[-1]]


def misaligned(x: Tensor) -> Tensor:
    """Contiguous, one element past an aligned address."""
    buffer = torch.cat([x.new_zeros(1), x.flatten()])
    return buffer[1:].view(x.shape)


def last_dim_strided(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def last_dim_far(x: Tensor) -> Tensor:
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    bshd, bhsd_view, fused, fused_along_heads, seqlen_first, wider_rows, misaligned, last_dim_strided,
    last_dim_far,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_tensor_in_a_layout(device: torch.device, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    tensors = check.qkv(B, S, S, H, D, num_heads_k=2, dtype=dtype, device=device)
    plain = flash_attention(*tensors, causal=True)
    views = [layout(x) for x in tensors]
    assert all(torch.equal(view, x) for view, x in zip(views, tensors, strict=True))
    check.check(*views, causal=True)
    assert check.identical(flash_attention(*views, causal=True), plain)


def test_mixed_layouts(device: torch.device) -> None:
    """Each tensor's strides are its own: k contiguous as BHSD, q and v as BSHD, and every other mixture."""
    tensors = check.qkv(B, S, S, H, D, dtype=torch.bfloat16, device=device)
    plain = flash_attention(*tensors)
    for q_layout in LAYOUTS:
        for k_layout in (bshd, bhsd_view, misaligned):
            for v_layout in (bshd, fused, wider_rows):
                views = (q_layout(tensors[0]), k_layout(tensors[1]), v_layout(tensors[2]))
                assert check.identical(flash_attention(*views), plain), (q_layout, k_layout, v_layout)


@pytest.mark.parametrize("one", ["q", "k", "v", "kv", "qkv"])
def test_batch_of_one_broadcasts(device: torch.device, one: str) -> None:
    tensors = check.qkv(3, S, S, 2, D, dtype=torch.float32, device=device)
    q, k, v = (x[:1] if name in one else x for name, x in zip("qkv", tensors, strict=True))
    check.check(q, k, v)
    expanded = [x[:1].expand(3, -1, -1, -1) if name in one else x for name, x in zip("qkv", tensors, strict=True)]
    check.check(*expanded)  # batch stride 0


def test_heads_and_rows_of_stride_zero(device: torch.device) -> None:
    q, k, v = check.qkv(2, S, S, 4, D, dtype=torch.float32, device=device)
    check.check(q, k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1))
    check.check(q[:, :1].expand(-1, S, -1, -1), k[:, :1].expand(-1, S, -1, -1), v)


def test_last_dimension_of_stride_zero_is_copied(device: torch.device) -> None:
    q, k, v = check.qkv(1, S, S, 2, D, dtype=torch.float32, device=device)
    check.check(q[..., :1].expand(-1, -1, -1, D), k, v[..., :1].expand(-1, -1, -1, D))


def spread(x: Tensor, dim: int, stride: int) -> Tensor:
    """``x`` with ``stride`` elements between the entries of ``dim``, in memory that is hardly touched."""
    size = stride * (x.shape[dim] - 1) + x.numel()
    if x.is_cuda:
        if torch.cuda.mem_get_info()[0] < size * x.element_size() + (1 << 30):
            pytest.skip("not enough device memory for strides beyond 32 bits")
        buffer = torch.empty(size * x.element_size(), dtype=torch.uint8, device=x.device).view(x.dtype)
    else:
        # numpy asks the system for pages that come into being when they are written to
        buffer = torch.from_numpy(np.empty(size * x.element_size(), np.uint8)).view(x.dtype)
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    view = buffer.as_strided(x.shape, strides)
    view.copy_(x)
    return view


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "rows", "heads"])
def test_strides_beyond_32_bits(device: torch.device, dim: int) -> None:
    tensors = check.qkv(2, 2, 2, 2, D, dtype=torch.bfloat16, device=device)
    plain = flash_attention(*tensors)
    far = (1 << 31) + 8
    for index in range(3):
        views = [spread(x, dim, far) if i == index else x for i, x in enumerate(tensors)]
        assert check.identical(flash_attention(*views), plain)


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch", "heads", "rows", "keys"])
def test_mask_strides_beyond_32_bits(device: torch.device, dim: int) -> None:
    q, k, v = check.qkv(2, 2, 2, 2, D, dtype=torch.float32, device=device)
    mask = torch.tensor([[True, False], [False, True]], device=device).expand(2, 2, 2, 2).contiguous()
    mask[1, 0, 0, 0] = False
    plain = flash_attention(q, k, v, mask=mask)
    assert check.identical(flash_attention(q, k, v, mask=spread(mask, dim, (1 << 31) + 5)), plain)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_interval_strides_beyond_32_bits(device: torch.device, dim: int) -> None:
    q, k, v = check.qkv(2, 2, 2, 2, D, dtype=torch.float32, device=device)
    intervals = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32, device=device).expand(2, 2, 2, 2).contiguous()
    intervals[1, 1, 0, 1] = 2
    plain = flash_attention(q, k, v, key_intervals=intervals)
    assert check.identical(flash_attention(q, k, v, key_intervals=spread(intervals, dim, (1 << 31) + 2)), plain)
