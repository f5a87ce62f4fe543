"""Checked calls → outputs: allocates out and lse with torch and launches the prepared kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .launch import ForwardPlan

_MAX_PLANS = 4096
_local = threading.local()


def plan_for(key: Hashable, make: Callable[[], ForwardPlan]) -> ForwardPlan:
    """This thread's plan for ``key``; plans own the buffer their parameters travel in, so threads share none."""
    try:
        plans: dict[Hashable, ForwardPlan] = _local.plans
    except AttributeError:
        plans = _local.plans = {}
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plan = plans[key] = make()
    return plan


def forward(
    plan: ForwardPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...] | None,
    mask: Tensor | None,
    key_intervals: Tensor | None,
    cu_seqlens: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs ``plan``. The device of the tensors becomes current for the call only."""
    if q.is_cuda and torch._C._cuda_getDevice() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(plan, q, k, v, out_shape, lse_shape, mask, key_intervals, cu_seqlens)
    out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if cu_seqlens is not None:  # offsets that do not start at 0, or skip rows, name rows that no entry owns
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    plan(q, k, v, out, lse, mask, key_intervals, cu_seqlens)
    return out, lse
