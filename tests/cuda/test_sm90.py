"""The Hopper forward on a GPU of compute capability 9.0: right against float64, and chosen where it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_check import qkv, randn
from hopper_check import CUDA, HALVES, KERNEL, check_hopper, hopper  # noqa: F401

from hf_flash_cupy import execute, flash_attention, sm90
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.reference import attention_reference

SHAPES = [  # batch, heads, key heads, rows, keys
    (1, 2, 2, 64, 64),
    (2, 3, 3, 1000, 1000),
    (1, 2, 2, 256, 1024),
    (2, 8, 2, 333, 333),
    (3, 40, 8, 200, 777),  # several tiles a thread block
    (2, 4, 1, 500, 190),  # causal: rows without keys
    (6, 40, 40, 190, 65),
    (9, 31, 31, 65, 1030),
    (1, 2, 2, 2304, 2304),
    (5, 36, 36, 512, 512),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    for seed, (batch, heads, heads_k, rows, keys) in enumerate(SHAPES):
        q, k, v = qkv(batch, rows, keys, heads, head_dim, dtype=dtype, device=CUDA, num_heads_k=heads_k, seed=seed)
        check_hopper(q, k, v, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("causal", "rows"), [(False, 4200), (True, 8300)])
def test_long_rows(head_dim: int, causal: bool, rows: int) -> None:
    """The settings of long rows: warpgroups that take turns."""
    q, k, v = qkv(1, rows, rows, 1 if causal else 3, head_dim, dtype=torch.bfloat16, device=CUDA)
    check_hopper(q, k, v, causal=causal)


@pytest.mark.parametrize(
    "setting", [sm90.Settings(3, 64, 4, True), sm90.Settings(3, 64, 4, False), sm90.Settings(2, 128, 2, False)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_any_setting_is_right(setting: sm90.Settings, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "settings", lambda *_: setting)
    sm90.select.cache_clear()
    for rows, keys in ((64, 64), (190, 333), (1000, 1000), (700, 190)):
        q, k, v = qkv(3, rows, keys, 40, 128, dtype=torch.bfloat16, device=CUDA)
        check_hopper(q, k, v, causal=causal)
    sm90.select.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_unequal_head_dims(causal: bool) -> None:
    for head_dim, head_dim_v in ((192, 128), (96, 64), (64, 128), (160, 256)):
        for rows, keys in ((333, 333), (1000, 1300), (500, 190)):
            sizes = {"num_heads_k": 2, "head_dim_v": head_dim_v}
            q, k, v = qkv(2, rows, keys, 8, head_dim, dtype=torch.bfloat16, device=CUDA, **sizes)
            check_hopper(q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_score_modifications(head_dim: int, dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.01, -0.1], device=CUDA)
    modifications: list[dict[str, Any]] = [
        {"softcap": 5.0},
        {"alibi_slopes": slopes},
        {"softcap": 20.0, "alibi_slopes": slopes, "sinks": slopes},
        {"softmax_scale": -0.1},
        {"softmax_scale": 0.0},
    ]
    for options in modifications:
        for rows, keys in ((333, 333), (200, 777), (500, 190)):
            q, k, v = qkv(2, rows, keys, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
            check_hopper(q, k, v, **options)
            check_hopper(q, k, v, causal=True, **options)


def test_layouts() -> None:
    """Heads before rows, parts of one tensor, a slice of a longer cache."""
    for dtype in HALVES:
        q, k, v = (randn(2, 4, 300, 128, dtype=dtype, device=CUDA, seed=i).transpose(1, 2) for i in range(3))
        check_hopper(q, k, v, causal=True)
        q, k, v = randn(2, 300, 3, 4, 128, dtype=dtype, device=CUDA).unbind(2)
        check_hopper(q, k, v)
        cache = randn(2, 2, 999, 4, 64, dtype=dtype, device=CUDA)
        check_hopper(
            randn(2, 100, 8, 64, dtype=dtype, device=CUDA), cache[0, :, 5:400], cache[1, :, 5:400], causal=True
        )


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(dtype, scale) for dtype in HALVES for scale in (1.0, 30.0, 1e3)]
    + [(torch.bfloat16, scale) for scale in (1e8, 1e30)],  # float16 eager attention has no numbers for these
    ids=str,
)
def test_large_logits(dtype: torch.dtype, scale: float) -> None:
    """From probabilities that are nearly one-hot to logits whose rounding is larger than one."""
    q, k, v = qkv(1, 500, 900, 2, 128, dtype=dtype, device=CUDA)
    check_hopper(q, k, v, softmax_scale=scale * 128**-0.5)
    check_hopper(q, k, v, softmax_scale=scale * 128**-0.5, causal=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("last", [-774, 774])
def test_growing_logits(dtype: torch.dtype, causal: bool, last: int) -> None:
    """Keys are walked from the last: each block exceeds the ones before, so that the reference keeps rising."""
    if dtype == torch.float16 and last > 0:
        pytest.skip("lse of such logits shows that tensor cores truncate sums of one sign, which fp32 eager rounds")
    q, k, v = qkv(1, 1024, 1024, 2, 128, dtype=dtype, device=CUDA)
    growth = torch.linspace(8, 0.01, 1024, device=CUDA)
    growth = growth if last > 0 else -growth.flip(0)
    check_hopper(q.abs(), (k.abs() * growth[None, :, None, None]).to(dtype), v, causal=causal, softmax_scale=0.5)


def test_equal_huge_logits_weigh_the_same() -> None:
    """Beyond 2^24 a score's own rounding must not depend on the block it stands in."""
    q = torch.ones(1, 128, 1, 128, dtype=torch.bfloat16, device=CUDA)
    k, v = q.expand(1, 128, 1, 128).repeat(1, 8, 1, 1), randn(1, 1024, 1, 128, dtype=torch.bfloat16, device=CUDA)
    out = flash_attention(q, k, v, softmax_scale=1.2345e20)
    expected = v.double().mean(1, keepdim=True).expand_as(out)
    assert (out.double() - expected).abs().max() < 1e-3


def test_sinks() -> None:
    q, k, v = qkv(2, 300, 200, 4, 128, dtype=torch.bfloat16, device=CUDA)
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 80.0], device=CUDA)
    check_hopper(q, k, v, sinks=sinks)
    check_hopper(q, k, v, sinks=sinks, causal=True)


def test_repeats_are_bit_equal() -> None:
    q, k, v = qkv(4, 1500, 1500, 16, 128, dtype=torch.bfloat16, device=CUDA)
    first = flash_attention(q, k, v, causal=True, return_lse=True)
    for _ in range(20):
        again = flash_attention(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_streams_share_no_counter() -> None:
    """Launches of several streams at once: each deals its own tiles."""
    q, k, v = qkv(4, 1000, 1000, 40, 64, dtype=torch.bfloat16, device=CUDA)
    expected = flash_attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(flash_attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(expected, result) for result in results)


def test_graph_beside_calls() -> None:
    q, k, v = qkv(4, 1000, 1000, 40, 64, dtype=torch.bfloat16, device=CUDA)
    expected = flash_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [flash_attention(q, k, v, causal=True) for _ in range(3)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(side):
            beside = flash_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    assert all(torch.equal(expected, result) for result in (*captured, beside))


def test_64_bit_offsets() -> None:
    """A tensor of more than 2^32 bytes, the rows that matter at its end."""
    big = torch.empty(2, 140_000, 64, 128, dtype=torch.bfloat16, device=CUDA)
    assert big.numel() * 2 > 1 << 32
    q, k, v = (big[1:, -300 * (i + 1) : big.shape[1] - 300 * i, -2:] for i in range(3))
    for i, x in enumerate((q, k, v)):
        x.copy_(randn(1, 300, 2, 128, dtype=torch.bfloat16, device=CUDA, seed=i))
    check_hopper(q, k, v, causal=True)


def test_statistics_serve_the_backward() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 300, 400, 4, 128, dtype=torch.bfloat16, device=CUDA))
    with record_launches() as records:
        out = flash_attention(q, k, v, causal=True)
    assert records[0].kernel == KERNEL
    dout = randn(*out.shape, dtype=torch.bfloat16, device=CUDA, seed=9)
    ours = torch.autograd.grad(out, (q, k, v), dout)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = torch.autograd.grad(attention_reference(*exact, causal=True)[0], exact, dout.double())
    for got, expected in zip(ours, truth, strict=True):
        assert (got.double() - expected).norm() < 6e-3 * expected.norm()


def test_what_it_does_not_serve_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of mma.sync, forced or for a bias that is nothing, gives what this one does."""
    q, k, v = qkv(2, 500, 500, 4, 128, dtype=torch.bfloat16, device=CUDA)
    hopper_out = flash_attention(q, k, v)
    with record_launches() as records:
        biased = flash_attention(q, k, v, bias=torch.zeros(1, 1, 500, 500, device=CUDA))
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90")
    execute._local.__dict__.clear()
    with record_launches() as forced_records:
        forced = flash_attention(q, k, v)
    assert records[0].kernel == forced_records[0].kernel == "fa2_forward"
    for other in (biased, forced):
        assert (hopper_out.double() - other.double()).norm() < 5e-3 * other.double().norm()
