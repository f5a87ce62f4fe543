"""``torch.ops.hf_flash_cupy.forward`` and ``backward``: attention for torch.compile, torch.export, torch.func, modes.

There a call is a node of a graph: everything it depends on is an argument, and shapes are known without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import execute
from .call import Call, Options, uses_tf32
from .errors import UnsupportedProblem

_EXTRAS = ("mask", "key_intervals", "bias", "alibi_slopes", "sinks", "philox", "cu_seqlens_q", "cu_seqlens_k")
_INPUTS = ("q", "k", "v", *_EXTRAS)
_BIAS, _SINKS, _SLOPES = (_INPUTS.index(name) for name in ("bias", "sinks", "alibi_slopes"))

_TENSORS = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"Tensor? {name}" for name in _EXTRAS)
_OPTIONS = (
    "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, float dropout_p, "
    "str algorithm, SymInt max_seqlen_q, bool deterministic"
)


def attention(call: Call, deterministic: bool) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` by the custom operator; q, k and v have one batch."""
    function: Callable[..., Any] = _Attention.apply if in_functorch() else torch.ops.hf_flash_cupy.forward
    out, lse, _ = function(*_arguments(call, deterministic))
    return out, lse


def _arguments(call: Call, deterministic: bool) -> tuple[Any, ...]:
    """The call as the operators take it; :func:`_call` is the way back."""
    q, k, v, extras, options = call
    return (
        *(q, k, v, *(extras.get(name) for name in _EXTRAS)),
        *(options.causal, *options.window_size, options.softmax_scale, options.softcap, options.dropout_p),
        *(options.algorithm, options.max_seqlen_q, deterministic),
    )


def _call(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    q, k, v = (x.resolve_neg() for x in inputs[:3])
    others = [None if x is None else x.resolve_neg() for x in inputs[3:]]
    causal, left, right, scale, softcap, dropout_p, algorithm, max_seqlen_q, _ = options
    extras = {name: x for name, x in zip(_EXTRAS, others, strict=True) if x is not None}
    asked = Options(causal, (left, right), scale, softcap, dropout_p, algorithm, uses_tf32(q), max_seqlen_q)
    return Call(q, k, v, extras, asked)


@torch.library.custom_op(
    "hf_flash_cupy::forward", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and statistics."""
    return execute.forward_for_backward(_call(arguments[: len(_INPUTS)], arguments[len(_INPUTS) :]))


@_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    *batch, rows, heads, _head_dim = q.shape
    lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
    return q.new_empty((*batch, rows, heads, v.shape[-1])), lse, lse.new_empty((2, *lse.shape))


@torch.library.custom_op(
    "hf_flash_cupy::backward",
    mutates_args=(),
    schema="(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor statistics, bool[] needs, "
    f"{_TENSORS}, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    needs: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """By q, k, v, bias and sinks; empty where nobody asked."""
    options = arguments[len(_INPUTS) :]
    call = _call(arguments[: len(_INPUTS)], options)
    found = execute.backward(call, out, lse, statistics, dout, dlse, needs=needs, deterministic=options[-1])
    return tuple(call.q.new_empty(0) if x is None else x for x in found)


@_backward.register_fake
def _backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    needs: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    sources = (*arguments[:3], arguments[_BIAS], arguments[_SINKS])
    return tuple(x.new_empty(x.shape) if needed else out.new_empty(0) for x, needed in zip(sources, needs, strict=True))


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[: len(_INPUTS)], *output)
    ctx.options = inputs[len(_INPUTS) :]


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs: Sequence[bool],
    deterministic: bool,
) -> list[Tensor | None]:
    """The gradients by q, k, v, bias and sinks by the operator; None where nobody asked."""
    found = _run_backward(dout, dlse, out, lse, statistics, list(needs), *_arguments(call, deterministic))
    return [x if needed else None for x, needed in zip(found, needs, strict=True)]


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    function: Callable[..., Any] = _Backward.apply if in_functorch() else torch.ops.hf_flash_cupy.backward
    found: tuple[Tensor, ...] = function(*arguments)
    return found


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse, statistics = ctx.saved_tensors
    if ctx.needs_input_grad[_SLOPES]:
        refuse_slopes_gradient()
    sources = (0, 1, 2, _BIAS, _SINKS)
    needs = [ctx.needs_input_grad[i] for i in sources]
    found = _run_backward(dout, dlse, out, lse, statistics, needs, *inputs, *ctx.options)
    gradients: list[Tensor | None] = [None] * (len(inputs) + len(ctx.options))
    for i, needed, x in zip(sources, needs, found, strict=True):
        gradients[i] = x if needed else None
    return tuple(gradients)


def refuse_second_derivative(ctx: Any, *_: Any) -> None:
    """The backward's own backward."""
    raise UnsupportedProblem(
        "A second derivative of attention was asked for (create_graph=True): the kernels have the first only. "
        'Use attn_implementation="eager", or torch\'s math backend, for a loss that contains gradients.'
    )


def refuse_tangents(*_: Any) -> Any:
    """Forward mode."""
    raise UnsupportedProblem(
        "A forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp, hessian) of attention was asked for: "
        "the kernels have reverse mode only. Use torch.autograd.grad or torch.func.vjp."
    )


def refuse_slopes_gradient() -> None:
    raise UnsupportedProblem(
        "alibi_slopes requires a gradient: it has none. Pass alibi_slopes.detach(), or their product with the "
        "distances as bias, which has one."
    )


_forward.register_autograd(_differentiate, setup_context=_setup_forward)
_backward.register_autograd(refuse_second_derivative)


_BATCHED = torch._C._parse_dispatch_key("Batched")


def is_batched(x: Tensor | None) -> bool:
    """Whether ``x`` stands for many tensors, as is_grads_batched makes them."""
    return x is not None and torch._C._dispatch_keys(x).has(_BATCHED)  # type: ignore[arg-type]


def in_functorch() -> bool:
    """Whether torch.func transforms the call; compilers see through those."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


class _Attention(torch.autograd.Function):
    """The operator under torch.func, whose transformations the operator's own differentiation does not take part in."""

    generate_vmap_rule = True
    forward = staticmethod(torch.ops.hf_flash_cupy.forward)
    setup_context = staticmethod(_setup_forward)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(refuse_tangents)  # type: ignore[assignment]


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(torch.ops.hf_flash_cupy.backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(refuse_second_derivative)
    jvp = staticmethod(refuse_tangents)  # type: ignore[assignment]
