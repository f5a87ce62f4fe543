"""Gradients of random calls over everything that combines: shapes, layouts, dtypes, features, both algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_check as check
import pytest
import torch
from gradient_check import check_gradients, leaves
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st
from test_gradients import ALGORITHMS
from test_random import layouts

# What comes together: kernels are compiled for each set, so there are few.
FEATURES: list[tuple[str, ...]] = [
    (),
    ("alibi", "sinks"),
    ("bias", "mask"),
    ("intervals", "dropout"),
    ("softcap", "sinks"),
    ("intervals", "mask", "softcap", "alibi", "bias", "dropout"),
]


@st.composite
def calls(draw: st.DrawFn, feature_sets: int, head_dims: list[int]) -> dict[str, Any]:
    num_heads_k = draw(st.integers(1, 3))
    bound = st.sampled_from([-1, 0, 1, 5, 63, 64, 100])
    return {
        "features": draw(st.sampled_from(FEATURES[:feature_sets])),
        "batch": draw(st.integers(1, 3)),
        "seqlen_q": draw(st.integers(1, 200)),
        "seqlen_k": draw(st.integers(1, 200)),
        "num_heads_k": num_heads_k,
        "num_heads": num_heads_k * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from(head_dims)),
        "seed": draw(st.integers(0, 1000)),
        "layouts": draw(st.tuples(*[st.integers(0, 3)] * 3)),
        "causal": draw(st.booleans()),
        "window_size": (draw(bound), draw(bound)),
        "softmax_scale": draw(st.sampled_from([None, 0.11])),
        "broadcast": draw(st.tuples(*[st.booleans()] * 3, st.just(False))),
        "weigh_lse": draw(st.booleans()),
        "deterministic": draw(st.booleans()),
    }


def run(device: torch.device, dtype: torch.dtype, algorithm: str, call: dict[str, Any]) -> float:
    sizes = [call[name] for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "head_dim")]
    tensors = check.qkv(*sizes, num_heads_k=call["num_heads_k"], dtype=dtype, device=device, seed=call["seed"])
    tensors = tuple(layouts(x, kind) for x, kind in zip(tensors, call["layouts"], strict=True))
    options = {name: call[name] for name in ("causal", "window_size", "softmax_scale", "weigh_lse", "deterministic")}
    generator = torch.Generator().manual_seed(call["seed"])
    full = [call[name] for name in ("batch", "num_heads", "seqlen_q", "seqlen_k")]
    shape = [1 if one else size for size, one in zip(full, call["broadcast"], strict=True)]
    others: dict[str, torch.Tensor] = {}
    for feature in call["features"]:
        if feature == "mask":
            options["mask"] = (torch.rand(shape, generator=generator) < 0.8).to(device)
        elif feature == "intervals":
            ends = torch.randint(-20, call["seqlen_k"] + 20, (*shape[:3], 2), generator=generator)
            options["key_intervals"] = ends.sort(dim=-1).values.to(device, torch.int32)
        elif feature == "softcap":
            options["softcap"] = 5.0
        elif feature == "dropout":
            options["dropout_p"] = 0.2
        elif feature == "alibi":
            options["alibi_slopes"] = torch.rand(call["num_heads"], generator=generator).to(device)
        elif feature == "sinks":
            others["sinks"] = torch.randn(call["num_heads"], generator=generator).to(device)
        else:
            others["bias"] = torch.randn(shape, generator=generator).to(device, dtype)
    return check_gradients(leaves(*tensors, **others), algorithm=algorithm, **options)


def sweep(
    device: torch.device,
    dtype: torch.dtype,
    algorithm: str,
    examples: int,
    drawn: st.SearchStrategy[dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    ratios: list[float] = []

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def each(call: dict[str, Any]) -> None:
        ratios.append(run(device, dtype, algorithm, call))
        target(ratios[-1])

    each()
    record_property("calls", len(ratios))
    record_property("worst error / allowed error", round(max(ratios), 3))
    print(f"{len(ratios)} calls, {algorithm} {check.NAMES[dtype]}: worst error / allowed error {max(ratios):.3f}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_gradients(device: torch.device, algorithm: str, record_property: Callable[[str, object], None]) -> None:
    sweep(device, torch.bfloat16, algorithm, 15, calls(1, [32]), record_property)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
def test_random_gradients_of_all_features(
    device: torch.device, dtype: torch.dtype, algorithm: str, record_property: Callable[[str, object], None]
) -> None:
    sweep(device, dtype, algorithm, 100, calls(len(FEATURES), [40, 64, 128]), record_property)
