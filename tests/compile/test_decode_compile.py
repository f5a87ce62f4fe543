"""The decode, combine and append kernels compile for every architecture, without a GPU, and fit its registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_flash_cupy import decode, tiles
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.problem import AttentionProblem, KernelConfig

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"paged": True},
    "mask": {"mask": True},
    "intervals": {"intervals": True, "softcap": True},
    "bias": {"bias": "fp32", "vector": False},
    "everything": {"mask": True, "intervals": True, "bias": "element", "alibi": True, "softcap": True, "vector": False},
}
ONE_TILE, TWO_TILES = 4, 32  # packed rows


def compiled(config: KernelConfig) -> compiler.Resources:
    unit = compiler.compile_cubin(source.generate_source(config), config.name, config.arch)
    usage = compiler.resource_usage(unit.log)
    assert usage is not None
    return usage


def problem(head_dim: int, dtype: Any = "fp16", **features: Any) -> AttentionProblem:
    return replace(AttentionProblem(dtype, head_dim, head_dim, 1, vector=True), **features)


@pytest.mark.parametrize("rows", [ONE_TILE, TWO_TILES])
@pytest.mark.parametrize(("arch", "head_dim"), [("75", 64), ("80", 128), ("90", 128), ("90", 256)])
def test_nothing_spills(arch: str, head_dim: int, rows: int) -> None:
    assert compiled(decode.decode_config(problem(head_dim), arch, rows)).spill_bytes == 0


@pytest.mark.parametrize("arch", ["75", "90"])
def test_the_small_kernels_are_small(arch: str) -> None:
    for config in (decode.append_config(problem(64), arch), decode.append_config(problem(128, paged=True), arch)):
        usage = compiled(config)
        assert usage.spill_bytes == 0
        assert usage.registers <= 96


def test_every_feature_compiles() -> None:
    assert compiled(decode.decode_config(problem(128, **FEATURES["everything"]), "80", ONE_TILE)).registers <= 255


@pytest.mark.full
@pytest.mark.parametrize("arch", tiles.ARCHS)
def test_nothing_spills_anywhere(arch: str, subtests: pytest.Subtests) -> None:
    for head_dim in (16, 64, 80, 128, 192, 256):
        for name, features in FEATURES.items():
            for rows in (ONE_TILE, TWO_TILES):
                with subtests.test(head_dim=head_dim, features=name, rows=rows):
                    usage = compiled(decode.decode_config(problem(head_dim, **features), arch, rows))
                    # Everything at once costs registers that nobody asks for in one model.
                    assert usage.spill_bytes == 0 or name == "everything"
