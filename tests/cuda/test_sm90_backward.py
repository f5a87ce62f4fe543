"""The Hopper backward on a GPU of compute capability 9.0: right against float64, and chosen where it serves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from attention_check import qkv, randn
from hopper_check import CUDA, HALVES, hopper  # noqa: F401
from hopper_gradients import (
    KERNELS,
    SHAPES,
    check_hidden_keys_gradients,
    check_hopper_gradients,
    check_hopper_shapes,
    check_hopper_windows,
    check_nothing_seen,
    forget_backward_plans,
    packed,
    visibilities,
)
from torch import Tensor

from hf_flash_cupy import execute, flash_attention, tensormap
from hf_flash_cupy.call import Call, Options
from hf_flash_cupy.launch import record_launches
from hf_flash_cupy.reference import attention_reference

BF16, FP16 = HALVES
MORE_SHAPES = [  # batch, heads, key heads, rows, keys
    *SHAPES,
    (2, 3, 3, 1000, 1000),
    (1, 2, 2, 256, 1024),
    (3, 40, 8, 200, 777),
    (2, 4, 1, 500, 190),  # causal: rows without keys
    (9, 31, 31, 65, 1030),
    (1, 2, 2, 2304, 2304),
    (5, 36, 36, 512, 512),
]


@pytest.fixture(autouse=True)
def fresh_backward_plans(hopper: None) -> Iterator[None]:  # noqa: F811
    forget_backward_plans(CUDA)
    yield
    forget_backward_plans(CUDA)


def gradients(tensors: tuple[Tensor, ...], dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    given = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(flash_attention(*given, **options), given, dout)


def check_some_heads(got: tuple[Tensor, ...], tensors: tuple[Tensor, ...], dout: Tensor, **options: bool) -> None:
    """The gradients of the first and the last head of keys, and of the query heads that share it, against float64."""
    q, k, v = tensors
    group = q.shape[2] // k.shape[2]
    for entry, head_k in ((0, 0), (q.shape[0] - 1, k.shape[2] - 1)):
        of_q, of_k = slice(head_k * group, head_k * group + group), slice(head_k, head_k + 1)
        exact = [
            x[entry : entry + 1, :, part].double().requires_grad_() for x, part in ((q, of_q), (k, of_k), (v, of_k))
        ]
        out = attention_reference(*exact, **options)[0]
        truth = torch.autograd.grad(out, exact, dout[entry : entry + 1, :, of_q].double())
        for found, expected, part in zip(got, truth, (of_q, of_k, of_k), strict=True):
            assert relative_error(found[entry : entry + 1, :, part], expected) < (6e-3 if q.dtype == BF16 else 1e-3)
        del exact, out, truth
    assert all(x.isfinite().all() for x in got)


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 200, 256])
def test_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check_hopper_shapes(MORE_SHAPES, head_dim, dtype, CUDA, causal=causal, weigh_lse=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_rows(head_dim: int, causal: bool) -> None:
    """Many steps and many thread blocks: what drifts apart or wraps round shows."""
    tensors = qkv(1, 6000, 6100, 2, head_dim, dtype=BF16, device=CUDA, num_heads_k=1)
    check_hopper_gradients(*tensors, causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_a_full_card(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """More thread blocks than run at once; of some heads the gradients are compared with float64."""
    batch, heads, rows = 4, 32, 4096
    q, k, v = qkv(batch, rows, rows, heads, head_dim, dtype=dtype, device=CUDA, num_heads_k=heads // group)
    dout = randn(*q.shape, dtype=dtype, device=CUDA, seed=9)
    check_some_heads(gradients((q, k, v), dout, causal=True), (q, k, v), dout, causal=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e8])
def test_large_logits(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    """Where the rounding of lse would show, probabilities come from its parts."""
    if dtype == FP16 and scale > 1e3:
        pytest.skip("float16 eager attention has no numbers for these")
    tensors = qkv(1, 500, 900, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
    for causal in (False, True):
        check_hopper_gradients(*tensors, softmax_scale=scale * head_dim**-0.5, causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_large_gradients(head_dim: int, dtype: torch.dtype) -> None:
    """float16 overflows only where dq and dk do."""
    tensors = qkv(1, 400, 700, 2, head_dim, dtype=dtype, device=CUDA)
    check_hopper_gradients(*tensors, dout_scale=1e3, softmax_scale=1e-3)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_keys_whose_scores_are_all_negative(head_dim: int) -> None:
    """Keys beyond the end score 0, far above lse."""
    q, k, v = qkv(1, 300, 170, 2, head_dim, dtype=BF16, device=CUDA)
    check_hopper_gradients(q.abs(), -k.abs(), v, softmax_scale=4.0)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_layouts(head_dim: int) -> None:
    """Heads before rows, parts of one tensor, a slice of a longer one."""
    for dtype in HALVES:
        q, k, v = (randn(2, 4, 300, head_dim, dtype=dtype, device=CUDA, seed=i).transpose(1, 2) for i in range(3))
        check_hopper_gradients(q, k, v, causal=True)
        q, k, v = randn(2, 300, 3, 4, head_dim, dtype=dtype, device=CUDA).unbind(2)
        check_hopper_gradients(q, k, v)
        longer = randn(2, 2, 999, 4, head_dim // 2, dtype=dtype, device=CUDA)
        q = randn(2, 100, 8, head_dim // 2, dtype=dtype, device=CUDA)
        check_hopper_gradients(q, longer[0, :, 5:400], longer[1, :, 5:400], causal=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_bounds_to_the_right(head_dim: int) -> None:
    q, k, v = qkv(1, 660, 700, 2, head_dim, dtype=BF16, device=CUDA)
    for right in (0, 17, 400, 900):
        check_hopper_gradients(q, k, v, window_size=(-1, right))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_sinks(head_dim: int) -> None:
    q, k, v = qkv(2, 300, 200, 4, head_dim, dtype=BF16, device=CUDA)
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 80.0], device=CUDA)
    check_hopper_gradients(q, k, v, sinks=sinks)
    check_hopper_gradients(q, k, v, sinks=sinks, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats(head_dim: int) -> None:
    """dk and dv are bit-equal from run to run; dq's sums come in any order, and differ by their rounding."""
    tensors = qkv(4, 1500, 1500, 16, head_dim, dtype=BF16, device=CUDA, num_heads_k=4)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    dq, dk, dv = gradients(tensors, dout, causal=True)
    for _ in range(20):
        again = gradients(tensors, dout, causal=True)
        assert torch.equal(dk, again[1])
        assert torch.equal(dv, again[2])
        assert relative_error(again[0], dq) < 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 128, 192, 256])
def test_deterministic_shapes(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check_hopper_shapes(MORE_SHAPES, head_dim, dtype, CUDA, causal=causal, weigh_lse=True, deterministic=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "heads_k", "rows", "keys"),
    [
        (4, 32, 8, 4096, 4096),  # 1,024 thread blocks
        (16, 16, 16, 1024, 1024),
        (1, 8, 8, 8192, 8192),
        (1, 16, 1, 5000, 6100),  # one head of keys: all of its 48 key blocks at once
        (3, 6, 2, 3000, 1000),
    ],
)
def test_deterministic(batch: int, heads: int, heads_k: int, rows: int, keys: int, head_dim: int, causal: bool) -> None:
    """Bit-equal from run to run, with more thread blocks than run at once, and fewer; and right."""
    tensors = qkv(batch, rows, keys, heads, head_dim, dtype=BF16, device=CUDA, num_heads_k=heads_k)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    with record_launches() as records:
        first = gradients(tensors, dout, causal=causal, deterministic=True)
    assert [record.kernel for record in records[1:]] == KERNELS
    for _ in range(30):
        again = gradients(tensors, dout, causal=causal, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
    by_default = gradients(tensors, dout, causal=causal)
    assert all(relative_error(x, y) < 1e-3 for x, y in zip(first, by_default, strict=True))
    if heads_k > 1:  # float64 scores of 16 heads would take 4 GB
        check_some_heads(first, tensors, dout, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_deterministic_beside_others(head_dim: int) -> None:
    """Other kernels take multiprocessors away and give them back: thread blocks start at other times."""
    tensors = qkv(4, 2000, 2000, 16, head_dim, dtype=BF16, device=CUDA, num_heads_k=4)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    expected = gradients(tensors, dout, causal=True, deterministic=True)
    side, busy = torch.cuda.Stream(), randn(4096, 4096, dtype=BF16, device=CUDA, seed=1)
    torch.cuda.synchronize()
    for i in range(30):
        with torch.cuda.stream(side):
            for _ in range(i % 5):
                busy = (busy @ busy).clamp(-1, 1)
        again = gradients(tensors, dout, causal=True, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))
    torch.cuda.synchronize()


def test_streams_and_graphs() -> None:
    """Calls of several streams at once, beside those of a graph."""
    tensors = qkv(2, 1000, 1000, 8, 64, dtype=BF16, device=CUDA)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    expected = gradients(tensors, dout, causal=True)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gradients(tensors, dout, causal=True)
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(side):
            beside = gradients(tensors, dout, causal=True)
        torch.cuda.synchronize()
        for results in (captured, beside):
            assert all(torch.equal(x, y) for x, y in zip(results[1:], expected[1:], strict=True))
            assert relative_error(results[0], expected[0]) < 1e-3


def test_a_thread_that_has_met_no_device() -> None:
    """As autograd's at its first call. The driver makes tensor maps only for one that has the device's context."""
    backward = partial(execute.backward, needs=[True] * 3 + [False] * 2, deterministic=False)
    call = Call(*qkv(1, 200, 200, 2, 64, dtype=BF16, device=CUDA), {}, Options(causal=True))
    out, lse, statistics = execute.forward_for_backward(call)
    tensormap.encode.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(backward, call, out, lse, statistics, out, None).result()
    assert torch.equal(found[1], backward(call, out, lse, statistics, out, None)[1])
    tensormap.encode.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(execute.forward, call, need_lse=False).result()[0], out)


def test_64_bit_offsets() -> None:
    """Tensors of more than 2^32 bytes, the rows that matter at their end."""
    big = torch.empty(2, 140_000, 64, 128, dtype=BF16, device=CUDA)
    assert big.numel() * 2 > 1 << 32
    tensors = tuple(big[1:, -300 * (i + 1) : big.shape[1] - 300 * i, -2:] for i in range(3))
    for i, x in enumerate(tensors):
        x.copy_(randn(1, 300, 2, 128, dtype=BF16, device=CUDA, seed=i))
    check_hopper_gradients(*tensors, causal=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [300, 1100])
@pytest.mark.parametrize("name", visibilities(300, torch.device("cpu")))
def test_what_rows_see(name: str, rows: int, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, rows, rows, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
    check_hopper_gradients(q, k, v, weigh_lse=True, **visibilities(rows, CUDA)[name])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_that_few_rows_see(head_dim: int, dtype: torch.dtype) -> None:
    check_hopper_windows(head_dim, dtype, CUDA)
    check_nothing_seen(head_dim, dtype, CUDA)
    check_hidden_keys_gradients(head_dim, dtype, CUDA)
    check_hidden_keys_gradients(head_dim, dtype, CUDA, window_size=(20, 0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_row_blocks(head_dim: int) -> None:
    """More than a warp reads about at once, of one list and of one a head."""
    rows = 33 * 128 + 50
    q, k, v = qkv(1, rows, rows, 2, head_dim, dtype=BF16, device=CUDA, num_heads_k=1)
    both = torch.stack([packed([1000, rows - 1200, 200], CUDA), packed([rows - 70, 70], CUDA)])
    both[1, 200:-200, 1] = 0
    check_hopper_gradients(q, k, v, key_intervals=both[:1])
    check_hopper_gradients(q, k, v, key_intervals=both[None])
    check_hopper_gradients(q, k, v, window_size=(1000, 0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
def test_large_logits_of_documents(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    tensors = qkv(1, 450, 450, 4, head_dim, dtype=dtype, device=CUDA, num_heads_k=2)
    intervals = packed([170, 280], CUDA)
    intervals[90:110] = 0
    options = {"softmax_scale": scale * head_dim**-0.5, "key_intervals": intervals}
    check_hopper_gradients(*tensors, **options)
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 1000.0], device=CUDA)
    check_hopper_gradients(*tensors, sinks=sinks, **options)


@pytest.mark.parametrize(("head_dim", "heads", "heads_k"), [(64, 32, 8), (128, 16, 16), (256, 8, 4)])
@pytest.mark.parametrize("options", ["documents", "window"])
def test_a_full_card_against_mma(
    options: str, head_dim: int, heads: int, heads_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 documents of 1,024 tokens, and a window as wide; dk and dv are bit-equal from run to run."""
    tensors = qkv(1, 16384, 16384, heads, head_dim, dtype=BF16, device=CUDA, num_heads_k=heads_k)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    asked = {"documents": {"key_intervals": packed([1024] * 16, CUDA)}, "window": {"window_size": (1023, 0)}}[options]
    ours = gradients(tensors, dout, **asked)
    for _ in range(5):
        again = gradients(tensors, dout, **asked)
        assert torch.equal(ours[1], again[1])
        assert torch.equal(ours[2], again[2])
        assert relative_error(ours[0], again[0]) < 1e-3
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90")
    execute._local.__dict__.clear()
    forget_backward_plans(CUDA)
    with record_launches() as records:
        theirs = gradients(tensors, dout, **asked)
    assert not {record.kernel for record in records} & set(KERNELS)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < 5e-3


@pytest.mark.parametrize("head_dim", [128, 256])
def test_what_it_does_not_serve_agrees(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of mma.sync, forced, give what these do, in whichever order dq is summed."""
    tensors = qkv(2, 500, 500, 4, head_dim, dtype=BF16, device=CUDA, num_heads_k=2)
    dout = randn(*tensors[0].shape, dtype=BF16, device=CUDA, seed=9)
    with record_launches() as records:
        ours = gradients(tensors, dout, causal=True)
    assert [record.kernel for record in records[1:]] == KERNELS
    with record_launches() as records:
        deterministic = gradients(tensors, dout, causal=True, deterministic=True)
    assert [record.kernel for record in records[1:]] == KERNELS
    monkeypatch.setenv("HF_FLASH_CUPY_ARCH", "90")
    execute._local.__dict__.clear()
    forget_backward_plans(CUDA)
    with record_launches() as records:
        forced = gradients(tensors, dout, causal=True)
        forced_too = gradients(tensors, dout, causal=True, deterministic=True)
    assert not {record.kernel for record in records} & set(KERNELS)
    for mine in (ours, deterministic):
        for other in (forced, forced_too):
            assert all(relative_error(x, y) < 5e-3 for x, y in zip(mine, other, strict=True))
