"""CUDA graphs (case D05): captured forward and backward replay with new inputs; nothing is loaded in a capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_flash_cupy import flash_attention, launch
from hf_flash_cupy.dispatch import select
from hf_flash_cupy.jit import module
from hf_flash_cupy.problem import AttentionProblem

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
def test_a_first_call_inside_a_capture_is_refused_by_name() -> None:
    module._device_kernels._values.clear()
    static = leaves(3, rows=70, head_dim=24)  # shapes of no other test: there is no plan yet
    run = partial(flash_attention, *(x.detach() for x in static))
    graph = torch.cuda.CUDAGraph()
    torch.ones(1, device="cuda").add_(1)
    with (
        pytest.raises(
            RuntimeError, match=r"fa2_forward.* needed for the first time while a CUDA graph is being captured"
        ),
        torch.cuda.graph(graph),
    ):
        run()
    warm(run)  # which is the way out that the message names
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, run())


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


def test_a_capture_asks_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal without a GPU: nothing is compiled, loaded or kept."""
    pytest.importorskip("cupy_backends", reason="CuPy is not installed")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(module, "_load_kernel", lambda *_: pytest.fail("a kernel was loaded inside a capture"))
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher.config = select(AttentionProblem("fp16", 64, 64, seqlen_q=128, vector=True), "90")
    launcher.num_tiles, launcher.grid = 1, (1, 1)
    with pytest.raises(RuntimeError, match="Call attention once before the capture"):
        launcher._prepare_cuda(0, 0)
