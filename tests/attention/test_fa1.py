"""FlashAttention-1: forward and backward against float64, with every feature; what its loops alone can get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attention_check as check
import gradient_check as gradients
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import UnsupportedProblem, fa1, flash_attention
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.problem import AttentionProblem

BATCH, HEADS, HEADS_K, ROWS, KEYS = 2, 4, 2, 77, 150  # three row blocks and three key blocks of the host's tile
TWO_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=check.NAMES.get)


def tensors(device: torch.device, dtype: torch.dtype, head_dim: int = 64, **sizes: Any) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"num_heads_k": HEADS_K, "dtype": dtype, "device": device, **sizes}
    return check.qkv(BATCH, ROWS, KEYS, HEADS, head_dim, **options)


def both_ways(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Output, lse and gradients."""
    check.check(q, k, v, algorithm="fa1", **options)
    gradients.check_gradients(gradients.leaves(q, k, v), algorithm="fa1", weigh_lse=True, **options)


def numbers(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return check.randn(*shape, dtype=dtype, device=device, seed=9)


def some_intervals(device: torch.device) -> Tensor:
    """(BATCH, HEADS, ROWS, 2): ends anywhere, some reversed; rows 32 to 63, a whole row block, see nothing."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(-20, KEYS + 20, (BATCH, HEADS, ROWS, 2), generator=generator, dtype=torch.int32)
    ends[:, :, :60] = ends[:, :, :60].sort(-1).values
    ends[:, :, 32:64] = 50
    return ends.to(device)


def some_mask(device: torch.device) -> Tensor:
    """(BATCH, HEADS, ROWS, KEYS): row 5 sees nothing, nobody sees the keys from 140 on."""
    mask = torch.rand(BATCH, HEADS, ROWS, KEYS, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, :, 5] = False
    mask[..., 140:] = False
    return mask.to(device)


FEATURES: dict[str, Any] = {
    "full": lambda device, dtype: {},
    "causal": lambda device, dtype: {"causal": True},
    "window": lambda device, dtype: {"window_size": (11, 5)},
    "left-window": lambda device, dtype: {"window_size": (3, -1), "causal": True},
    "softcap": lambda device, dtype: {"softcap": 2.0},
    "negative-scale": lambda device, dtype: {"softmax_scale": -0.2, "causal": True},
    "alibi": lambda device, dtype: {"alibi_slopes": numbers(BATCH, HEADS, device=device).abs(), "causal": True},
    "sinks": lambda device, dtype: {"sinks": numbers(HEADS, device=device), "causal": True},
    "bias": lambda device, dtype: {"bias": numbers(BATCH, 1, ROWS, KEYS, device=device, dtype=dtype)},
    "bias-fp32": lambda device, dtype: {"bias": numbers(HEADS, 1, KEYS, device=device), "softcap": 3.0},
    "mask": lambda device, dtype: {"mask": some_mask(device)},
    "mask-softcap": lambda device, dtype: {"mask": some_mask(device), "softcap": 2.0, "causal": True},
    "intervals": lambda device, dtype: {"key_intervals": some_intervals(device)},
    "intervals-mask": lambda device, dtype: {"key_intervals": some_intervals(device), "mask": some_mask(device)},
    "dropout": lambda device, dtype: {"dropout_p": 0.3, "causal": True},
    "everything": lambda device, dtype: {
        "key_intervals": some_intervals(device),
        "mask": some_mask(device),
        "bias": numbers(1, HEADS, 1, KEYS, device=device, dtype=dtype),
        "alibi_slopes": numbers(HEADS, device=device).abs() / 4,
        "sinks": numbers(HEADS, device=device),
        "softcap": 5.0,
        "dropout_p": 0.2,
        "window_size": (60, 40),
    },
}


# In float32, which shows more digits, those that come together with others or draw numbers of their own.
IN_FLOAT32 = ("full", "everything")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[pytest.param(name, torch.bfloat16, id=f"{name}-bf16") for name in FEATURES],
        *[
            pytest.param(name, torch.float32, id=f"{name}-fp32", marks=() if name in IN_FLOAT32 else pytest.mark.full)
            for name in FEATURES
        ],
    ],
)
def test_features(device: torch.device, dtype: torch.dtype, name: str) -> None:
    both_ways(*tensors(device, dtype), **FEATURES[name](device, dtype))


@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 200), (200, 1), (32, 64), (33, 65), (37, 129), (129, 37), (200, 330)], ids=str
)
def test_sizes(device: torch.device, dtype: torch.dtype, rows: int, keys: int) -> None:
    q, k, v = check.qkv(1, rows, keys, 2, 64, dtype=dtype, device=device)
    both_ways(q, k, v, causal=True)
    both_ways(q, k, v)


WIDE = pytest.mark.slow
HEAD_DIMS = [
    *[(8, 8), (72, 72), (128, 128), (24, 96)],
    *[pytest.param(*sizes, marks=WIDE) for sizes in [(192, 128), (512, 512)]],
    *[pytest.param(*sizes, marks=pytest.mark.full) for sizes in [(32, 32), (96, 24), (256, 256), (64, 256), (512, 64)]],
]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_head_dims(device: torch.device, head_dim: int, head_dim_v: int) -> None:
    q, k, v = tensors(device, torch.float16, head_dim, head_dim_v=head_dim_v)
    both_ways(q, k, v, causal=True)


@TWO_TYPES
@pytest.mark.parametrize("head_dim", [7, *(pytest.param(size, marks=pytest.mark.full) for size in (33, 61))])
def test_rows_without_alignment(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    both_ways(*tensors(device, dtype, head_dim), causal=True)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_query_groups(device: torch.device, heads_k: int) -> None:
    """dk and dv are sums over the query heads of a group, in one block."""
    both_ways(*tensors(device, torch.bfloat16, num_heads_k=heads_k), causal=True)


def hidden_by(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Options that hide the keys from 140 on from every row."""
    if kind == "mask":
        return {"mask": some_mask(device)}
    if kind == "mask-softcap":
        return {"mask": some_mask(device), "softcap": 2.0}
    if kind == "intervals":
        return {"key_intervals": some_intervals(device).clamp(max=140)}
    bias = numbers(ROWS, KEYS, device=device, dtype=dtype)
    bias[:, 140:] = -math.inf
    return {"bias": bias, "sinks": numbers(HEADS, device=device)}


@TWO_TYPES
@pytest.mark.parametrize("kind", ["mask", "mask-softcap", "intervals", "bias"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_hidden_keys(device: torch.device, dtype: torch.dtype, kind: str, poison: float) -> None:
    """Keys that nobody sees hold NaN or inf: neither the output nor a gradient shows it, and their own is 0."""
    q, k, v = tensors(device, dtype)
    k[:, 140:], v[:, 140:] = poison, poison
    options = hidden_by(kind, device, dtype)
    check.check(q, k, v, algorithm="fa1", **options)
    given = gradients.leaves(q, k, v)
    out = flash_attention(*given.values(), algorithm="fa1", **options)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum(), list(given.values()))
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert not dk[:, 140:].any()
    assert not dv[:, 140:].any()
    clean = gradients.leaves(q, *(x.detach().nan_to_num(0, 0, 0) for x in (k, v)))
    same = flash_attention(*clean.values(), algorithm="fa1", **options)
    expected = torch.autograd.grad(same.float().square().sum(), list(clean.values()))
    assert all(check.identical(a, b) for a, b in zip((dq, dk, dv), expected, strict=True))


@TWO_TYPES
def test_windows_hide_keys(device: torch.device, dtype: torch.dtype) -> None:
    """Keys to the left of every row's window share a block with visible ones."""
    q, k, v = check.qkv(1, 40, 200, 2, 64, dtype=dtype, device=device)
    k[:, :140], v[:, :140] = math.nan, math.nan
    check.check(q, k, v, algorithm="fa1", window_size=(20, 0))
    given = gradients.leaves(q, k, v)
    out = flash_attention(*given.values(), algorithm="fa1", window_size=(20, 0))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), list(given.values())))


@TWO_TYPES
def test_key_blocks_of_few(device: torch.device, dtype: torch.dtype) -> None:
    """Of three key blocks one is seen by one row block, hence one group of warps, and the middle one by nobody."""
    q, k, v = tensors(device, dtype)
    k[:, 64:128], v[:, 64:128] = math.nan, math.nan
    ends = torch.tensor([3, 60], dtype=torch.int32, device=device).repeat(BATCH, HEADS, ROWS, 1)
    ends[:, :, 20:25] = torch.tensor([130, 150], dtype=torch.int32, device=device)
    check.check(q, k, v, algorithm="fa1", key_intervals=ends)


@TWO_TYPES
def test_scores_of_any_size(device: torch.device, dtype: torch.dtype) -> None:
    """m moves by thousands from block to block, and beyond 2^24 its rounding would show."""
    q, k, v = tensors(device, dtype)
    for scale in (1e-3, 30.0, 1e4):
        check.check(q * scale, k, v, algorithm="fa1")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=check.NAMES.get
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed(device: torch.device, dtype: torch.dtype, causal: bool) -> None:
    """An entry without rows, one without keys, rows and keys beyond the last offset."""
    offsets = ([0, 5, 5, 64, 90], [0, 30, 41, 41, 120])
    q, k, v = (x[0] for x in check.qkv(1, 97, 125, HEADS, 64, num_heads_k=2, dtype=dtype, device=device))
    sinks, slopes = numbers(HEADS, device=device), numbers(4, HEADS, device=device).abs()
    check.check_varlen(q, k, v, *offsets, algorithm="fa1", causal=causal)
    check.check_varlen(q, k, v, *offsets, algorithm="fa1", causal=causal, sinks=sinks, alibi_slopes=slopes)
    check.check_varlen(q, k, v, *offsets, algorithm="fa1", causal=causal, softcap=2.0, window_size=(20, 7))
    check.check_varlen(q, k, v, *offsets, algorithm="fa1", causal=causal, dropout_p=0.3)


def test_backward_is_deterministic(device: torch.device) -> None:
    """One block a head: dq's sums have one order."""
    given = gradients.leaves(*tensors(device, torch.bfloat16))
    out = flash_attention(*given.values(), causal=True, algorithm="fa1")
    first, *others = (torch.autograd.grad(out, list(given.values()), out, retain_graph=True) for _ in range(4))
    assert all(check.identical(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_one_launch_each(device: torch.device) -> None:
    """A thread block walks a whole head: forward of q, backward of k."""
    given = gradients.leaves(*tensors(device, torch.bfloat16))
    with record_launches() as records:
        flash_attention(*given.values(), algorithm="fa1").sum().backward()
    assert [(record.kernel, record.grid) for record in records] == [
        ("fa1_forward", (BATCH * HEADS, 1)),
        ("fa1_backward", (BATCH * HEADS_K, 1)),
    ]


# On the host every tile runs, also those that shared memory or registers forbid elsewhere.
FORWARD_TILES = [
    fa1.ForwardTile(16, 16, 1, 64, 1),
    fa1.ForwardTile(16, 64, 2, 32, 1),
    fa1.ForwardTile(32, 128, 8, 64, 1),
    fa1.ForwardTile(16, 64, 12, 32, 3),
    fa1.ForwardTile(16, 512, 16, 64, 4),
]
BACKWARD_TILES = [
    fa1.BackwardTile(16, 16, 2, 16, 1),
    fa1.BackwardTile(32, 32, 8, 16, 1),
    fa1.BackwardTile(32, 64, 8, 16, 2),
    fa1.BackwardTile(64, 128, 8, 16, 2),
    fa1.BackwardTile(32, 256, 8, 32, 2),
]


@pytest.fixture
def only_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a tile the only one there is."""

    def choose(name: str, tile: Any) -> None:
        monkeypatch.setattr(fa1, f"{name}_tiles", lambda problem, arch: iter([tile]))
        fa1.forward_config.cache_clear()
        fa1.backward_config.cache_clear()

    yield choose
    fa1.forward_config.cache_clear()
    fa1.backward_config.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=pytest.mark.full if i % 2 else ()) for i in range(len(FORWARD_TILES))]
)
def test_every_division_of_the_work(only_tile: Any, index: int) -> None:
    """Warps, slabs and groups of any number give the same attention."""
    only_tile("forward", FORWARD_TILES[index])
    only_tile("backward", BACKWARD_TILES[index])
    sizes = (100 + index, 150 + index)  # its own, since calls of one shape share a plan
    q, k, v = check.qkv(1, *sizes, 2, 64, num_heads_k=1, dtype=torch.bfloat16, device=check.CPU)
    mask = torch.rand(sizes, generator=torch.Generator().manual_seed(index)) < 0.7
    both_ways(q, k, v, mask=mask, causal=True, dropout_p=0.2)
    with record_launches() as records:
        flash_attention(q, k, v, mask=mask, causal=True, algorithm="fa1")
    assert records[0].config.tile is not None
    assert records[0].config.tile.num_warps == FORWARD_TILES[index].num_warps


def test_what_does_not_fit_is_refused_by_name() -> None:
    wide = AttentionProblem("fp32", 512, 512, 1024, True, algorithm="fa1")
    for config in (fa1.forward_config, fa1.backward_config):
        with pytest.raises(UnsupportedProblem, match=r"head_dim 512.*64 KB.*7\.5.*16-bit"):
            config(wide, "75")
        with pytest.raises(UnsupportedProblem, match="bfloat16 needs"):
            config(AttentionProblem("bf16", 64, 64, 1024, True, algorithm="fa1"), "75")
        with pytest.raises(UnsupportedProblem, match="at most 512"):
            config(AttentionProblem("bf16", 520, 64, 1024, True, algorithm="fa1"), "90")
    assert fa1.forward_config(wide, "90").shared_bytes <= 227 << 10
