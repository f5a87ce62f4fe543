"""Which device and stream a kernel runs on, and capture into graphs (cases D01, D03, D05)."""

from __future__ import annotations

from functools import partial

import attention_check as check
import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention, flash_attention_varlen, flash_attention_with_kvcache

DEVICE = torch.device("cuda")
SLEEP = 200_000_000  # cycles, about 0.1 s


def inputs(
    dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return check.qkv(2, 300, 300, 8, 64, num_heads_k=2, dtype=dtype, device=device, seed=seed)


def truth(tensors: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Tensor:
    return check.attention_reference(*tensors, causal=causal)[0]


def close(out: Tensor, tensors: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> None:
    eager, _ = check.eager_attention(*tensors, causal=causal)
    check.compare("out", out, truth(tensors, causal), eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_the_second_device() -> None:
    """Case D01: the kernel runs where the tensors are, and the current device stays what it was."""
    torch.cuda.set_device(0)
    second = torch.device("cuda", 1)
    for causal in (False, True):
        tensors = inputs(device=second)
        out, lse = flash_attention(*tensors, causal=causal, return_lse=True)
        assert (out.device, lse.device) == (second, second)
        assert torch.cuda.current_device() == 0
        close(out, tensors, causal)
    first = inputs(device=torch.device("cuda", 0))
    close(flash_attention(*first), first)
    with torch.cuda.device(1):
        close(flash_attention(*first), first)
        assert torch.cuda.current_device() == 1
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device=second)
    packed = [x[0] for x in inputs(device=second)]
    out = flash_attention_varlen(*packed, cu_seqlens, cu_seqlens, 200, 200)
    close(out[None, :100], tuple(x[None, :100] for x in packed))  # type: ignore[arg-type]
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_gradients_on_the_second_device(algorithm: str) -> None:
    """Case D01, backward: autograd's own thread launches, whose current device is another."""
    torch.cuda.set_device(0)
    results = []
    for index in (0, 1):
        leaves = [x.requires_grad_() for x in inputs(torch.float32, torch.device("cuda", index))]
        out = flash_attention(*leaves, causal=True, algorithm=algorithm, deterministic=True)
        results.append([out, *torch.autograd.grad(out, leaves, out.detach())])
        assert all(x.device.index == index for x in results[-1])
        assert torch.cuda.current_device() == 0
    assert all(check.identical(second.cpu(), first.cpu()) for first, second in zip(*results, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_cache_on_the_second_device() -> None:
    torch.cuda.set_device(0)
    second = torch.device("cuda", 1)
    _, k, v = check.qkv(2, 900, 900, 8, 64, num_heads_k=2, dtype=torch.bfloat16, device=second)
    q, k_new, v_new = (x[:, -1:] for x in check.qkv(2, 1, 1, 8, 64, num_heads_k=2, dtype=torch.bfloat16, device=second))
    lengths = torch.full((2,), 899, dtype=torch.int32, device=second)
    out = flash_attention_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=lengths)
    assert torch.cuda.current_device() == 0
    assert check.identical(k[:, -1:], k_new)
    close(out, (q, k, v))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_two_devices_are_refused() -> None:
    q, k, v = inputs(device=torch.device("cuda", 0))
    flash_attention(q, k, v)
    with pytest.raises(ValueError, match="k is on cuda:1, q on cuda:0"):
        flash_attention(q, k.to("cuda:1"), v)
    with pytest.raises(ValueError, match="v is on cuda:1, q on cuda:0"):
        flash_attention(q, k, v.to("cuda:1"))


def warm(stream: torch.cuda.Stream, tensors: tuple[Tensor, ...]) -> None:
    """Compiles, and leaves memory for the outputs in the stream's pool: allocating may wait for the device."""
    with torch.cuda.stream(stream):
        results = [flash_attention(*tensors) * 2 for _ in range(3)]
    del results
    torch.cuda.synchronize()


def test_side_stream_orders_reads_and_writes() -> None:
    """Case D03: inputs written late on a side stream are waited for; the output is ready there at once."""
    fresh = inputs(seed=1)
    stale = tuple(torch.full_like(x, torch.nan) for x in fresh)
    stream = torch.cuda.Stream()
    warm(stream, stale)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for target, source in zip(stale, fresh, strict=True):
            target.copy_(source)
        out = flash_attention(*stale)
        doubled = out * 2
    assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    close(out, fresh)
    assert check.identical(doubled, out * 2)


def test_streams_of_two_threads_do_not_mix() -> None:
    """The current stream is the calling thread's, also for a plan that was made on another stream."""
    tensors = inputs(seed=2)
    expected = flash_attention(*tensors)
    blocked, free = torch.cuda.Stream(), torch.cuda.Stream()
    warm(free, tensors)
    with torch.cuda.stream(blocked):
        torch.cuda._sleep(5 * SLEEP)
    with torch.cuda.stream(free):
        out = flash_attention(*tensors)
    free.synchronize()
    assert not blocked.query(), "the kernel waited behind a stream that is none of its business"
    assert check.identical(out, expected)
    blocked.synchronize()


@pytest.mark.parametrize("kind", ["dense", "causal", "varlen", "intervals"])
def test_graph_capture_and_replay(kind: str) -> None:
    """Case D05: a captured call replays with new inputs in the same place."""
    static = inputs(seed=3)
    cu_seqlens = torch.tensor([0, 200, 300], dtype=torch.int32, device=DEVICE)
    intervals = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)

    def call() -> Tensor:
        if kind == "varlen":
            return flash_attention_varlen(*(x[0] for x in static), cu_seqlens, cu_seqlens, 200, 200, causal=True)[None]
        if kind == "intervals":
            return flash_attention(*static, key_intervals=intervals)
        return flash_attention(*static, causal=kind == "causal")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (4, 5):
        fresh = inputs(seed=seed)
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        if kind == "varlen":
            close(out[:, :200], tuple(x[:1, :200] for x in fresh), causal=True)  # type: ignore[arg-type]
            close(out[:, 200:], tuple(x[:1, 200:] for x in fresh), causal=True)  # type: ignore[arg-type]
        else:
            close(out, fresh, causal=kind == "causal")
        assert check.identical(out, call())


def test_nothing_waits_for_the_device() -> None:
    """A call returns while the device is still busy with what came before."""
    tensors = inputs()
    cu_seqlens = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    packed = [x[0] for x in tensors]
    for _ in range(2):  # the first time compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        flash_attention(*tensors, causal=True)
        flash_attention_varlen(*packed, cu_seqlens, cu_seqlens, 300, 300)
        busy = not torch.cuda.current_stream().query()
    assert busy
    torch.cuda.synchronize()


def test_deterministic() -> None:
    tensors = check.qkv(4, 1000, 1000, 8, 64, num_heads_k=2, dtype=torch.bfloat16, device=DEVICE)
    first = flash_attention(*tensors, causal=True)
    assert all(check.identical(flash_attention(*tensors, causal=True), first) for _ in range(30))


@pytest.mark.parametrize("way", ["precision", "allow", "new"])
def test_tf32_only_where_torch_allows_it(way: str) -> None:
    """fp32 is fp32 unless the user said otherwise, through whichever of torch's switches."""
    tensors = inputs(torch.float32)
    exact = truth(tensors)
    plain = flash_attention(*tensors)
    close(plain, tensors)
    matmul = torch.backends.cuda.matmul
    switches = {
        "precision": (torch.set_float32_matmul_precision, "high", "highest"),
        "allow": (partial(setattr, matmul, "allow_tf32"), True, False),
        "new": (partial(setattr, matmul, "fp32_precision"), "tf32", "ieee"),
    }
    switch, on, off = switches[way]
    switch(on)
    try:
        with check.record_launches() as records:
            rounded = flash_attention(*tensors)
    finally:
        switch(off)
    assert "tf32" in records[0].config.name
    error = (rounded.double() - exact).abs().max().item()
    assert (plain.double() - exact).abs().max().item() * 4 < error < 1e-2
    with check.record_launches() as records:
        assert check.identical(flash_attention(*tensors), plain)
    assert "tf32" not in records[0].config.name
