"""Described calls → tensors: allocates outputs, gradients and workspaces with torch and runs this thread's plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import decode, fa1, fa2_backward, growing, plans, sm90, sm90_backward, sm90_backward_plan, sm90_plan
from .call import Call, describe, is_vector, plan_key
from .growing import Family
from .launch import device_arch
from .plans import Content, Plan

_MAX_PLANS = 4096
_local = threading.local()


class Prepared(NamedTuple):
    """All that the forward calls of one key share, those for the same of lse and statistics."""

    plan: Plan | None  # None: no rows or no keys
    workspaces: dict[str, int]  # float32 elements of each, by their names in the plan's call
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    covers: bool  # the plan writes every row, also those of no packed entry
    content: Content | None = None  # what the plan, which calls of other numbers of keys share, has to hold


class PreparedBackward(NamedTuple):
    """All that the backward calls of one key share."""

    plan: Plan | sm90_backward_plan.BackwardSm90Plan
    bias_plan: Plan | None
    workspaces: dict[str, int]  # float32 elements of each, by their names in the plan's call


class Gradients(NamedTuple):
    """By q, k, v, bias and sinks, each of its tensor's shape; None where nobody asked."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None  # in bias's dtype, of its shape before broadcasting
    dsinks: Tensor | None


def _known() -> dict[Hashable, Any]:
    """What this thread has prepared: a plan owns the buffer its parameters travel in, so threads share none."""
    try:
        known: dict[Hashable, Any] = _local.prepared
    except AttributeError:
        known = _local.prepared = {}
    return known


def prepared_for(key: Hashable, make: Callable[..., Any], *arguments: Any) -> Any:
    """What this thread made for ``key``, or makes from ``arguments`` now."""
    known = _known()
    found = known.get(key)
    if found is None:
        if len(known) >= _MAX_PLANS:
            known.clear()
        found = known[key] = make(*arguments)
    return found


def _prepare(call: Call, *outputs: bool) -> Prepared:
    """Of the first call of its key. ``outputs``: whether each is asked for; a plan is told the same tensors always."""
    family_key = (growing.family_key(call), outputs)
    first: tuple[Prepared, Family] | None = _known().get(family_key)
    if first is not None and (content := growing.grown(first[1], call)) is not None:
        return first[0]._replace(content=content)
    prepared, family = _build(call)
    if family is not None and family_key[0] is not None:
        _known()[family_key] = prepared, family
    return prepared


def _build(call: Call) -> tuple[Prepared, Family | None]:
    """Checks the call and builds its kernels; the family of calls that may share them."""
    problem, geometry = describe(call)
    batch, rows, heads = geometry.batch, geometry.seqlen_q, geometry.num_heads
    leading = () if problem.varlen else (batch,)
    has_work = batch * rows * heads > 0 and (geometry.seqlen_k > 0 or problem.varlen)
    is_fa1 = problem.algorithm == "fa1"
    plan: Any = None
    workspaces: dict[str, int] = {}
    hopper = None
    if has_work and decode.serves(problem, geometry, device_arch(call.q.device)):
        plan = decode.decode_plan(problem, geometry, call.q.device)
    elif has_work and not is_fa1 and (hopper := sm90.select_on(call.q.device, problem, geometry)) is not None:
        plan = sm90_plan.ForwardSm90Plan(hopper, problem, geometry, call.q.device)
    elif has_work:
        make_plan = fa1.fa1_forward_plan if is_fa1 else plans.forward_plan
        plan = make_plan(problem, geometry, call.q.device)
        workspaces = fa1.forward_workspace(problem, geometry) if is_fa1 else {}
    few = 0 < decode.packed_rows(geometry) <= decode.MAX_ROWS
    shares = isinstance(plan, plans.Plan) and few and not is_fa1
    prepared = Prepared(
        plan=plan,
        workspaces=workspaces,
        out_shape=(*leading, rows, heads, geometry.head_dim_v),
        lse_shape=(*leading, heads, rows),
        covers=plan is not None and (not problem.varlen or hopper is not None),
        content=plan.content if shares else None,
    )
    return prepared, Family(problem, geometry, plan.config, plan.content) if shares else None


def forward(call: Call, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out`` and ``lse``. The device of the tensors becomes current for the call only."""
    out, lse, _ = _forward(call, need_lse, need_statistics=False)
    return out, lse


def forward_for_backward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``statistics``, what :func:`backward` wants beside them: float32 (2, *lse's shape).

    These are each row's maximum and sum (m and l of the paper, m of base 2). lse is their logarithm in one number,
    whose rounding shows in the probabilities where logits are large.
    """
    out, lse, statistics = _forward(call, need_lse=True, need_statistics=True)
    assert lse is not None
    assert statistics is not None
    return out, lse, statistics


def _forward(call: Call, need_lse: bool, need_statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q = call.q
    if q.is_cuda and torch._C._cuda_getDevice() != q.device.index:
        with torch.cuda.device(q.device):
            return _forward(call, need_lse, need_statistics)
    key = (plan_key(call), need_lse, need_statistics)
    return _run(prepared_for(key, _prepare, call, need_lse, need_statistics), call, need_lse, need_statistics)


def known_forward(call: Call) -> Tensor | None:
    """``out`` of a call whose like this thread has had before; None of others."""
    q = call.q
    if q.is_cuda and torch._C._cuda_getDevice() != q.device.index:
        return None
    prepared: Prepared | None = _known().get((plan_key(call), False, False))
    if prepared is None:
        return None
    plan = prepared.plan
    if plan is None or prepared.workspaces or not prepared.covers or call.extras:
        return _run(prepared, call, need_lse=False, need_statistics=False)[0]
    # What is left of _run() for most steps of decoding, which have no time for its questions.
    if prepared.content is not None:
        plan.load(prepared.content)
    out = torch.empty(prepared.out_shape, dtype=q.dtype, device=q.device)
    plan(q=q, k=call.k, v=call.v, out=out)
    return out


def _run(
    prepared: Prepared, call: Call, need_lse: bool, need_statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q, k, v, extras, _ = call
    plan, workspaces, out_shape, lse_shape, covers, content = prepared
    if plan is not None and content is not None:
        plan.load(content)
    out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    lse = statistics = None
    beside = extras
    if need_lse:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        beside = beside | {"lse": lse}
    if need_statistics or "out_accum" in workspaces:  # FlashAttention-1 keeps them in device memory
        statistics = torch.empty((2, *lse_shape), dtype=torch.float32, device=q.device)
        beside = beside | {"row_max": statistics[0], "row_sum": statistics[1]}
    if not covers:
        # Without keys there is no launch; and packed offsets may leave out rows, which then no entry owns.
        sinks = extras.get("sinks") if plan is None and len(out_shape) == 4 else None
        fill_without_keys(out, lse, sinks)
        if statistics is not None:
            statistics.zero_()
    if plan is not None:
        if workspaces:
            beside = beside | {name: workspace(size, q.device) for name, size in workspaces.items()}
        plan(q=q, k=k, v=v, out=out, **beside)
    return out, lse, statistics


def fill_without_keys(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """What rows give that see no key. ``sinks``: of rows that have one."""
    out.zero_()
    if lse is not None:
        lse.copy_(sinks[:, None]) if sinks is not None else lse.fill_(-torch.inf)


def workspace(size: int, device: torch.device) -> Tensor:
    """float32, uninitialised."""
    return torch.empty(size, dtype=torch.float32, device=device)


def _prepare_backward(call: Call, out: Tensor, dout: Tensor, deterministic: bool) -> PreparedBackward:
    problem, geometry = describe(call)
    problem = replace(problem, vector=problem.vector and is_vector(out, dout), deterministic=deterministic)
    batch, row, head = dout.stride()[:3] if dout.dim() == 4 else (0, *dout.stride()[:2])
    geometry = replace(geometry, dout_strides=(batch, row, head))
    device = call.q.device
    plan: Plan | sm90_backward_plan.BackwardSm90Plan
    hopper = sm90_backward.select_on(device, problem, geometry)
    if hopper is not None:
        plan = sm90_backward_plan.BackwardSm90Plan(hopper, problem, geometry, device)
        workspaces = sm90_backward.workspaces(problem, geometry)
    elif problem.algorithm == "fa1":
        plan = fa1.fa1_backward_plan(problem, geometry, device)
        workspaces = {"dq_accum": fa1.backward_workspace(problem, geometry)["dq_accum"]}
    else:
        plan = fa2_backward.backward_plan(problem, geometry, device)
        workspaces = fa2_backward.workspaces(problem, geometry, device)
    bias_plan = fa2_backward.bias_backward_plan(problem, geometry, device) if problem.bias != "none" else None
    return PreparedBackward(plan, bias_plan, workspaces)


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    needs: Sequence[bool],
    deterministic: bool,
) -> Gradients:
    """The gradients of a forward call whose q, k and v have one batch. ``needs``: those of ``Gradients`` asked for.

    Those by q, k and v come together, whichever of them is asked for.
    """
    q, k, v, extras, _ = call
    if q.is_cuda and torch._C._cuda_getDevice() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(call, out, lse, statistics, dout, dlse, needs=needs, deterministic=deterministic)
    if dout is None:
        dout = out.new_zeros(out.shape)
    dout = _in_whole_rows(_last_contiguous(dout.resolve_neg()))
    dlse = None if dlse is None else dlse.resolve_neg().contiguous()
    # Hooks on saved tensors may give the same values in another layout.
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    out, lse, statistics = out.contiguous(), lse.contiguous(), statistics.contiguous()
    call = call._replace(q=q, k=k, v=v)
    entries = extras["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in extras else q.shape[0]
    has_work = entries > 0 and q.numel() > 0 and k.numel() > 0
    # Packed offsets may leave out rows, which then no entry owns.
    new = torch.empty if has_work and q.dim() == 4 else torch.zeros
    dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    bias, sinks = extras.get("bias"), extras.get("sinks")
    dbias = None
    if bias is not None and needs[3]:
        new = torch.empty if has_work else torch.zeros
        dbias = new(bias.shape, dtype=torch.float32, device=q.device)
    if has_work and any(needs[:4]):
        delta = _run_backward(call, out, lse, statistics, dout, dlse, (dq, dk, dv), dbias, deterministic)
    else:
        delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2) - (0 if dlse is None else dlse)
    return Gradients(
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        None if dbias is None or bias is None else dbias.to(bias.dtype),
        _sinks_gradient(sinks, lse, delta) if needs[4] and sinks is not None else None,
    )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_whole_rows(dout: Tensor) -> Tensor:
    """A copy of a gradient that not every kernel reads as it lies: slices, and what is expanded from fewer numbers.

    Which kernel runs, hence the last bits of the result, depends on values and shapes alone.
    """
    broadcast = any(not stride and count > 1 for stride, count in zip(dout.stride(), dout.shape, strict=True))
    if dout.shape[-1] * dout.element_size() % 16 or (is_vector(dout) and not broadcast):
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def _run_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Fills dq, dk, dv and ``dbias``; returns delta, of lse's shape."""
    alignment = (out.data_ptr() | dout.data_ptr()) % 16
    key = (plan_key(call), dout.stride(), alignment, deterministic)
    prepared: PreparedBackward = prepared_for(key, _prepare_backward, call, out, dout, deterministic)
    q, k, v, extras, _ = call
    dq, dk, dv = gradients
    delta = torch.empty_like(lse)
    row_max, row_sum = statistics
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse, "delta": delta, **extras}
    tensors |= {"row_max": row_max, "row_sum": row_sum}
    made = {name: workspace(size, q.device) for name, size in prepared.workspaces.items()}
    prepared.plan(**tensors, **made, dq=dq, dk=dk, dv=dv)
    if dbias is not None and prepared.bias_plan is not None:
        prepared.bias_plan(**tensors, dbias=dbias)
    return delta


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """−Σ over rows of P_sink · delta, (num_heads,); ``lse`` and ``delta`` are (…, num_heads, rows)."""
    terms = torch.exp((sinks[:, None] - lse).clamp(max=0)) * delta
    terms = torch.where(lse == -torch.inf, 0, terms)  # rows of no entry, and heads whose sink is −inf
    return -terms.sum((0, 2) if terms.dim() == 3 else 1)
