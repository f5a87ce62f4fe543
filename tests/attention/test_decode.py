"""Few rows against many keys: the decode kernel and the combination of splits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_check import NAMES, check, identical, qkv, randn
from torch import Tensor

from hf_flash_cupy import decode, execute, explain, flash_attention
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.problem import AttentionProblem

KEYS = 700  # not a multiple of any block of keys


@contextmanager
def splits(count: int | None) -> Iterator[None]:
    """Every call's keys are split into ``count`` parts; None: as many as are chosen."""
    with pytest.MonkeyPatch.context() as patch:
        if count is not None:
            patch.setattr(decode, "num_splits", lambda *_: count)
        yield


def forget_plans() -> None:
    """Plans remember their number of splits."""
    vars(execute._local).clear()


def run(q: Tensor, k: Tensor, v: Tensor, count: int | None = None, **options: Any) -> float:
    """:func:`check` with a number of splits, through the decode kernel and no other."""
    forget_plans()
    with splits(count), record_launches() as records:
        worst = check(q, k, v, **options)
    assert [record.kernel for record in records] == ["fa2_decode"]
    forget_plans()
    return worst


@pytest.mark.parametrize("count", [1, 2, 3, 11, 200])
def test_splits(device: torch.device, count: int) -> None:
    """200 are more than there are blocks of keys: most have none."""
    run(*qkv(2, 1, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device), count)


@pytest.mark.parametrize("num_heads_k", [8, 1])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
def test_rows(device: torch.device, seqlen_q: int, num_heads_k: int) -> None:
    """Rows of one tile, of a tile that is not full, and of several; the last rows see more keys than the first."""
    q, k, v = qkv(2, seqlen_q, KEYS, 8, 64, num_heads_k=num_heads_k, dtype=torch.float16, device=device)
    run(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("head_dims", [(72, 72), (128, 128), (80, 40)], ids=str)
def test_head_dims(device: torch.device, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    head_dim, head_dim_v = head_dims
    q, k, v = qkv(1, 1, KEYS, 6, head_dim, num_heads_k=3, head_dim_v=head_dim_v, dtype=dtype, device=device)
    run(q, k, v, 3)


@pytest.mark.full
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("head_dim", [16, 59, 96, 256, 512])
def test_more_head_dims(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    for count in (1, 3):
        run(*qkv(2, 2, KEYS, 4, head_dim, num_heads_k=2, dtype=dtype, device=device), count, causal=True)


def features(device: torch.device) -> dict[str, dict[str, Any]]:
    left_padding = torch.arange(KEYS, device=device) >= torch.tensor([[0], [577]], device=device)
    intervals = torch.tensor([[[10, 300], [0, 0]], [[250, 700], [699, 900]]], dtype=torch.int32, device=device)
    bias = randn(1, 8, 1, KEYS, dtype=torch.float16, device=device, seed=7)
    bias[..., 100:420] = -torch.inf
    return {
        "window": {"causal": True, "window_size": (130, 0)},
        "sinks": {"sinks": randn(8, dtype=torch.float32, device=device, seed=5) * 3},
        "softcap": {"softcap": 2.0},
        "left padding": {"mask": left_padding[:, None, None, :]},
        "no key": {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).expand(2, 1, 2, KEYS)},
        "holes": {"mask": randn(2, 8, 2, KEYS, dtype=torch.float32, device=device, seed=6) > 0},
        "intervals": {"key_intervals": intervals[:, None], "causal": True},
        "bias": {"bias": bias},
        "bias of float32": {"bias": bias.float(), "softmax_scale": -0.3},
        "slopes": {"alibi_slopes": torch.arange(1, 9, device=device) / 16, "causal": True},
    }


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", features(torch.device("cpu")))
def test_features(device: torch.device, name: str, count: int) -> None:
    q, k, v = qkv(2, 2, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device)
    run(q, k, v, count, **features(device)[name])


@pytest.mark.parametrize("count", [1, 3])
def test_everything_at_once(device: torch.device, count: int) -> None:
    asked = features(device)
    names = ("window", "sinks", "softcap", "holes", "intervals", "bias", "slopes")
    options = {key: value for name in names for key, value in asked[name].items()}
    run(*qkv(2, 2, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device), count, **options)


@pytest.mark.parametrize("form", ["mask", "intervals", "bias"])
def test_unfilled_slots_of_a_static_cache_hold_nan(device: torch.device, form: str) -> None:
    q, k, v = qkv(2, 1, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device)
    filled = torch.tensor([333, 601], device=device)
    hidden = torch.arange(KEYS, device=device) >= filled[:, None]
    k[hidden], v[hidden] = math.nan, math.inf
    mask = ~hidden[:, None, None, :]
    zero = torch.zeros_like(filled)
    given = {
        "mask": {"mask": mask},
        "intervals": {"key_intervals": torch.stack([zero, filled], -1).int()[:, None, None]},
        "bias": {"bias": torch.zeros(mask.shape, device=device, dtype=q.dtype).masked_fill(~mask, -torch.inf)},
    }[form]
    run(q, k, v, 3, **given)


def test_layouts(device: torch.device) -> None:
    """A cache of (batch, heads, seqlen, head_dim), a part of it, rows that start anywhere, one cache for all."""
    q, k, v = qkv(2, 1, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    run(q, *by_head, 3)
    run(q, *(x[:, 3:603] for x in by_head), 3)
    odd = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in (k, v)]
    run(q, *odd, 3)
    run(q, k[:1], v[:1], 3)


def test_large_logits(device: torch.device) -> None:
    """Splits are combined relative to their maxima, not by one rounded logarithm."""
    q, k, v = qkv(1, 1, KEYS, 4, 64, dtype=torch.float32, device=device)
    run(q, k, v, 4, softmax_scale=30000.0)


def test_the_bits_of_a_row_do_not_depend_on_the_batch_beside_it(device: torch.device) -> None:
    q, k, v = qkv(4, 1, KEYS, 8, 64, num_heads_k=2, dtype=torch.float16, device=device)
    forget_plans()
    with splits(5):
        together = flash_attention(q, k, v)
        alone = torch.cat([flash_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(4)])
    forget_plans()
    assert identical(together, alone)


def test_gradients_follow_a_split_forward(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, KEYS, 4, 64, num_heads_k=2, dtype=torch.float32, device=device))
    with record_launches() as records:
        out = flash_attention(q, k, v)
    assert records[0].kernel == "fa2_decode"
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 8
    truth = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double().repeat_interleave(2, 2))
    for ours, theirs in zip((dq, dk, dv), torch.autograd.grad(truth.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_streams_and_graphs_have_their_own_parts() -> None:
    """Split calls on two streams while a graph's are replayed on a third: nobody combines another's parts."""
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = [
        [randn(1, rows, 8 if rows == 1 else 2, 64, dtype=torch.float16, device=device, seed=10 * i + j)
         for j, rows in enumerate((1, 8192, 8192))]
        for i in range(3)
    ]  # fmt: skip
    expected = [flash_attention(*x) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [flash_attention(*inputs[2]) for _ in range(4)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[tuple[int, Tensor]] = []
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs.append((i, flash_attention(*inputs[i])))
        graph.replay()
    torch.cuda.synchronize()
    assert all(identical(out, expected[i]) for i, out in outs)
    assert all(identical(out, expected[2]) for out in captured)


class TestNumberOfSplits:
    """Thread blocks without splitting, those the GPU holds at once, steps over the keys."""

    def test_one_sequence_fills_the_gpu(self) -> None:
        count = decode.num_splits(8, 132, 512)
        assert 120 <= 8 * count <= 132

    def test_enough_sequences_are_not_split(self) -> None:
        assert decode.num_splits(1320, 132, 64) == 1
        assert decode.num_splits(132, 132, 64) == 1

    def test_no_split_is_without_keys(self) -> None:
        for blocks in (1, 2, 7, 100):
            count = decode.num_splits(1, 132, blocks)
            assert count <= blocks
            assert (count - 1) * -(-blocks // count) < blocks
        assert decode.num_splits(1, 132, 0) == 1

    def test_a_window_counts_only_what_it_shows(self, device: torch.device) -> None:
        q, k, v = qkv(1, 1, 4096, 4, 64, num_heads_k=1, dtype=torch.float16, device=device)
        with record_launches() as records:
            flash_attention(q, k, v)
            flash_attention(q, k, v, causal=True, window_size=(100, 0))
        grids = [record.grid[0] for record in records if record.kernel == "fa2_decode"]
        assert grids[1] < grids[0]


def test_every_architecture_and_head_size_has_a_tile() -> None:
    """But fp32, and the widest heads of Turing, which the forward kernel serves."""
    for arch in ("75", "80", "86", "89", "90", "100", "120"):
        for head_dim in (16, 64, 128, 192, 256, 512):
            problem = AttentionProblem("fp16", head_dim, head_dim, 1, vector=True)
            if (arch, head_dim) != ("75", 512):
                assert decode.choose(problem, arch, rows=4) is not None, (arch, head_dim)


def test_explain_names_the_kernel_and_its_splits(device: torch.device) -> None:
    q, k, v = qkv(1, 1, 4096, 8, 64, num_heads_k=2, dtype=torch.float16, device=device)
    text = explain(q, k, v)
    assert "fa2_decode" in text
    assert "splits" in text


class TestGrowingCaches:
    """Calls that differ in the number of keys share kernels and struct: only numbers are written anew."""

    @staticmethod
    def grow(device: torch.device, lengths: list[int], heads_first: bool = False, **options: Any) -> None:
        whole = qkv(2, 1, max(lengths), 4, 64, num_heads_k=2, dtype=torch.float16, device=device)
        forget_plans()
        for length in lengths:
            q, k, v = whole[0], *(x[:, :length].contiguous() for x in whole[1:])
            if heads_first:
                k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
            mask = options.get("mask")
            check(q, k, v, **options | ({} if mask is None else {"mask": mask[..., -length:].contiguous()}))
        forget_plans()

    @pytest.mark.parametrize("heads_first", [False, True])
    def test_lengths(self, device: torch.device, heads_first: bool) -> None:
        """To and fro, and across the length from which the decode kernel serves, with other numbers of splits."""
        self.grow(device, [510, 511, 512, 513, 700, 512, 1500, 64, 1500], heads_first)

    def test_window_and_left_padding(self, device: torch.device) -> None:
        """A window wider than the first lengths; a mask that grows with the keys."""
        padding = torch.arange(800, device=device) >= torch.tensor([[0], [500]], device=device)
        for lengths in ([560, 600, 800], [90, 100, 101]):
            self.grow(device, lengths, causal=True, window_size=(580 if lengths[0] > 100 else 99, 0))
        self.grow(device, [560, 561, 800], mask=padding[:, None, None, :])

    def test_nothing_is_checked_or_built_twice(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = qkv(1, 1, 600, 4, 64, num_heads_k=2, dtype=torch.float16, device=device)
        forget_plans()
        built = []
        build = execute._build
        monkeypatch.setattr(execute, "_build", lambda call: built.append(call) or build(call))
        for length in range(590, 600):
            flash_attention(q, k[:, :length], v[:, :length], causal=True)
        assert len(built) == 1
        with pytest.raises(ValueError, match="need the same seqlen"):
            flash_attention(q, k[:, :580], v[:, :581], causal=True)
        forget_plans()

    def test_rows_that_start_elsewhere(self, device: torch.device) -> None:
        """Keys that lose or gain their alignment on the way take another kernel."""
        q, k, v = qkv(1, 1, 600, 4, 64, num_heads_k=2, dtype=torch.float16, device=device)
        odd = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in (k, v)]
        forget_plans()
        for keys in (580, 590, 600):
            for pair in ((k, v), odd):
                check(q, *(x[:, :keys] for x in pair))
        forget_plans()
