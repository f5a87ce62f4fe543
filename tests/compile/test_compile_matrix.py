"""Kernels of every architecture compile, without a GPU, and fit its registers and shared memory.

Registers follow from the tile and the head sizes; features only add to them. So every shape (element types, tile,
head sizes) is compiled with the fewest features, with those that cost most alone, and with the most, rather than with
all combinations, and unequal head sizes (which only mix what equal ones have) on one architecture.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

import pytest

from hf_flash_cupy import dispatch, tiles
from hf_flash_cupy.errors import UnsupportedProblem
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.problem import AttentionProblem, KernelConfig

# CPU time. The goal is 1.5 s for what models use most; beyond this bound somebody unrolled too much.
MAX_COMPILE_S = 20.0

# Multi-head latent attention: the one pair of unequal head sizes that large models use.
LATENT = (192, 128)

# The fast tier, for every architecture: (product, head size, features).
FAST = {
    ("fp16", 64, "plain"),
    ("fp16", 128, "plain"),
    ("fp16", 128, "packed"),
    ("bf16", 256, "dense"),
    ("float", 64, "dense"),
    ("float", 256, "plain"),
    ("tf32", 128, "plain"),
    ("fp16", 64, "dropout"),
    ("bf16", 512, "plain"),
}

# Kernels that calls on one architecture can reach, as tiles.reachable_problems lists them: only ever built on demand,
# but a feature that doubles this number doubles what nobody can test.
MAX_REACHABLE = 50_000


def constant(config: KernelConfig, declaration: str) -> str:
    return dict(config.constants)[declaration]


def head_dims(config: KernelConfig) -> tuple[int, int]:
    return int(constant(config, "int kHeadDim")), int(constant(config, "int kHeadDimV")) * config.tile.v_chunks


def shape(config: KernelConfig) -> tuple[str, ...]:
    """What of a configuration is no feature, nor follows from the rest."""
    return tuple(
        value
        for declaration, value in config.constants
        if not declaration.startswith("bool ") and declaration not in ("int kSharedBytes", "using Bias")
    )


SPARING = ("bool kVector", "bool kPositiveScale")


def weight(config: KernelConfig) -> int:
    """How many features cost registers. Aligned rows and a scale of known sign spare some."""
    return sum((value == "true") != (name in SPARING) for name, value in config.constants if value in ("true", "false"))


def extremes(configs: list[KernelConfig]) -> dict[str, KernelConfig]:
    """The lightest configuration of a shape and with each costly feature, the heaviest without and with packing."""
    packed = [config for config in configs if constant(config, "bool kVarlen") == "true"]
    dense = [config for config in configs if config not in packed]
    found = {"plain": min(configs, key=weight)}
    for name in ("Bias", "Dropout"):
        having = [config for config in configs if constant(config, f"bool k{name}") == "true"]
        found |= {name.lower(): min(having, key=weight)} if having else {}
    found |= {"dense": max(dense, key=weight)} if dense else {}
    return found | ({"packed": max(packed, key=weight)} if packed else {})


def shapes(arch: str) -> dict[tuple[str, ...], list[KernelConfig]]:
    found: dict[tuple[str, ...], dict[str, KernelConfig]] = {}
    for problem in tiles.reachable_problems(arch):
        sizes = (problem.head_dim, problem.head_dim_v)
        if sizes[0] == sizes[1] or sizes == LATENT or arch == "80":
            try:
                config = dispatch.select(problem, arch)
            except UnsupportedProblem:
                continue
            found.setdefault(shape(config), {})[config.name] = config
    return {key: list(configs.values()) for key, configs in found.items()}


@cache
def matrix() -> dict[KernelConfig, bool]:
    """Each configuration → whether it is of the fast tier."""
    chosen: dict[KernelConfig, bool] = {}
    # Minor versions of one major version compile alike: only what their smaller shared memory changes is new.
    seen: set[tuple[object, ...]] = set()
    for arch in tiles.ARCHS:
        largest: dict[tuple[str, int, str], KernelConfig] = {}
        for configs in shapes(arch).values():
            for role, config in extremes(configs).items():
                equal = len(set(head_dims(config))) == 1
                key = (arch[:-1], config.constants, config.min_blocks)
                if key not in seen and (equal or head_dims(config) == LATENT or role == "dense"):
                    seen.add(key)
                    chosen[config] = False
                kind = (constant(config, "using Multiply"), head_dims(config)[0], role)
                if equal and kind in FAST and scores(config) > scores(largest.get(kind)):
                    largest[kind] = config
        chosen |= dict.fromkeys(largest.values(), True)
    return chosen


def scores(config: KernelConfig | None) -> int:
    """Elements of the tile of scores."""
    return int(constant(config, "int kBlockM")) * int(constant(config, "int kBlockN")) if config else 0


def cases() -> Iterator[object]:
    for config, fast in matrix().items():
        yield pytest.param(config, id=config.name, marks=() if fast else pytest.mark.full)


@pytest.mark.parametrize("config", list(cases()))
def test_it_compiles_into_what_the_architecture_has(config: KernelConfig) -> None:
    if int(config.arch) not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know sm_{config.arch}")
    start = time.process_time()
    compiled = compiler.compile_cubin(source.generate_source(config), config.name, config.arch)
    assert time.process_time() - start < MAX_COMPILE_S
    assert compiled.target.option == f"-arch=sm_{config.arch}"
    assert "warning" not in compiled.log
    used = compiler.resource_usage(compiled.log)
    assert used is not None
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)
    # What launches with the block size and the blocks per multiprocessor that the kernel promises.
    assert used.registers <= 255
    assert used.registers * config.num_threads * config.min_blocks <= 65536
    assert used.shared_bytes + config.shared_bytes <= tiles.SHARED_LIMITS[config.arch]


def test_the_fast_tier_has_every_architecture_and_stays_small() -> None:
    fast = [config for config, is_fast in matrix().items() if is_fast]
    assert {config.arch for config in fast} == set(tiles.ARCHS)
    assert len(fast) <= len(FAST) * len(tiles.ARCHS)


@pytest.mark.slow
def test_no_reachable_shape_was_left_out() -> None:
    """Nothing that a call can select has element types, a tile or head sizes that are never compiled."""
    compiled = {(config.arch[:-1], *shape(config)) for config in matrix()}
    for arch in tiles.ARCHS:
        reachable = {shape(config): config for config in dispatch.reachable_configs(arch)}
        for key, config in reachable.items():
            if arch == "80" or len(set(head_dims(config))) == 1:
                assert (arch[:-1], *key) in compiled, config.name


def test_the_number_of_kernels_is_bounded() -> None:
    for arch in ("75", "90"):
        assert len(list(dispatch.reachable_configs(arch))) <= MAX_REACHABLE


def test_what_no_tile_fits_is_refused_by_name() -> None:
    """float32 of head size 512 needs 80 KB; everything else of any size has a kernel everywhere."""
    refused = {
        (arch, problem.dtype, max(problem.head_dim, problem.head_dim_v))
        for arch in tiles.ARCHS
        for problem in tiles.reachable_problems(arch)
        if tiles.choose(problem, arch) is None
    }
    assert refused == {("75", "fp32", 512)}
    problem = AttentionProblem(dtype="fp32", head_dim=500, head_dim_v=500, seqlen_q=1, vector=True)
    with pytest.raises(UnsupportedProblem, match=r"head_dim 500 in fp32 needs more .* 64 KB .* 7\.5\..*float16"):
        dispatch.select(problem, "75")
