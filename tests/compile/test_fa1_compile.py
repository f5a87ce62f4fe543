"""FlashAttention-1's kernels compile for every architecture, without a GPU, and fit its registers and shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_flash_cupy import fa1, tiles
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.problem import AttentionProblem, KernelConfig

DIRECTIONS = {"forward": fa1.forward_config, "backward": fa1.backward_config}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": True},
    "dropout": {"dropout": True},
    "varlen": {"varlen": True},
    "mask": {"mask": True},
}
EVERYTHING = {"mask": True, "intervals": True, "bias": "element", "alibi": True, "dropout": True, "vector": False}


def compiled(config: KernelConfig) -> compiler.Resources:
    unit = compiler.compile_cubin(source.generate_source(config), config.name, config.arch)
    usage = compiler.resource_usage(unit.log)
    assert usage is not None
    return usage


def problem(dtype: Any, head_dim: int, **features: Any) -> AttentionProblem:
    return replace(AttentionProblem(dtype, head_dim, head_dim, 4096, vector=True, algorithm="fa1"), **features)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_spills(direction: str, arch: str, head_dim: int) -> None:
    assert compiled(DIRECTIONS[direction](problem("bf16", head_dim), arch)).spill_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", ["75", "80", "86", "90"])
def test_nothing_spills_anywhere(direction: str, arch: str, subtests: pytest.Subtests) -> None:
    for head_dim in fa1.HEAD_DIMS:
        for name, features in FEATURES.items():
            if arch == "75" and direction == "backward" and head_dim == 512:
                continue  # refused: tests/attention/test_fa1.py
            with subtests.test(head_dim=head_dim, features=name):
                config = DIRECTIONS[direction](problem("fp16", head_dim, **features), arch)
                assert compiled(config).spill_bytes == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "arch", [arch if arch == "80" else pytest.param(arch, marks=pytest.mark.full) for arch in tiles.ARCHS]
)
def test_every_feature_compiles(direction: str, arch: str) -> None:
    for dtype, tf32 in (("fp16", False), ("fp32", False), ("fp32", True)):
        if not (tf32 and arch == "75"):
            compiled(DIRECTIONS[direction](problem(dtype, 64, tf32=tf32, **EVERYTHING), arch))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", tiles.ARCHS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_shared_memory_fits(direction: str, arch: str, dtype: str) -> None:
    """Every pair of head sizes that is not refused by name has a tile, and only the widest are refused."""
    for head_dim in fa1.HEAD_DIMS:
        for head_dim_v in fa1.HEAD_DIMS:
            if max(head_dim, head_dim_v) == 512 and (arch == "75" or dtype == "fp32"):
                continue
            if arch == "75" and dtype == "fp32" and max(head_dim, head_dim_v) == 256:
                continue
            wanted = replace(problem(dtype, head_dim), head_dim_v=head_dim_v)
            config = DIRECTIONS[direction](wanted, arch)
            assert config.shared_bytes <= tiles.SHARED_LIMITS[arch]
            assert config.num_threads <= 512  # launch bounds leave 128 registers of 65536 and more
