"""What the tests of the Hopper backward share, on its GPU and on the CPU: outputs are poisoned, and it is what ran."""

from __future__ import annotations

import math
from typing import Any

import torch
from attention_check import cumulative, qkv, randn
from gradient_check import check_gradients, leaves
from hopper_check import by_head, documents, padding
from torch import Tensor

from hf_flash_cupy import execute, flash_attention
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


def packed(lengths: list[int], device: torch.device, causal: bool = True) -> Tensor:
    """Intervals of documents of these lengths in one row of tokens, (rows, 2): each token sees its own up to itself."""
    ends = torch.tensor(cumulative(lengths), device=device)
    rows = torch.arange(sum(lengths), device=device)
    which = torch.searchsorted(ends, rows, right=True)
    return torch.stack([ends[which - 1], rows + 1 if causal else ends[which]], -1).to(torch.int32)


def nobody(rows: int, device: torch.device, *spans: tuple[int, int]) -> Tensor:
    """Packed documents, but for rows that see nothing: those of ``spans``."""
    intervals = packed([rows // 3, rows - rows // 3], device)
    for begin, end in spans:
        intervals[begin:end] = torch.tensor([50, 20])
    return intervals


def visibilities(rows: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Options of calls with two entries, four heads and as many rows as keys: what is seen row by row, by name."""
    ragged = packed([rows // 5 + 3, 0, 1, rows // 3, 0, rows - rows // 5 - rows // 3 - 4], device)
    return {
        "packed": {"key_intervals": ragged},
        "packed, both ways": {"key_intervals": packed([rows // 2 - 7, rows - rows // 2 + 7], device, causal=False)},
        "padding": {"key_intervals": padding(rows, rows, device)},
        "causal padding": {"key_intervals": padding(rows, rows, device), "causal": True},
        "holes": {"key_intervals": documents(rows, rows, device)},
        "one a head": {"key_intervals": by_head(rows, rows, device), "causal": True},
        "rows without keys": {"key_intervals": nobody(rows, device, (0, 70), (rows // 2, rows // 2 + 140))},
        "packed, window": {"key_intervals": ragged, "window_size": (40, 3)},
        "window": {"window_size": (33, 0)},
        "itself": {"window_size": (0, 0)},
        "window to the left": {"window_size": (1, -1)},
        "window to both sides": {"window_size": (rows // 2, 65)},
        "window wider than keys": {"window_size": (2 * rows, 0)},
    }


WINDOW_SHAPES = [  # batch, heads, key heads, rows, keys; window
    ((1, 2, 1, 150, 400), (70, 0)),  # keys that nobody sees
    ((1, 2, 2, 300, 130), (20, 0)),  # rows without keys
    ((2, 2, 1, 130, 333), (1, 200)),
]


def check_hopper_windows(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for (batch, heads, heads_k, rows, keys), window in WINDOW_SHAPES:
        sizes = {"num_heads_k": heads_k, "seed": rows}
        tensors = qkv(batch, rows, keys, heads, head_dim, dtype=dtype, device=device, **sizes)
        check_hopper_gradients(*tensors, window_size=window, weigh_lse=True)
        intervals = padding(rows, keys, device)[:batch]
        check_hopper_gradients(*tensors, key_intervals=intervals, causal=True)


def gradients_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv of a random linear form, by the Hopper kernels."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*given, **options)
    with record_launches() as records:
        found = torch.autograd.grad(out, given, randn(*out.shape, dtype=out.dtype, device=out.device, seed=9))
    assert [record.kernel for record in records] == KERNELS
    return found


def check_hidden_keys_gradients(head_dim: int, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Keys that no row sees get gradients of 0 and change no other, whatever they hold."""
    rows = 300
    q, k, v = qkv(2, rows, rows, 4, head_dim, dtype=dtype, device=device, num_heads_k=2)
    hidden = torch.ones(rows, dtype=torch.bool, device=device)
    if "window_size" in options:
        q = q[:, 170:].contiguous()
        hidden[170 - options["window_size"][0] :] = False
    else:
        options["key_intervals"] = documents(rows, rows, device)
        for lo, hi in options["key_intervals"].tolist():
            hidden[lo:hi] = False
    assert hidden.any()
    plain = gradients_of(q, k, v, **options)
    for x in plain[1:]:
        assert (x[:, hidden] == 0).all()
    for value in (math.nan, math.inf, torch.finfo(dtype).min):
        dirty = [x.masked_fill(hidden[None, :, None, None], value) for x in (k, v)]
        dq, dk, dv = gradients_of(q, *dirty, **options)
        assert torch.equal(dk, plain[1])
        assert torch.equal(dv, plain[2])
        assert (dq - plain[0]).abs().max() <= 1e-2 * plain[0].abs().max()  # its sums come in any order


def check_nothing_seen(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """No step for any key: gradients of 0, and nobody waits."""
    q, k, v = qkv(2, 200, 333, 2, head_dim, dtype=dtype, device=device, num_heads_k=1)
    intervals = torch.tensor([50, 20], dtype=torch.int32, device=device).expand(200, 2)
    for x in gradients_of(q, k, v, key_intervals=intervals):
        assert (x == 0).all()
