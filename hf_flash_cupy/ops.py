"""Attention as torch knows it: the only file that deals with gradients and with torch's other transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import cache_ops, checks, custom_ops, execute, kvcache
from .call import Call, seqlen_first, uses_tf32
from .errors import UnsupportedProblem

_PLAIN = (Tensor, torch.nn.Parameter)


def attention(call: Call, deterministic: bool | None, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out`` and ``lse`` (or None). ``deterministic`` as in :func:`hf_flash_cupy.flash_attention`."""
    transformed = _is_transformed(call)
    if transformed and not torch.compiler.is_compiling():
        _refuse_distributed(call)
    if "alibi_slopes" in call.extras and torch.is_grad_enabled() and call.extras["alibi_slopes"].requires_grad:
        custom_ops.refuse_slopes_gradient()
    if not transformed and call.q.dtype == torch.float32 and uses_tf32(call.q):
        call = call._replace(options=call.options._replace(tf32=True))
    if transformed or (torch.is_grad_enabled() and _wants_gradient(call)):
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        call = seqlen_first(call)
        q, k, v = _one_batch(call)
        call = call._replace(q=q, k=k, v=v)
        if forward_ad._current_level >= 0:
            _refuse_tangents(call)
        if transformed:
            return custom_ops.attention(call, deterministic)
        bias, sinks = call.extras.get("bias"), call.extras.get("sinks")
        apply: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
        out, lse = apply(q, k, v, bias, sinks, call, deterministic)
        return out, lse
    return execute.forward(call, need_lse)


def known_attention(call: Call) -> Tensor | None:
    """``out`` where no gradient is asked for and the like of the call has run before; None of other calls."""
    return None if _is_transformed(call) else execute.known_forward(call)


def attention_with_cache(call: Call, num_splits: int | None, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out`` and ``lse`` (or None); k and v of the call are caches."""
    if _is_transformed(call):
        if not torch.compiler.is_compiling():
            _refuse_distributed(call)
            if "k_new" in call.extras and torch._C._are_functorch_transforms_active():
                raise UnsupportedProblem("k and v are appended in place, which torch.func's transforms cannot follow.")
        return cache_ops.attention(call, num_splits)
    if uses_tf32(call.q):
        call = call._replace(options=call.options._replace(tf32=True))
    return kvcache.forward(call, num_splits, need_lse)


def _is_transformed(call: Call) -> bool:
    """Whether somebody wants to see operators of torch, not launches: compilers, torch.func, modes, subclasses."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or not (type(call.q) in _PLAIN and type(call.k) in _PLAIN and type(call.v) in _PLAIN)
        or (bool(call.extras) and any(type(x) not in _PLAIN for x in call.extras.values()))
    )


def _refuse_distributed(call: Call) -> None:
    for name, x in {"q": call.q, "k": call.k, "v": call.v, **call.extras}.items():
        if hasattr(x, "placements"):
            raise TypeError(
                f"{name} is a DTensor: attention runs on the part that each process holds. Pass {name}.to_local(), "
                'with the heads or the batch sharded, as the layers of tp_plan="auto" do.'
            )


def _refuse_tangents(call: Call) -> None:
    for x in (call.q, call.k, call.v, *call.extras.values()):
        if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            custom_ops.refuse_tangents()


def _wants_gradient(call: Call) -> bool:
    q, k, v, extras, _ = call
    by_qkv = q.requires_grad or k.requires_grad or v.requires_grad
    if not extras:
        return by_qkv
    return by_qkv or any(extras[name].requires_grad for name in ("bias", "sinks") if name in extras)


def _one_batch(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v expanded to one batch: their gradients are then summed by torch."""
    q, k, v = call[:3]
    if q.dim() == 3 or q.shape[0] == k.shape[0] == v.shape[0]:
        return q, k, v
    batch = checks.batch(q, k, v)
    q, k, v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
    return q, k, v


class _Attention(torch.autograd.Function):
    """The road outside torch.compile and torch.func: a call costs microseconds."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        call: Call,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """bias and sinks are those of ``call.extras``, named here for their gradients."""
        out, lse, statistics = execute.forward_for_backward(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, statistics, *call.extras.values())
        ctx.names, ctx.options, ctx.deterministic = tuple(call.extras), call.options, deterministic
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            custom_ops.refuse_second_derivative(ctx)
        q, k, v, out, lse, statistics, *others = ctx.saved_tensors
        call = Call(q, k, v, dict(zip(ctx.names, others, strict=True)), ctx.options)
        needs = ctx.needs_input_grad[:5]
        if custom_ops.in_functorch() or custom_ops.is_batched(dout) or custom_ops.is_batched(dlse):
            return (*custom_ops.backward(call, out, lse, statistics, dout, dlse, needs, ctx.deterministic), None, None)
        found = execute.backward(call, out, lse, statistics, dout, dlse, needs=needs, deterministic=ctx.deterministic)
        return (*found, None, None)
