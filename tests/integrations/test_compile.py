"""torch.compile over whole models: one graph, few recompilations, eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_flash_cupy import flash_attention, sm90_plan, split_workspace
from hf_flash_cupy.integrations import routing

from .tiny import assert_same, build, implementation, logits, padding, tokens


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    routing._routed.clear()  # as in a process whose first call is a compiled one
    yield
    torch.compiler.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def backend(device: str) -> str:
    """On a CPU the graph is what counts; inductor's C++ takes a minute a model."""
    return "inductor" if device == "cuda" else "aot_eager"


def graphs() -> int:
    """Compiled so far, recompilations included."""
    return int(counters["stats"]["unique_graphs"])


def own(name: str, device: str, implementation_name: str = "cupy_fa2") -> Any:
    """A model that no other test changes."""
    model = copy.deepcopy(build(name)).to(device)
    model.set_attn_implementation(implementation_name)
    return model


full = pytest.mark.full
PADDED = {"plain": False, "left padded": True}


def case(name: str, layout: str, fast: bool = False) -> Any:
    return pytest.param(name, PADDED[layout], id=f"{name} {layout}", marks=[] if fast else full)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        case("llama", "left padded", fast=True),
        *(case(name, "plain") for name in ("llama", "gpt_oss", "gemma2", "bert")),
        *(case(name, "left padded") for name in ("gpt_oss", "gemma2", "bert")),
    ],
)
def test_inference(name: str, padded: bool, device: str) -> None:
    """Two lengths more than the first one cost one recompilation, for any length."""
    model = own(name, device)
    compiled = torch.compile(model, fullgraph=True, backend=backend(device))
    for length in (11, 13, 17):
        given = {"input_ids": tokens(3, length).to(device)}
        mask = padding(3, length, "left").to(device)
        if padded:
            given["attention_mask"] = mask
        with torch.no_grad():
            actual = compiled(**given).logits
        expected = logits(model, "eager", **given)
        assert_same(actual, expected, mask if padded else None)
    assert graphs() <= 2


def gradients(model: Any, run: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits_of = run(input_ids=ids, use_cache=False).logits
    logits_of.float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=full), True], ids=["plain", "checkpointed"])
def test_training(checkpointed: bool, device: str) -> None:
    model = own("llama", device, "eager").train()
    expected = gradients(model, model, tokens(2, 11).to(device))
    model.set_attn_implementation("cupy_fa2")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, fullgraph=True, backend=backend(device))
    for length in (11, 13, 17):
        actual = gradients(model, compiled, tokens(2, length).to(device))
        if length == 11:
            first = actual
    for mine, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
    assert graphs() <= 2


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        case("llama", "left padded", fast=True),
        case("llama", "plain"),
        case("gemma2", "plain"),
        case("gemma2", "left padded"),
    ],
)
def test_static_cache_generation(name: str, padded: bool, device: str) -> None:
    """Transformers compiles the decoding step by itself, once more for any length, and once a window has filled."""
    model = own(name, device)
    config = CompileConfig(fullgraph=True, backend=backend(device))
    config._compile_all_devices = True
    for length in (6, 9):
        ids = tokens(2, length).to(device)
        mask = padding(2, length, "left", 2).to(device) if padded else torch.ones_like(ids)
        given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
        actual = model.generate(**given, cache_implementation="static", compile_config=config)
        compiled = graphs()
        with implementation(model, "eager"):
            expected = model.generate(**given, disable_compile=True)
        assert torch.equal(actual, expected)
        assert graphs() == compiled
    assert 1 <= graphs() <= (3 if name == "gemma2" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300], ids=["decoding", "prompt"])
def test_cuda_graphs_of_the_compiler(rows: int) -> None:
    """What kernels keep between calls is none of a graph's memory, though the first call be one that it records."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, rows, 8, 64), (1, 2048, 2, 64), (1, 2048, 2, 64)]
    q, k, v = (torch.randn(x, generator=generator, device="cuda", dtype=torch.bfloat16) for x in shapes)

    def twice(x: Tensor) -> Tensor:
        return flash_attention(flash_attention(x, k, v, causal=True), k, v, causal=True) * 2  # type: ignore[no-any-return]

    compiled = torch.compile(twice, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        expected = twice(q.clone())
        split_workspace._streams.clear()
        split_workspace._graph_counters.cache_clear()
        sm90_plan._ring.cache_clear()
        for _ in range(4):  # warm-up, recording, replays
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(q).clone(), expected)
