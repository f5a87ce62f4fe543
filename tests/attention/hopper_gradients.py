"""What the tests of the Hopper backward share, on its GPU and on the CPU: outputs are poisoned, and it is what ran."""

from __future__ import annotations

from typing import Any

import torch
from attention_check import qkv
from gradient_check import check_gradients, leaves
from torch import Tensor

from hf_flash_cupy import execute
from hf_flash_cupy.launch import record_launches

KERNELS = ["fa2_backward_sm90_prepare", "fa2_backward_sm90", "fa2_backward_sm90_finish"]
SHAPES = [  # batch, heads, key heads, rows, keys
    (1, 2, 2, 64, 64),
    (2, 4, 2, 200, 333),
    (1, 2, 1, 300, 130),  # causal: rows without keys
    (2, 3, 3, 257, 129),
]


class _Forgetting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        execute._local.__dict__.clear()
        return gradient


def forget_backward_plans(device: torch.device) -> None:
    """Those of the thread in which autograd runs the backward passes of ``device``."""
    _Forgetting.apply(torch.zeros(1, device=device, requires_grad=True)).backward()


def check_hopper_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """dq, dk and dv against float64, and which kernels computed them."""
    with record_launches() as records:
        worst = check_gradients(leaves(q, k, v), **options)
    assert [record.kernel for record in records[1:]] == KERNELS
    assert ("_deterministic" in records[2].config.name) == options.get("deterministic", False)
    assert worst <= 1


def check_hopper_shapes(
    shapes: list[tuple[int, int, int, int, int]],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> None:
    for seed, (batch, heads, heads_k, rows, keys) in enumerate(shapes):
        sizes = {"num_heads_k": heads_k, "seed": seed}
        check_hopper_gradients(*qkv(batch, rows, keys, heads, head_dim, dtype=dtype, device=device, **sizes), **options)
