"""What "right" means for a forward call: float64 truth, tolerance from eager attention, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy import dropout_mask, flash_attention, flash_attention_varlen
from hf_flash_cupy.launch import LaunchRecord, record_launches
from hf_flash_cupy.reference import attention_reference, visible_keys

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

SEED = 20220527  # of calls with dropout

GUARD = 1024  # elements on either side of an output that nobody may write to
_poisoned: set[int] = set()  # addresses of outputs


def cumulative(lengths: list[int]) -> list[int]:
    """Offsets of packed sequences of these lengths."""
    return [0, *accumulate(lengths)]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """``torch.empty`` gives floating-point tensors full of NaN, between guards of NaN."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        result = empty(*arguments, **options)
        if not (result.is_floating_point() and result.numel()):
            return result
        framed = empty(result.numel() + 2 * GUARD, dtype=result.dtype, device=result.device).fill_(math.nan)
        result = framed[GUARD:-GUARD].view(result.shape)
        _poisoned.add(result.data_ptr())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield
    _poisoned.clear()


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """The same normal numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_heads_k: int | None = None,
    head_dim_v: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_heads_k, …), contiguous."""
    num_heads_k = num_heads_k or num_heads
    head_dim_v = head_dim_v or head_dim
    q = randn(batch, seqlen_q, num_heads, head_dim, dtype=dtype, device=device, seed=3 * seed)
    k = randn(batch, seqlen_k, num_heads_k, head_dim, dtype=dtype, device=device, seed=3 * seed + 1)
    v = randn(batch, seqlen_k, num_heads_k, head_dim_v, dtype=dtype, device=device, seed=3 * seed + 2)
    return q, k, v


def eager_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Plain attention in the inputs' dtype with an fp32 softmax: the baseline that sets the tolerance.

    Takes what :func:`attention_reference` does. Returns out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch,
    num_heads, seqlen_q), float32.
    """
    batch, num_heads = max(q.shape[0], k.shape[0], v.shape[0]), q.shape[2]
    visible = visible_keys(
        batch,
        num_heads,
        q.shape[1],
        k.shape[1],
        q.device,
        options.get("causal", False),
        options.get("window_size", (-1, -1)),
        options.get("mask"),
        options.get("key_intervals"),
    )
    bias = options.get("bias")
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    seen = visible.any(dim=2).unsqueeze(-1)
    q, k, v = (x.transpose(1, 2).expand(batch, -1, -1, -1) for x in (q, k, v))
    k, v = (torch.where(seen, x.repeat_interleave(num_heads // x.shape[1], dim=1), 0) for x in (k, v))
    scale = options.get("softmax_scale")
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap := options.get("softcap", 0.0):
        scores = softcap * torch.tanh(scores / softcap)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[2:])
        distance = (rows[:, None] + scores.shape[3] - scores.shape[2] - keys).abs()
        scores = scores - (slopes.expand(batch, num_heads)[:, :, None, None] * distance).to(scores.dtype)
    if bias is not None:
        scores = scores + bias
    scores = scores.float().masked_fill(~visible, -torch.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : k.shape[2]].masked_fill(~visible.any(-1, keepdim=True), 0)
    if (keep := options.get("keep")) is not None:
        probabilities = torch.where(keep, probabilities / (1 - options["dropout_p"]), 0)
    return (probabilities.to(v.dtype) @ v).transpose(1, 2), lse


def with_kept(device: torch.device, shape: tuple[int, int, int, int], options: dict[str, Any]) -> dict[str, Any]:
    """``options`` for the reference of the next call: what its dropout keeps. Seeds torch's generator."""
    dropout_p = options.get("dropout_p", 0.0)
    if not dropout_p:
        return options
    torch.manual_seed(SEED)
    philox = torch.randint(2**62, (2,), device=device)
    torch.manual_seed(SEED)
    keep = dropout_mask.kept(philox, shape, dropout_p).to(device)
    return {**options, "keep": keep, "dropout_p": dropout_mask.exact_p(dropout_p)}


def check(q: Tensor, k: Tensor, v: Tensor, *, algorithm: str = "fa2", **options: Any) -> float:
    """Runs ``flash_attention``, compares it with the truth; returns the worst error / allowed error."""
    before = [x.clone() for x in (q, k, v)]
    batch = max(q.shape[0], k.shape[0], v.shape[0])
    expected = with_kept(q.device, (batch, q.shape[2], q.shape[1], k.shape[1]), options)
    _poisoned.clear()
    with record_launches() as records:
        out, lse = flash_attention(q, k, v, return_lse=True, algorithm=algorithm, **options)
    assert_one_launch(records, q.device, algorithm)
    for x, copy in zip((q, k, v), before, strict=True):
        assert torch.equal(x.nan_to_num(7), copy.nan_to_num(7)), "an input was written to"
    assert_output(out, (batch, *q.shape[1:3], v.shape[3]), v.dtype, q.device)
    assert_output(lse, (batch, q.shape[2], q.shape[1]), torch.float32, q.device)
    truth, truth_lse = attention_reference(q, k, v, **expected)
    eager, _ = eager_attention(q, k, v, **expected)
    _, eager_lse = eager_attention(q.float(), k.float(), v.float(), **expected)
    return max(compare("out", out, truth, eager), compare_lse(lse, truth_lse, eager_lse, q.dtype))


def check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: list[int],
    offsets_k: list[int],
    max_seqlen_q: int | None = None,
    *,
    algorithm: str = "fa2",
    **options: Any,
) -> float:
    """The same for ``flash_attention_varlen``: each entry has its own truth, the rest is 0 and −inf."""
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=q.device) for x in (offsets_q, offsets_k)]
    longest_q, longest_k = (max((end - begin for begin, end in pairwise(x)), default=0) for x in (offsets_q, offsets_k))
    rows = longest_q if max_seqlen_q is None else max_seqlen_q
    whole = with_kept(q.device, (len(offsets_q) - 1, q.shape[1], longest_q, longest_k), options)
    _poisoned.clear()
    with record_launches() as records:
        out, lse = flash_attention_varlen(
            q, k, v, *cu_seqlens, rows, longest_k, return_lse=True, algorithm=algorithm, **options
        )
    if len(offsets_q) > 1:
        assert_one_launch(records, q.device, algorithm)
    assert_output(out, (*q.shape[:2], v.shape[2]), v.dtype, q.device)
    assert_output(lse, (q.shape[1], q.shape[0]), torch.float32, q.device)
    assert (out[offsets_q[-1] :] == 0).all()
    assert (lse[:, offsets_q[-1] :] == -torch.inf).all()
    worst = 0.0
    spans = zip(pairwise(offsets_q), pairwise(offsets_k), strict=True)
    for i, ((begin_q, end_q), (begin_k, end_k)) in enumerate(spans):
        entry = (q[None, begin_q:end_q], k[None, begin_k:end_k], v[None, begin_k:end_k])
        expected = dict(whole)
        if "keep" in whole:
            expected["keep"] = whole["keep"][i : i + 1, :, : end_q - begin_q, : end_k - begin_k]
        if whole.get("alibi_slopes") is not None and whole["alibi_slopes"].dim() == 2:
            expected["alibi_slopes"] = whole["alibi_slopes"][i : i + 1]
        truth, truth_lse = attention_reference(*entry, **expected)
        eager, _ = eager_attention(*entry, **expected)
        _, eager_lse = eager_attention(*(x.float() for x in entry), **expected)
        ratio = compare("out", out[None, begin_q:end_q], truth, eager)
        ratio_lse = compare_lse(lse[None, :, begin_q:end_q], truth_lse, eager_lse, q.dtype)
        worst = max(worst, ratio, ratio_lse)
    return worst


def assert_one_launch(records: list[LaunchRecord], device: torch.device, algorithm: str = "fa2") -> None:
    """Our kernel ran, once; nothing else stood in for it. Few rows against many keys may be split and combined."""
    assert {record.backend for record in records} == {"host" if device.type == "cpu" else "cuda"}
    others = [["fa2_forward_sm90"], ["fa2_decode"], ["fa2_decode", "fa2_combine"]] if algorithm == "fa2" else []
    assert [record.kernel for record in records] in [[f"{algorithm}_forward"], *others]


def assert_output(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    assert (tuple(x.shape), x.dtype, x.device) == (shape, dtype, device)
    assert x.is_contiguous()
    if x.numel():
        assert x.data_ptr() in _poisoned, "the output was not poisoned: unwritten elements would go unseen"
        framed = x.as_strided((x.numel() + 2 * GUARD,), (1,), 0)
        assert framed[:GUARD].isnan().all(), "something was written before the output"
        assert framed[-GUARD:].isnan().all(), "something was written behind the output"


def compare_lse(ours: Tensor, truth: Tensor, eager: Tensor, dtype: torch.dtype) -> float:
    """lse is always fp32: held to fp32 eager attention, plus 1 % of their ε for 16-bit inputs."""
    slack = 0.0 if dtype == torch.float32 else 0.01 * torch.finfo(dtype).eps
    return compare("lse", ours, truth, eager, least=1.0, slack=slack)


MANY = 1000  # elements whose mean square is no matter of luck


def compare(
    name: str,
    ours: Tensor,
    truth: Tensor,
    eager: Tensor,
    *,
    least: float = 0.0,
    slack: float = 0.0,
    times: float = 2.0,
) -> float:
    """Worst error of ``ours`` against float64 ``truth`` over what is allowed; fails above 1.

    Allowed is ``times`` the error of ``eager``, plus 4 ε of the dtype times max(|truth|, ``least``), plus
    ``slack``. The mean square error, which single unlucky elements among many move little, is held to as many
    times eager's plus half an ε.
    """
    if truth.numel() == 0:
        return 0.0
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(ours) != kind(truth)
        assert not wrong.any(), (
            f"{name}: {kind.__name__} differs at {int(wrong.sum())} of {wrong.numel()}, {where(wrong)}"
        )
    finite = truth.isfinite()
    if not finite.any():
        return 0.0
    exact = truth[finite]
    error, baseline = ((x.double()[finite] - exact).abs() for x in (ours, eager))
    baseline = baseline.nan_to_num(0, 0)  # where eager overflows it excuses nothing
    epsilon = torch.finfo(ours.dtype).eps
    scale = max(exact.abs().max().item(), least)
    ratio = error.max().item() / (times * baseline.max().item() + 4 * epsilon * scale + slack + 1e-300)
    place = where(finite & ((ours.double() - truth).abs() == error.max()))
    assert ratio <= 1, f"{name}: error {error.max().item():.3g}, eager's {baseline.max().item():.3g}, {place}"
    if exact.numel() < MANY:
        return ratio
    rms, rms_baseline, rms_truth = (x.square().mean().sqrt().item() for x in (error, baseline, exact))
    rms_allowed = times * rms_baseline + 0.5 * epsilon * max(rms_truth, least) + slack
    assert rms <= rms_allowed, f"{name}: rms error {rms:.3g}, eager's {rms_baseline:.3g}, values' {rms_truth:.3g}"
    return ratio


def where(wrong: Tensor) -> str:
    return f"first at {tuple(wrong.nonzero()[0].tolist())} of {tuple(wrong.shape)}" if wrong.any() else "nowhere"


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def visible_to_kernel(
    seqlen_q: int, seqlen_k: int, device: torch.device, num_heads: int = 1, batch: int = 1, **options: Any
) -> Tensor:
    """(batch, num_heads, seqlen_q, seqlen_k) bool, read off the kernel: with q = 0 every visible key weighs
    the same, and one-hot values show which.
    """
    width = 32
    q = torch.zeros(batch, seqlen_q, num_heads, width, device=device)
    k = torch.zeros(batch, seqlen_k, num_heads, width, device=device)
    parts = []
    for first in range(0, seqlen_k, width):
        keys = torch.arange(seqlen_k, device=device)[:, None] == first + torch.arange(width, device=device)
        v = keys.float()[None, :, None, :].expand(batch, -1, num_heads, -1)
        parts.append(flash_attention(q, k, v, **options) > 0)
    return torch.cat(parts, dim=-1)[..., :seqlen_k].transpose(1, 2)
