"""CUDA graphs (case D05): captured forward and backward replay with new inputs, whether or not called before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention, launch
from hf_flash_cupy.jit import module

from .tiny import assert_same, build, implementation, logits, padding, tokens

gpu = pytest.mark.gpu


def leaves(seed: int, rows: int = 200, dtype: torch.dtype = torch.float16, head_dim: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, rows, 8, head_dim), (2, rows, 2, head_dim), (2, rows, 2, head_dim)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


def refill(static: list[Tensor], fresh: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)


def warm(run: Callable[[], Any]) -> None:
    """On a stream of its own, as torch.cuda.graphs asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


def forward_and_backward(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    out = flash_attention(*tensors, causal=True, **options)
    return [out, *torch.autograd.grad(out, tensors, out.detach())]


@gpu
@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward(algorithm: str, deterministic: bool) -> None:
    static = leaves(0)
    run = partial(forward_and_backward, static, algorithm=algorithm, deterministic=deterministic)
    warm(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (1, 2):
        refill(static, leaves(seed))
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        for result, expected in zip(captured, run(), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)  # dq adds up in any order
            assert not deterministic or torch.equal(result, expected)


@gpu
def test_graphed_callable() -> None:
    """torch's own way to train with graphs."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, causal=True)  # type: ignore[no-any-return]

    graphed = torch.cuda.make_graphed_callables(Attention(), tuple(leaves(0)))
    for seed in (1, 2):
        tensors = leaves(seed)
        out = graphed(*tensors)
        got = [out, *torch.autograd.grad(out, tensors, out.detach())]
        for result, expected in zip(got, forward_and_backward(tensors), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


@gpu
def test_dropout_is_new_at_each_replay() -> None:
    static = leaves(0)
    run = partial(forward_and_backward, static, dropout_p=0.5, deterministic=True)
    warm(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([result.clone() for result in captured])
    assert all(not torch.equal(a, b) for a, b in zip(*replays, strict=True))
    # One replay drops the same in both directions: dv of a head is Pᵀ dout, so out · dout = Σ v · dv.
    out, _, _, dv = (x.double() for x in replays[1])
    assert (static[2].double() * dv).sum().item() == pytest.approx(out.square().sum().item(), rel=1e-2)


@gpu
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "4-D mask"])
def test_whole_model(padded: bool) -> None:
    """Its own causal mask is made inside the capture; padding comes as a 4-D mask, made before."""
    model = build("llama").to("cuda")
    static, keep = tokens(2, 11).to("cuda"), padding(2, 11, "left").to("cuda")
    visible = keep.bool()[:, None, None, :] & torch.ones(11, 11, dtype=torch.bool, device="cuda").tril()
    mask = visible if padded else None

    def run() -> Tensor:
        return model(input_ids=static, attention_mask=mask, use_cache=False).logits  # type: ignore[no-any-return]

    try:
        with torch.no_grad(), implementation(model, "cupy_fa2"):
            warm(run)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
        for seed in (1, 2):
            ids = tokens(2, 11, seed=seed).to("cuda")
            static.copy_(ids)
            captured.fill_(torch.nan)
            graph.replay()
            expected = logits(model, "sdpa", input_ids=ids, attention_mask=mask)
            assert_same(captured, expected, keep if padded else None)
    finally:
        model.to("cpu")


@gpu
@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_a_first_call_inside_a_capture_is_right(algorithm: str) -> None:
    """Kernels are compiled and loaded there; the graph has their launches alone."""
    module._device_kernels._values.clear()
    torch.ones(1, device="cuda").add_(1)
    static = leaves(3, rows=70, head_dim=24 if algorithm == "fa2" else 40)  # shapes of no other test: without a plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(static, algorithm=algorithm, deterministic=True)
    refill(static, leaves(4, rows=70, head_dim=static[0].shape[3]))
    for result in captured:
        result.fill_(torch.nan)
    graph.replay()
    expected = forward_and_backward(static, algorithm=algorithm, deterministic=True)
    assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


@gpu
def test_another_shape_needs_nothing_new() -> None:
    """A kernel that is loaded serves shapes that the capture is the first to see."""
    warm(partial(flash_attention, *(x.detach() for x in leaves(4, rows=200))))
    tensors = [x.detach() for x in leaves(4, rows=277)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(*tensors)
    graph.replay()
    assert torch.equal(out, flash_attention(*tensors))


def test_loading_is_allowed_in_a_capture_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's mode of this thread, without a GPU: relaxed while a kernel is loaded, then what it was before."""
    modes = [0]  # CU_STREAM_CAPTURE_MODE_GLOBAL, as torch begins a capture

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, argument: Any) -> None:  # noqa: N802
            mode = argument._obj
            modes.append(mode.value)
            mode.value = modes[-2]

    monkeypatch.setattr(launch.ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with launch._loading_allowed():
        assert modes[-1] == 2
    assert modes == [0, 2, 0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with launch._loading_allowed():
        assert len(modes) == 3
