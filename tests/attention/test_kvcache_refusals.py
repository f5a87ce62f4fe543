"""What the functions with a key-value cache refuse by name, and what they must not take for something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_flash_cupy import UnsupportedProblem, flash_attention_with_kvcache
from hf_flash_cupy.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def given(device: torch.device) -> Tensors:
    """q (2, 1, 4, 16), caches of 48 keys, one new key an entry."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 1, 4, 16), "k_cache": (2, 48, 2, 16), "v_cache": (2, 48, 2, 16), "k": (2, 1, 2, 16)}
    shapes["v"] = shapes["k"]
    dtype = torch.float16
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def attended(given: Tensors, *names: str) -> torch.Tensor:
    return flash_attention_with_kvcache(**{name: given[name] for name in ("q", "k_cache", "v_cache", *names)})


def test_a_lazy_minus_counts(given: Tensors) -> None:
    negated = given | {"q": torch._neg_view(given["q"])}
    assert torch.equal(attended(negated), attended(given | {"q": -given["q"]}))
    caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    new = torch._neg_view(given["k"])
    flash_attention_with_kvcache(given["q"], **caches, k=new, v=given["v"], cache_seqlens=9)
    assert torch.equal(caches["k_cache"][:, 9], -given["k"][:, 0])
    for name in ("k_cache", "v_cache"):
        with pytest.raises(ValueError, match=f"{name} is the negative of its memory"):
            attended(given | {name: torch._neg_view(given[name])})


def test_gradients_of_anything_are_refused(given: Tensors) -> None:
    numbers = torch.zeros(4, device=given["q"].device, requires_grad=True)
    caches = (given["q"], given["k_cache"], given["v_cache"])
    with pytest.raises(UnsupportedProblem, match="sinks requires a gradient"):
        flash_attention_with_kvcache(*caches, sinks=numbers)
    with pytest.raises(UnsupportedProblem, match="alibi_slopes requires a gradient"):
        flash_attn_with_kvcache(*caches, alibi_slopes=numbers)
    with torch.no_grad():
        flash_attention_with_kvcache(*caches, sinks=numbers)


def test_caches_that_share_memory_are_not_appended_to(given: Tensors) -> None:
    new = {"k": given["k"], "v": given["v"], "cache_seqlens": 3}
    expanded = given["k_cache"][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="k_cache is expanded"):
        flash_attention_with_kvcache(given["q"], expanded, given["v_cache"], **new)
    with pytest.raises(ValueError, match="k_cache and v_cache are one tensor"):
        flash_attention_with_kvcache(given["q"], given["k_cache"], given["k_cache"], **new)


def with_table(table: Any) -> Callable[[Tensors], object]:
    return lambda given: flash_attention_with_kvcache(
        given["q"], given["k_cache"], given["v_cache"], cache_seqlens=3, block_table=table
    )


def with_rotary(**changed: Any) -> Callable[[Tensors], object]:
    def call(given: Tensors) -> object:
        table = torch.ones(48, 8, device=given["q"].device)
        lengths = torch.tensor([3, 4], dtype=torch.int32, device=given["q"].device)
        options = {"rotary_cos": table, "rotary_sin": table, "cache_seqlens": lengths, **changed}
        return flash_attn_with_kvcache(*(given[name] for name in ("q", "k_cache", "v_cache", "k", "v")), **options)

    return call


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (with_table([[0, 1], [2, 3]]), TypeError, "block_table is a list"),
        (with_table(torch.tensor(1, dtype=torch.int32)), ValueError, r"block_table has shape \(\)"),
        (with_rotary(cache_seqlens=torch.tensor(3, dtype=torch.int32)), ValueError, r"cache_seqlens has shape \(\)"),
        (with_rotary(cache_seqlens=torch.ones(3, dtype=torch.int32)), ValueError, r"cache_seqlens has shape \(3,\)"),
        (with_rotary(cache_seqlens=True), TypeError, "cache_seqlens is a bool"),
        (with_rotary(rotary_cos=[1.0]), TypeError, "rotary_cos is a list"),
        (with_rotary(rotary_sin=torch.ones(48, 8, dtype=torch.int64)), TypeError, "rotary_sin is torch.int64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_are_named(call: Callable[[Tensors], object], error: type[Exception], says: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 1, 4, 16), "k_cache": (2, 48, 2, 16), "v_cache": (2, 48, 2, 16), "k": (2, 1, 2, 16)}
    shapes["v"] = shapes["k"]
    with pytest.raises(error, match=says):
        call({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


def test_appending_inside_vmap_is_refused(given: Tensors) -> None:
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=given["q"].device)

    def append(q: torch.Tensor) -> torch.Tensor:
        new = {"k": given["k"], "v": given["v"], "cache_seqlens": lengths}
        return flash_attention_with_kvcache(q, given["k_cache"], given["v_cache"], **new)

    with pytest.raises(UnsupportedProblem, match="appended in place"):
        torch.vmap(append)(given["q"][None])


def test_s_dmask_holds_the_longest_entry(device: torch.device) -> None:
    q = torch.randn(200, 2, 16, device=device).half()
    offsets = torch.tensor([0, 3, 200], dtype=torch.int32, device=device)
    for lengths, name in (((100, 200), "max_seqlen_q=100"), ((200, 100), "max_seqlen_k=100")):
        with pytest.raises(ValueError, match=name):
            flash_attn_varlen_func(q, q, q, offsets, offsets, *lengths, dropout_p=0.3, return_attn_probs=True)
