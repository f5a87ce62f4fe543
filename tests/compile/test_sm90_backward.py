"""The Hopper backward compiles without a GPU, keeps its wgmma in flight, and is chosen for what it can do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hopper_compile import check_resources, geometry, problem, product_runs

from hf_flash_cupy import sm90_backward, tiles
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.plans import Geometry
from hf_flash_cupy.problem import KernelConfig

CONFIGS = {config.name: config for config in sm90_backward.reachable_configs()}
FAST = re.compile(
    "fa2_backward_sm90_(bf16_d64_m128_n128_(causal(_deterministic)?_vector|vector_intervals)|fp16_d128_m64_n128_vector|"
    "(prepare|finish)_bf16_d64_m128_n128_vector|prepare_bf16_d64_m128_n128_deterministic_vector|"
    "bf16_d256_m64_n64_(causal_deterministic_vector|vector_intervals)|finish_bf16_d256_m64_n64_vector)"
)
MAIN = re.compile("fa2_backward_sm90_(bf16|fp16)_")
CASES = [
    pytest.param(config, id=name, marks=() if FAST.match(name) else pytest.mark.full)
    for name, config in CONFIGS.items()
]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> compiler.CompiledUnit:
    config: KernelConfig = request.param
    return compiler.compile_cubin(source.generate_source(config), config.name, config.arch)


@pytest.mark.parametrize("compiled", CASES, indirect=True)
def test_nothing_spills_and_nothing_waits(compiled: compiler.CompiledUnit) -> None:
    check_resources(compiled)


@pytest.mark.parametrize("compiled", [case for case in CASES if MAIN.match(case.id or "")], indirect=True)
def test_products_stand_in_runs(
    compiled: compiler.CompiledUnit, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A serialised product has a wait behind every instruction."""
    runs = product_runs(compiled, tmp_path)
    if "_d256_" in request.node.name:
        # S, half of dq, dv, the other half; the last dq's halves; of the second warpgroup the same with dP and dk
        assert runs == [16, 4, 4, 4, 4, 4] * 2
    else:
        assert len(runs) == 6  # S, dP, dv, dq and dk of a step; the last dq
        assert min(runs) >= 4


def backward_geometry(head_dim: int = 128, **changes: Any) -> Geometry:
    plain = geometry(head_dim)
    return replace(plain, **{"dout_strides": plain.out_strides} | changes)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "built"), [(48, 64), (64, 64), (72, 128), (128, 128), (136, 256), (192, 256), (256, 256)]
)
def test_served(head_dim: int, built: int, causal: bool, deterministic: bool) -> None:
    window = (-1, 0 if causal else -1)
    asked = problem(head_dim, deterministic=deterministic)
    kernels = sm90_backward.select(asked, backward_geometry(head_dim, window=window))
    assert kernels is not None
    assert list(kernels) == ["prepare", "main", "finish"]
    for part, config in kernels.items():
        assert f"_d{built}_" in config.name
        assert ("causal" in config.name) == (causal and part == "main")
        assert ("deterministic" in config.name) == (deterministic and part != "finish")
        assert config.shared_bytes <= tiles.SHARED_LIMITS["90a"]


@pytest.mark.parametrize(
    ("window", "hides"),
    [((-1, -1), ""), ((4095, 4095), ""), ((-1, 0), "kCausal"), ((5000, 7), "kCausal"), ((4094, 0), "kIntervals")],
)
def test_a_mask_costs_only_where_it_hides(window: tuple[int, int], hides: str) -> None:
    kernels = sm90_backward.select(problem(), backward_geometry(window=window))
    assert kernels is not None
    for name in ("kCausal", "kIntervals"):
        assert dict(kernels["main"].constants)[f"bool {name}"] == ("true" if name == hides else "false")


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (0, -1)])
@pytest.mark.parametrize("intervals", [False, True])
def test_intervals_and_windows_to_the_left_are_one(intervals: bool, window: tuple[int, int]) -> None:
    """Rows are asked for what they see, the prepare kernel notes it, and the finish kernel is the same for all."""
    wanted = problem(64, intervals=intervals)
    kernels = sm90_backward.select(wanted, backward_geometry(64, window=window))
    assert kernels is not None
    asked = intervals or window[0] >= 0
    assert ["_intervals_" in kernels[part].name for part in ("prepare", "main", "finish")] == [asked, asked, False]
    constants = dict(kernels["main"].constants)
    assert constants["bool kCausal"] == ("true" if window[1] == 0 and not asked else "false")


@pytest.mark.parametrize(
    ("asked", "changes", "why"),
    [
        ({"varlen": True}, {}, "packed"),
        ({"deterministic": True, "intervals": True}, {}, "deterministic gradients with key intervals"),
        ({"deterministic": True}, {"window": (100, 0)}, "deterministic gradients with key intervals or a window"),
        ({"mask": True}, {}, "mask"),
        ({"bias": "fp32"}, {}, "bias"),
        ({"alibi": True}, {}, "alibi_slopes"),
        ({"softcap": True}, {}, "softcap"),
        ({"dropout": True}, {}, "dropout"),
        ({"positive_scale": False}, {}, "softmax_scale"),
        ({"dtype": "fp32"}, {}, "float32"),
        ({"algorithm": "fa1"}, {}, "FlashAttention-1"),
        ({"vector": False}, {}, "16 bytes"),
        ({"head_dim": 40, "head_dim_v": 40}, {}, "head_dim"),
        ({"head_dim": 264, "head_dim_v": 264}, {}, "48 to 256"),
        ({"head_dim_v": 64}, {}, "equal"),
        ({}, {"dout_strides": (0, 0, 0)}, "broadcast"),
        ({}, {"softmax_scale": 1e-25}, "softmax_scale"),
        ({}, {"softmax_scale": 1e35}, "softmax_scale"),
        ({}, {"seqlen_q": 63}, "rows"),
        ({}, {"seqlen_k": 0}, "keys"),
    ],
)
def test_left_to_mma(asked: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    wanted, numbers = replace(problem(), **asked), backward_geometry(**changes)
    assert why in sm90_backward.refusal(wanted, numbers)
    assert sm90_backward.select(wanted, numbers) is None


def test_every_warpgroup_has_registers() -> None:
    """A block starts with what launch bounds leave each thread; setmaxnreg only moves registers between warpgroups."""
    for config in CONFIGS.values():
        if config.kernel != "fa2_backward_sm90":
            continue
        constants = dict(config.constants)
        loading, computing = (int(constants[f"int k{role}Registers"]) for role in ("Load", "Compute"))
        at_start = min(65536 // config.num_threads // 8 * 8, 255) * config.num_threads
        assert 128 * loading + (config.num_threads - 128) * computing <= at_start


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_workspaces_hold_whole_row_blocks(head_dim: int) -> None:
    numbers = backward_geometry(head_dim, batch=3, seqlen_q=1000)
    block_m = sm90_backward.BLOCK_M[head_dim]
    blocks = -(-1000 // block_m) * 8 * 3
    expected = {"dq_accum": blocks * block_m * head_dim, "row_statistics": blocks * (4 * block_m + 4)}
    assert sm90_backward.workspaces(problem(head_dim), numbers) == expected
    turns = {"dq_turns": blocks * 2}  # a warpgroup each
    assert sm90_backward.workspaces(problem(head_dim, deterministic=True), numbers) == expected | turns
    for strides, shared_by in (((2000, 0, 2), 8), ((16000, 2000, 2), 1)):  # heads: one for all, one each
        sizes = sm90_backward.workspaces(problem(head_dim, intervals=True), replace(numbers, interval_strides=strides))
        lists = blocks // shared_by
        assert sizes == expected | {"row_block_keys": lists * 4, "row_intervals": lists * block_m * 2}


def test_heads_that_run_together_fit_the_cache() -> None:
    """Causal blocks differ in length, and those of intervals may; of others one head after the other."""
    causal = backward_geometry(64, batch=4, num_heads=32, num_heads_k=8, window=(-1, 0))
    assert sm90_backward.heads_per_section(problem(64), causal) == 4  # of 4 heads by 4,096 rows by 64 by 8 bytes
    assert sm90_backward.heads_per_section(problem(64), replace(causal, window=(-1, -1))) == 1
    asked = problem(64, intervals=True)
    assert sm90_backward.heads_per_section(asked, replace(causal, window=(-1, -1))) == 8  # at least
    assert sm90_backward.heads_per_section(problem(64), replace(causal, seqlen_q=65536)) == 4  # at least
    assert sm90_backward.heads_per_section(problem(64), replace(causal, seqlen_q=64)) == 32


def test_few_key_blocks_wait_for_each_other() -> None:
    """Deterministic gradients: causal heads in one section, or in eight at least, whose orders take turns."""
    ordered = problem(64, deterministic=True)
    causal = backward_geometry(64, batch=4, num_heads=32, num_heads_k=8, window=(-1, 0))
    full = replace(causal, window=(-1, -1))
    assert sm90_backward.heads_per_section(ordered, causal) == 4
    assert sm90_backward.heads_per_section(ordered, replace(causal, seqlen_q=16384)) == 32
    assert sm90_backward.heads_per_section(ordered, replace(causal, batch=1)) == 8
    assert sm90_backward.heads_per_section(ordered, full) == 16
    assert sm90_backward.heads_per_section(ordered, replace(full, seqlen_q=64)) == 32
    assert sm90_backward.heads_per_section(ordered, replace(causal, seqlen_q=64)) == 4
    assert sm90_backward.heads_per_section(ordered, replace(causal, batch=1, num_heads_k=1)) == 1
