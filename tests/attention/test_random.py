"""Random calls over everything that combines: shapes, layouts, dtypes, features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_check as check
import pytest
import torch
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st
from torch import Tensor

# Kernels that the other tests compile anyway: a random one each time would take hours on a CPU.
FEATURES: dict[torch.dtype, list[tuple[str, ...]]] = {
    torch.float32: [(), ("intervals",), ("mask",), ("intervals", "mask")],
    torch.bfloat16: [(), ("intervals",), ("mask",), ("intervals", "mask", "softcap")],
}


def layouts(x: Tensor, kind: int) -> Tensor:
    """The same values BSHD, BHSD, in a wider row or in a batch of larger strides; all rows on 16 bytes."""
    if kind == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 2:
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    if kind == 3:
        return torch.cat([x, x[:, :1]], dim=1)[:, : x.shape[1]]
    return x


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype, any_kernel: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Numbers of a call: sizes, window, seed …; tensors are made from them on the device."""
    if any_kernel:
        features = tuple(name for name in ("intervals", "mask", "softcap") if draw(st.booleans()))
        head_dim, head_dim_v = draw(st.integers(1, 256)), draw(st.integers(1, 256))
        head_dim_v = draw(st.sampled_from([head_dim, head_dim_v]))
    else:
        features = draw(st.sampled_from(FEATURES[dtype]))
        head_dim = head_dim_v = draw(st.sampled_from([24, 32]))
    # Scales that are not positive have kernels of their own.
    scales = [None, 0.11, 1.0] if features and not any_kernel else [None, 0.0, 0.11, -0.2, 1.0]
    num_heads_k = draw(st.integers(1, 3))
    sizes = st.integers(1, 200)
    bound = st.sampled_from([-1, 0, 1, 5, 63, 64, 100])
    return {
        "batch": draw(st.integers(1, 3)),
        "seqlen_q": draw(sizes),
        "seqlen_k": draw(sizes),
        "num_heads": num_heads_k * draw(st.integers(1, 3)),
        "num_heads_k": num_heads_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "seed": draw(st.integers(0, 1000)),
        "layouts": draw(st.tuples(*[st.integers(0, 3)] * 3)),
        "causal": draw(st.booleans()),
        "window_size": (draw(bound), draw(bound)),
        "softmax_scale": draw(st.sampled_from(scales)),
        "broadcast": draw(st.tuples(*[st.booleans()] * 4)),
    }, features  # fmt: skip


def run(device: torch.device, dtype: torch.dtype, call: dict[str, Any], features: tuple[str, ...]) -> float:
    names = ("batch", "seqlen_q", "seqlen_k", "num_heads", "head_dim")
    more = {name: call[name] for name in ("num_heads_k", "head_dim_v", "seed")}
    tensors = check.qkv(*(call[name] for name in names), dtype=dtype, device=device, **more)
    tensors = tuple(layouts(x, kind) for x, kind in zip(tensors, call["layouts"], strict=True))
    options = {name: call[name] for name in ("causal", "window_size", "softmax_scale")}
    generator = torch.Generator().manual_seed(call["seed"])
    shape = [call[name] for name in ("batch", "num_heads", "seqlen_q", "seqlen_k")]
    shape = [1 if one else size for size, one in zip(shape, call["broadcast"], strict=True)]
    if "mask" in features:
        options["mask"] = (torch.rand(shape, generator=generator) < 0.8).to(device)
    if "intervals" in features:
        ends = torch.randint(-20, call["seqlen_k"] + 20, (*shape[:3], 2), generator=generator)
        options["key_intervals"] = ends.sort(dim=-1).values.to(device, torch.int32)
    if "softcap" in features:
        options["softcap"] = 5.0
    return check.check(*tensors, **options)


def sweep(
    device: torch.device,
    dtype: torch.dtype,
    examples: int,
    any_kernel: bool,
    record_property: Callable[[str, object], None],
) -> None:
    ratios: list[float] = []

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(calls(dtype, any_kernel))
    def each(drawn: tuple[dict[str, Any], tuple[str, ...]]) -> None:
        ratios.append(run(device, dtype, *drawn))
        target(ratios[-1])

    each()
    record_property("worst error / allowed error", round(max(ratios), 3))
    print(f"{len(ratios)} calls, {check.NAMES[dtype]}: worst error / allowed error {max(ratios):.3f}")


@pytest.mark.parametrize("dtype", FEATURES, ids=check.NAMES.get)
def test_random_calls(device: torch.device, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    sweep(device, dtype, 40, False, record_property)


@pytest.mark.full
@pytest.mark.parametrize("dtype", check.DTYPES, ids=check.NAMES.get)
def test_random_kernels(
    device: torch.device, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """Any head sizes and features: every example may compile a kernel."""
    sweep(device, dtype, 20, True, record_property)
