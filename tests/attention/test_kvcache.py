"""flash_attention_with_kvcache and flash-attn's drop-in: each entry against float64 on the keys it has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_check import (
    NAMES,
    assert_output,
    compare,
    compare_lse,
    eager_attention,
    identical,
    qkv,
    randn,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_flash_cupy import UnsupportedProblem, flash_attention_with_kvcache
from hf_flash_cupy.flash_attn_interface import flash_attn_with_kvcache
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.reference import attention_reference

CAPACITY = 96
LENGTHS = (0, 37, 64, 90)  # of the entries, before anything is appended


class Cache:
    """Keys and values of entries of different lengths; NaN where there are none."""

    def __init__(
        self, device: torch.device, *, new: int, page_size: int = 0, dtype: torch.dtype = torch.float16, **sizes: Any
    ) -> None:
        heads, head_dim = sizes.get("num_heads_k", 2), sizes.get("head_dim", 64)
        head_dim_v = sizes.get("head_dim_v", head_dim)
        batch = len(LENGTHS)
        self.seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        whole = [randn(batch, CAPACITY, heads, d, dtype=dtype, device=device, seed=d) for d in (head_dim, head_dim_v)]
        self.new = [x[:, :new].flip(1).contiguous() for x in whole] if new else [None, None]
        used = torch.arange(CAPACITY, device=device) < self.seqlens[:, None]
        filled = [x.masked_fill(~used[..., None, None], math.nan) for x in whole]
        self.table = None
        self.parts = filled
        if page_size:
            pages = CAPACITY // page_size
            order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(1))[: batch * pages]
            self.table = order.view(batch, pages).int().to(device)
            self.parts = []
            for x in filled:
                part = torch.full((batch * pages + 3, page_size, *x.shape[2:]), math.nan, dtype=dtype, device=device)
                part[self.table.long()] = x.unflatten(1, (pages, page_size))
                self.parts.append(part)
        self.whole = whole

    def expected(self, entry: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, keys, heads, head_dim) that the rows of an entry attend to."""
        length = LENGTHS[entry]
        k, v = (
            x[entry, :length] if new is None else torch.cat([x[entry, :length], new[entry]])
            for x, new in zip(self.whole, self.new, strict=True)
        )
        return k[None], v[None]

    def entry(self, part: Tensor, entry: int) -> Tensor:
        """What a cache, paged or not, holds of an entry: (keys, heads, head_dim)."""
        return part[entry] if self.table is None else part[self.table[entry].long()].flatten(0, 1)


def compare_entries(out: Tensor, lse: Tensor, q: Tensor, cache: Cache, **options: Any) -> None:
    assert_output(out, (*q.shape[:3], cache.whole[1].shape[3]), q.dtype, q.device)
    assert_output(lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device)
    for i in range(len(LENGTHS)):
        entry = (q[i : i + 1], *cache.expected(i))
        truth, truth_lse = attention_reference(*entry, **options)
        eager, _ = eager_attention(*entry, **options)
        _, eager_lse = eager_attention(*(x.float() for x in entry), **options)
        compare(f"out of entry {i}", out[i : i + 1], truth, eager)
        compare_lse(lse[i : i + 1], truth_lse, eager_lse, q.dtype)


def run(
    device: torch.device, *, seqlen_q: int, new: int, page_size: int = 0, num_splits: int | None = None, **options: Any
) -> None:
    sizes = {name: options.pop(name) for name in ("head_dim", "head_dim_v", "num_heads_k", "dtype") if name in options}
    cache = Cache(device, new=new, page_size=page_size, **sizes)
    q = randn(len(LENGTHS), seqlen_q, 4, cache.whole[0].shape[3], dtype=cache.whole[0].dtype, device=device, seed=9)
    with record_launches() as records:
        out, lse = flash_attention_with_kvcache(
            q,
            *cache.parts,
            *cache.new,
            cache_seqlens=cache.seqlens,
            block_table=cache.table,
            num_splits=num_splits,
            return_lse=True,
            **options,
        )
    kernels = [record.kernel for record in records]
    assert kernels[: 2 if new else 1] == (["fa2_append"] if new else []) + ["fa2_decode"]
    compare_entries(out, lse, q, cache, **{"causal": True, **options})
    for part, whole, appended in zip(cache.parts, cache.whole, cache.new, strict=True):
        for i, length in enumerate(LENGTHS):
            found = cache.entry(part, i)
            assert torch.equal(found[:length], whole[i, :length]), "keys of the cache were changed"
            if appended is not None:
                assert torch.equal(found[length : length + new], appended[i])
            assert found[length + new :].isnan().all(), "something was written behind the new keys"
        if cache.table is not None:
            spare = torch.ones(len(part), dtype=torch.bool)
            spare[cache.table.flatten().long().cpu()] = False
            assert part[spare.to(device)].isnan().all(), "a page of nobody was written to"


@pytest.mark.parametrize("page_size", [0, 16, 48])
@pytest.mark.parametrize(("seqlen_q", "new"), [(1, 0), (1, 1), (5, 5), (2, 6), (40, 3)])
def test_append_and_attend(device: torch.device, seqlen_q: int, new: int, page_size: int) -> None:
    """Rows that are fewer, as many and more than the new keys; an entry without any; many rows (a prefill)."""
    run(device, seqlen_q=seqlen_q, new=new, page_size=page_size)


@pytest.mark.parametrize("page_size", [0, 32])
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(device: torch.device, num_splits: int, page_size: int) -> None:
    run(device, seqlen_q=3, new=2, page_size=page_size, num_splits=num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
def test_options(device: torch.device, page_size: int) -> None:
    sinks = randn(4, dtype=torch.float32, device=device)
    options = {"window_size": (20, 0), "sinks": sinks, "softcap": 5.0, "softmax_scale": -0.2}
    run(device, seqlen_q=2, new=2, page_size=page_size, num_splits=3, **options)
    run(device, seqlen_q=2, new=2, page_size=page_size, causal=False)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, id=name, marks=pytest.mark.full if name == "fp16" else ()) for dtype, name in NAMES.items()],
)
def test_dtypes_and_head_dims(device: torch.device, dtype: torch.dtype) -> None:
    for page_size in (0, 16):
        run(device, seqlen_q=1, new=1, page_size=page_size, head_dim=72, head_dim_v=40, num_heads_k=4, dtype=dtype)
        run(device, seqlen_q=1, new=1, page_size=page_size, head_dim=59, num_heads_k=1, dtype=dtype)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_more_head_dims(device: torch.device, head_dim: int) -> None:
    for page_size in (0, 16):
        run(device, seqlen_q=8, new=1, page_size=page_size, head_dim=head_dim, num_splits=2)


def test_one_length_for_all_and_the_whole_cache(device: torch.device) -> None:
    q, k, v = qkv(2, 1, 50, 4, 64, num_heads_k=2, dtype=torch.float16, device=device)
    whole = flash_attention_with_kvcache(q, k, v)
    truth, _ = attention_reference(q, k, v)
    compare("out", whole, truth, eager_attention(q, k, v)[0])
    k[:, 30:] = math.nan
    part = flash_attention_with_kvcache(q, k, v, cache_seqlens=30)
    truth, _ = attention_reference(q, k[:, :30], v[:, :30])
    compare("out", part, truth, eager_attention(q, k[:, :30], v[:, :30])[0])


@pytest.mark.parametrize("page_size", [0, 16])
def test_nothing_is_written_or_read_outside_of_the_cache(device: torch.device, page_size: int) -> None:
    """Lengths and pages that lead outside: what does not fit is left out, and other memory is never touched."""
    cache = Cache(device, new=4, page_size=page_size)
    framed = [torch.full((len(x) + 2, *x.shape[1:]), 7.0, dtype=x.dtype, device=device) for x in cache.parts]
    inner = [x[1:-1].copy_(part) for x, part in zip(framed, cache.parts, strict=True)]
    lengths = torch.tensor([CAPACITY - 1, CAPACITY, 2**31 - 1, -5], dtype=torch.int32, device=device)
    table = cache.table
    if table is not None:
        table[2] = 2**31 - 1
        table[3] = -(2**31)
    q = randn(len(LENGTHS), 2, 4, 64, dtype=torch.float16, device=device)
    out = flash_attention_with_kvcache(q, *inner, *cache.new, cache_seqlens=lengths, block_table=table)
    assert (out[3] == 0).all()  # a negative length: the entry is absent
    for x in framed:
        assert (x[0] == 7).all()
        assert (x[-1] == 7).all()
    k, _ = inner
    if table is None:
        assert torch.equal(k[0, -1], cache.new[0][0, 0])
        assert torch.equal(k[3].nan_to_num(7), cache.parts[0][3].nan_to_num(7)), "an absent entry was written to"
        assert k[1, -1].isnan().all()


def test_bits_do_not_depend_on_the_batch_nor_on_pages(device: torch.device) -> None:
    q = randn(len(LENGTHS), 1, 4, 64, dtype=torch.float16, device=device)
    flat, paged = Cache(device, new=0), Cache(device, new=0, page_size=16)
    outs = [
        flash_attention_with_kvcache(q, *x.parts, cache_seqlens=x.seqlens, block_table=x.table, num_splits=2)
        for x in (flat, paged)
    ]
    alone = [
        flash_attention_with_kvcache(
            q[i : i + 1], *(x[i : i + 1] for x in flat.parts), cache_seqlens=flat.seqlens[i : i + 1], num_splits=2
        )
        for i in range(len(LENGTHS))
    ]
    assert identical(outs[0], outs[1])
    assert identical(outs[0], torch.cat(alone))


@pytest.mark.gpu
def test_a_graph_is_replayed_while_the_cache_grows() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cache = Cache(device, new=1)
    q = randn(len(LENGTHS), 1, 4, 64, dtype=torch.float16, device=device)

    def step() -> Tensor:
        return flash_attention_with_kvcache(q, *cache.parts, *cache.new, cache_seqlens=cache.seqlens)

    expected = []
    begin = cache.seqlens.clone()
    for _ in range(4):
        expected.append(step())
        cache.seqlens += 1
    cache.seqlens.copy_(begin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
        cache.seqlens += 1
    for want in expected:
        graph.replay()
        assert identical(out, want)


class TestDropIn:
    """flash-attn's arguments beyond our own; its own tests are in tests/flash_attn."""

    def test_chosen_entries_and_left_padding(self, device: torch.device) -> None:
        q, k, v = qkv(2, 1, 80, 4, 64, num_heads_k=2, dtype=torch.float16, device=device)
        chosen = torch.tensor([3, 1], dtype=torch.int32, device=device)
        begin, end = (5, 40), (60, 80)
        caches = []
        for x in (k, v):
            cache = torch.full((4, *x.shape[1:]), math.nan, dtype=x.dtype, device=device)
            for i, place in enumerate(chosen.tolist()):
                cache[place, begin[i] : end[i]] = x[i, begin[i] : end[i]]
            caches.append(cache)
        int32 = {"dtype": torch.int32, "device": device}
        slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)
        out, lse = flash_attn_with_kvcache(
            q,
            *caches,
            cache_seqlens=torch.tensor(end, **int32),
            cache_batch_idx=chosen,
            cache_leftpad=torch.tensor(begin, **int32),
            alibi_slopes=slopes,
            return_softmax_lse=True,
        )
        for i in range(2):
            entry = (q[i : i + 1], *(x[i : i + 1, begin[i] : end[i]] for x in (k, v)))
            truth, truth_lse = attention_reference(*entry, alibi_slopes=slopes)
            compare("out", out[i : i + 1], truth, eager_attention(*entry, alibi_slopes=slopes)[0])
            torch.testing.assert_close(lse[i : i + 1].double(), truth_lse, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("causal", [False, True])
    def test_rotary(self, device: torch.device, causal: bool, interleaved: bool) -> None:
        cache = Cache(device, new=2, dtype=torch.float32)
        q = randn(len(LENGTHS), 2, 4, 64, dtype=torch.float32, device=device)
        angles = torch.rand(CAPACITY, 16, generator=torch.Generator().manual_seed(0)).to(device)

        def turned(x: Tensor, first: int, step: int) -> Tensor:
            """x (seqlen, heads, head_dim) by complex numbers."""
            a, b = (x[..., 0:32:2], x[..., 1:32:2]) if interleaved else (x[..., :16], x[..., 16:32])
            places = first + step * torch.arange(len(x), device=device)
            turns = torch.polar(torch.ones_like(angles), angles)[places][:, None]
            z = torch.complex(a.contiguous(), b.contiguous()) * turns
            pair = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
            return torch.cat([pair, x[..., 32:]], -1)

        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
        given = [x.clone() for x in cache.new]
        out = flash_attn_with_kvcache(q, *cache.parts, *given, cache_seqlens=cache.seqlens, causal=causal, **tables)
        cache.new[0] = torch.stack([turned(x, n, 1) for x, n in zip(cache.new[0], LENGTHS, strict=True)])
        q = torch.stack([turned(x, n, int(causal)) for x, n in zip(q, LENGTHS, strict=True)])
        for i, length in enumerate(LENGTHS):
            truth, _ = attention_reference(q[i : i + 1], *cache.expected(i), causal=causal)
            torch.testing.assert_close(out[i : i + 1].double(), truth, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(cache.parts[0][i, length : length + 2], cache.new[0][i], rtol=1e-5, atol=1e-6)


CPU = torch.device("cpu")
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "v alone": ({"v": torch.zeros(2, 1, 2, 64)}, ValueError, "k is None"),
    "no length": ({"cache_seqlens": None, "k": torch.zeros(2, 1, 2, 64), "v": torch.zeros(2, 1, 2, 64)}, ValueError,
                  "cache_seqlens is None"),
    "int64": ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, TypeError, "cache_seqlens is torch.int64"),
    "too few": ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"cache_seqlens has shape \(3,\)"),
    "too long": ({"cache_seqlens": 33}, ValueError, "cache_seqlens=33: the cache holds 32"),
    "no room": ({"cache_seqlens": 32, "k": torch.zeros(2, 1, 2, 64), "v": torch.zeros(2, 1, 2, 64)}, ValueError,
                "1 are to be appended"),
    "k's heads": ({"k": torch.zeros(2, 1, 4, 64), "v": torch.zeros(2, 1, 2, 64)}, ValueError, "k has shape"),
    "page size": ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "k_cache": torch.zeros(9, 24, 2, 64),
                   "v_cache": torch.zeros(9, 24, 2, 64)}, UnsupportedProblem, "multiples of 16"),
    "splits": ({"num_splits": 0}, ValueError, "num_splits=0"),
    "batch": ({"k_cache": torch.zeros(3, 32, 2, 64), "v_cache": torch.zeros(3, 32, 2, 64)}, ValueError, "batch size 2"),
    "dtypes": ({"v_cache": torch.zeros(2, 32, 2, 64).half()}, TypeError, "k_cache is torch.float32, v_cache"),
    "layout": ({"k_cache": torch.zeros(2, 32, 64, 2).mT}, ValueError, "k_cache: its last dimension"),
    "gradient": ({"q": torch.zeros(2, 1, 4, 64, requires_grad=True)}, UnsupportedProblem, "q requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument(case: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 64),
        "k_cache": torch.zeros(2, 32, 2, 64),
        "v_cache": torch.zeros(2, 32, 2, 64),
        "cache_seqlens": 5,
    }
    changes, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        flash_attention_with_kvcache(**arguments | changes)


def test_drop_in_errors() -> None:
    q, cache, table = torch.zeros(2, 1, 4, 64), torch.zeros(9, 16, 2, 64), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match="cache_leftpad with block_table"):
        flash_attn_with_kvcache(q, cache, cache.clone(), block_table=table, cache_leftpad=table[:, 0])
    with pytest.raises(ValueError, match="k and v are needed"):
        flash_attn_with_kvcache(q, cache[:2], cache[2:4], rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(9, 8))


class TestCompiled:
    """One graph, in which a call with a cache is an operator whose schema says what it writes."""

    @pytest.mark.parametrize("page_size", [0, 16])
    def test_steps_of_one_graph(self, device: torch.device, page_size: int) -> None:
        """A static cache that grows in place: nothing is compiled again, and caches and outputs are eager's."""
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        q = randn(len(LENGTHS), 1, 4, 64, dtype=torch.float16, device=device)

        def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Tensor:
            given = {"cache_seqlens": seqlens, "block_table": cache.table}
            out = flash_attention_with_kvcache(q * 2, k_cache, v_cache, k, v, **given)
            seqlens += 1
            return out + k_cache.nan_to_num(0).sum()  # what is read behind the operator is what it wrote

        found = []
        for function in (step, torch.compile(step, backend=counter, fullgraph=True)):
            cache = Cache(device, new=1, page_size=page_size)
            outs = [function(q, *cache.parts, *cache.new, cache.seqlens) for _ in range(3)]
            found.append((outs, [x.nan_to_num(7) for x in cache.parts]))
        assert counter.frame_count == 1
        for ours, theirs in zip(*found, strict=True):
            assert all(identical(a, b) for a, b in zip(ours, theirs, strict=True))
        torch.compiler.reset()
