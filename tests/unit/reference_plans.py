"""Plans that compute by plain torch operations what the kernels would: tests of everything above the kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy import execute, fa1, fa2_backward, plans
from hf_flash_cupy.plans import Geometry
from hf_flash_cupy.problem import AttentionProblem
from hf_flash_cupy.reference import attention_reference, varlen_reference

ARGUMENTS = ("alibi_slopes", "sinks", "bias", "mask", "key_intervals")


@dataclass
class Calls:
    """What was asked of the plans, in order."""

    forward: list[tuple[AttentionProblem, Geometry]]
    backward: list[tuple[AttentionProblem, Geometry]]
    bias: list[tuple[AttentionProblem, Geometry]]


def keep_mask(geometry: Geometry, philox: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(philox[0]) ^ int(philox[1]))
    shape = (geometry.batch, geometry.num_heads, geometry.seqlen_q, geometry.seqlen_k)
    return torch.rand(shape, generator=generator) >= geometry.dropout_p


def attend(geometry: Geometry, tensors: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` in float64, differentiable by ``tensors``."""
    options: dict[str, Any] = {name: tensors[name] for name in ARGUMENTS if tensors.get(name) is not None}
    options |= {
        "window_size": geometry.window,
        "softmax_scale": geometry.softmax_scale,
        "softcap": geometry.softcap,
    }
    q, k, v = (tensors[name] for name in "qkv")
    if q.dim() == 3:
        return varlen_reference(q, k, v, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], **options)
    if geometry.dropout_p:
        options |= {"dropout_p": geometry.dropout_p, "keep": keep_mask(geometry, tensors["philox"])}
    return attention_reference(q, k, v, **options)


class ForwardPlan:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __call__(
        self,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        row_max: Tensor | None = None,
        row_sum: Tensor | None = None,
        **tensors: Any,
    ) -> None:
        assert tensors.get("bias") is None or tensors["bias"].dtype in (tensors["q"].dtype, torch.float32)
        result, result_lse = attend(self.geometry, tensors)
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)
        if row_max is not None and row_sum is not None:
            row_max.copy_(result_lse)
            row_sum.fill_(1)


class BackwardPlan:
    """Gradients by q, k and v; or, for ``bias``, by it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __call__(self, **tensors: Any) -> None:
        """In a thread of its own: inside a custom operator autograd is switched off."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.differentiate, **tensors).result()

    def differentiate(self, *, dout: Tensor, dlse: Tensor | None, delta: Tensor, **tensors: Any) -> None:
        q, k, v = (tensors[name] for name in "qkv")
        assert q.dim() == 3 or q.shape[0] == k.shape[0] == v.shape[0] == self.geometry.batch
        assert dout.stride() == (*self.geometry.dout_strides[-dout.dim() + 1 :], 1)
        assert dlse is None or dlse.is_contiguous()
        names = [name for name in ("q", "k", "v", "bias") if tensors.get(name) is not None]
        with torch.enable_grad():
            leaves = {name: tensors[name].double().requires_grad_() for name in names}
            out, lse = attend(self.geometry, {**tensors, **leaves})
            loss = (out * dout.double()).sum()
            if dlse is not None:
                loss = loss + torch.where(lse.isfinite(), lse * dlse.double(), 0).sum()
            found = dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        rows = (tensors["out"].double() * dout.double()).sum(-1).transpose(-1, -2)
        delta.copy_(rows if dlse is None else rows - dlse)
        for name, gradient in found.items():
            if (output := tensors.get(f"d{name}")) is not None:
                assert output.is_contiguous()
                output.copy_(gradient)


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces the kernels' plans; returns the record of what they are asked for."""
    calls = Calls([], [], [])

    def maker(plan: type, made: list[tuple[AttentionProblem, Geometry]]) -> Callable[..., Any]:
        def make(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Any:
            made.append((problem, geometry))
            return plan(geometry)

        return make

    monkeypatch.setattr(execute, "_local", type("Local", (), {})())
    monkeypatch.setattr(plans, "forward_plan", maker(ForwardPlan, calls.forward))
    monkeypatch.setattr(fa1, "fa1_forward_plan", maker(ForwardPlan, calls.forward))
    for module, name in ((fa2_backward, "backward_plan"), (fa1, "fa1_backward_plan")):
        monkeypatch.setattr(module, name, maker(BackwardPlan, calls.backward))
    monkeypatch.setattr(fa2_backward, "bias_backward_plan", maker(BackwardPlan, calls.bias))
    monkeypatch.setattr(fa2_backward, "workspaces", lambda problem, geometry, device: {"dq_accum": 1})
    return calls
