"""How gradients are compared: with float64 truth, within three times the error of eager attention in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_check as check
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.reference import attention_reference

FP32, FP64 = torch.float32, torch.float64


def leaves(*tensors: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """q, k and v, and the others by their names, each to get a gradient."""
    named = {**dict(zip("qkv", tensors, strict=True)), **others}
    return {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in named.items()}


def differentiate(
    attend: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Tensor], dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    out, lse = attend(**given)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0) * dlse).sum()
    return dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))


def delta_rounding(given: dict[str, Tensor], dout: Tensor, options: dict[str, Any]) -> dict[str, float]:
    """How far the rounding of out may move each gradient, to first order: what Algorithm 2 subtracts from a row's dp
    is delta = rowsum(dout * out), out as stored. Where few keys share a row, the rest of the difference is small.
    """
    q, k, v = (given[name].detach() for name in "qkv")
    heads, keys = q.shape[2], k.shape[1]
    plain = {name: x for name, x in options.items() if name not in ("keep", "dropout_p")}
    others = {name: x.detach() for name, x in given.items() if name not in "qkv"}
    out = attention_reference(q, k, v, **others, **options)[0]
    one_each = torch.eye(keys, dtype=FP64, device=q.device)[None, :, None]
    p = attention_reference(q, k, one_each, **others, **plain)[0]  # (batch, seqlen_q, num_heads, seqlen_k)
    error = torch.finfo(v.dtype).eps * (dout.double() * out).abs().sum(-1)  # of delta
    ds = p * error[..., None]
    group = heads // k.shape[2]
    scale = abs(options.get("softmax_scale") or q.shape[3] ** -0.5)
    dq = scale * torch.einsum("bihj,bjhd->bihd", ds, k.double().abs().repeat_interleave(group, 2))
    dk = scale * torch.einsum("bihj,bihd->bjhd", ds, q.double().abs()).unflatten(2, (-1, group)).sum(3)
    found = {"q": dq, "k": dk, "v": ds.new_zeros(1), "bias": ds.transpose(1, 2)}
    found |= {"sinks": ((1 - p.sum(-1)) * error).sum((0, 1))}
    return {
        name: found[name].sum_to_size(x.shape).max().item() if name != "v" and x.numel() else 0.0
        for name, x in given.items()
    }


def compare_all(
    got: dict[str, Tensor],
    truth: dict[str, Tensor],
    eager: dict[str, Tensor],
    given: dict[str, Tensor],
    slack: dict[str, float],
) -> float:
    """Worst error over what is allowed: 3 times eager's, and what ``slack`` says."""
    for name, x in given.items():
        assert (got[name].shape, got[name].dtype, got[name].device) == (x.shape, x.dtype, x.device)
    return max(
        check.compare(f"d{name}", got[name], truth[name], eager[name], times=3, slack=slack[name]) for name in given
    )


def check_gradients(
    given: dict[str, Tensor],
    *,
    algorithm: str = "fa2",
    weigh_lse: bool = False,
    deterministic: bool = False,
    dout_scale: float = 1.0,
    **options: Any,
) -> float:
    """Gradients of a random linear form in out (and lse); returns the worst error over the allowed one."""
    q, k, v = (given[name] for name in "qkv")
    batch = max(x.shape[0] for x in (q, k, v))
    shape = (batch, q.shape[1], q.shape[2], v.shape[3])
    dout = check.randn(*shape, dtype=v.dtype, device=q.device, seed=11) * dout_scale
    dout = dout.clamp(-60000, 60000)  # fp16 ends at 65504
    dlse = check.randn(batch, q.shape[2], q.shape[1], dtype=FP32, device=q.device, seed=12) if weigh_lse else None
    expected = check.with_kept(q.device, (batch, q.shape[2], q.shape[1], k.shape[1]), options)
    with record_launches() as records:
        got = differentiate(
            lambda **x: flash_attention(
                **x, return_lse=True, algorithm=algorithm, deterministic=deterministic, **options
            ),
            given,
            dout,
            dlse,
        )
    check.assert_one_launch(records[:1], q.device, algorithm)  # the forward pass; then those of the backward
    assert len(records) > 1
    doubles = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    truth = differentiate(lambda **x: attention_reference(**x, **expected), doubles, dout, dlse)
    eager = differentiate(lambda **x: check.eager_attention(**x, **expected), given, dout, dlse)
    return compare_all(got, truth, eager, given, delta_rounding(given, dout, expected))
