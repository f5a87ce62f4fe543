"""The Hopper forward compiles without a GPU, keeps its wgmma in flight, and is chosen for what it can do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hopper_compile import check_resources, geometry, problem, product_runs

from hf_flash_cupy import sm90, tiles
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.problem import KernelConfig

CONFIGS = {config.name: config for config in sm90.reachable_configs()}
# Registers follow from the sizes and from how the kernel is told what a row sees; score modifications only add to them,
# so that all kernels without any are compiled, and of one type those with the most.
MODIFIED = re.compile("_softcap|_alibi|_anyscale")
FAST = re.compile(
    "fa2_forward_sm90_(bf16_d128_g3_n64_s4_(turns_causal_vector|gqa_left_causal_vector_varlen|unfused_vector_intervals_mask)"
    r"|fp16_d64_\w+\d(_turns)?_causal_vector|bf16_d256_\w+_unfused_left_causal_vector)_sm90a"
)
CASES = [
    pytest.param(config, id=name, marks=() if FAST.fullmatch(name) else pytest.mark.full)
    for name, config in CONFIGS.items()
    if ((count := len(MODIFIED.findall(name))) == 0 and ("_bf16_" in name or "_gqa_" not in name))
    or (count == 2 and "_bf16_" in name and "_gqa_" not in name)
]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> compiler.CompiledUnit:
    config: KernelConfig = request.param
    return compiler.compile_cubin(source.generate_source(config), config.name, config.arch)


@pytest.mark.parametrize("compiled", CASES, indirect=True)
def test_nothing_spills_and_nothing_waits(compiled: compiler.CompiledUnit) -> None:
    check_resources(compiled)


@pytest.mark.parametrize("compiled", CASES, indirect=True)
def test_products_stand_in_runs(compiled: compiler.CompiledUnit, tmp_path: Path) -> None:
    """A serialised product has a wait behind every instruction."""
    runs = product_runs(compiled, tmp_path)
    assert len(runs) >= 3  # the first scores, a step, the end of a tile
    assert min(runs) >= 4


@pytest.mark.parametrize(
    ("features", "window", "steps"),
    [
        ({}, (-1, -1), 1),
        ({}, (-1, 0), 2),
        ({"softcap": True}, (-1, 0), 1),
        ({"varlen": True}, (-1, 0), 1),
        ({}, (1023, 0), 1),
        ({"intervals": True}, (-1, 0), 1),
    ],
)
def test_a_step_is_compiled_once_but_for_plain_causal_rows(
    features: dict[str, Any], window: tuple[int, int], steps: int
) -> None:
    """A second copy is half a second of compilation."""
    config = sm90.select(problem(256, **features), geometry(256, window=window))
    assert config is not None
    ptx = compiler.compile_cubin(source.generate_source(config), config.name, compiler.Target("90a", "ptx")).cubin
    scores, outputs = 256 // 16, config.tile.block_n // 16  # products of a block
    # Beside the steps: the first scores of a tile, and its last output.
    assert ptx.count(b"wgmma.mma_async") == (steps + 1) * (scores + outputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "built"), [(48, 64), (72, 96), (80, 96), (112, 128), (160, 192), (256, 256)])
def test_served(head_dim: int, built: int, causal: bool) -> None:
    config = sm90.select(problem(head_dim), geometry(head_dim, window=(-1, 0 if causal else -1)))
    assert config is not None
    assert f"_d{built}_" in config.name
    assert ("causal" in config.name) == causal
    assert config.shared_bytes <= tiles.SHARED_LIMITS["90a"]


@pytest.mark.parametrize(
    ("asked", "window", "constants"),
    [
        ({}, (128, 0), {"kLeft", "kCausal"}),
        ({}, (128, -1), {"kLeft"}),
        ({}, (4095, 4095), set()),  # of 4,096 rows and keys
        ({"varlen": True}, (-1, 0), {"kVarlen", "kCausal"}),
        ({"intervals": True}, (128, 0), {"kIntervals"}),  # which say for every row what the window does
        ({"mask": True, "intervals": True}, (-1, 0), {"kIntervals", "kMask"}),
    ],
)
def test_what_a_row_sees(asked: dict[str, Any], window: tuple[int, int], constants: set[str]) -> None:
    """A constant for each way of hiding keys; others are off, so that they cost nothing."""
    config = sm90.select(problem(**asked), geometry(window=window))
    assert config is not None
    ways = {"kLeft", "kCausal", "kVarlen", "kIntervals", "kMask"}
    assert {name for name in ways if dict(config.constants)[f"bool {name}"] == "true"} == constants


def test_packed_tensors_have_one_entry() -> None:
    boxes = sm90.boxes(problem(varlen=True), geometry(batch=7), block_n=64)
    assert {box.sizes[3] for box in boxes.values()} == {1}


@pytest.mark.parametrize(
    ("asked", "changes", "why"),
    [
        ({"dropout": True}, {}, "dropout"),
        ({"bias": "fp32"}, {}, "bias"),
        ({"head_dim": 40, "head_dim_v": 40}, {}, "head_dim"),
        ({"dtype": "fp32"}, {}, "float32"),
        ({"vector": False}, {}, "16 bytes"),
        ({}, {"k_strides": (0, 256, 128)}, "broadcast"),
        ({}, {"seqlen_q": 1}, "rows"),
        ({"varlen": True, "seqlen_q": 1}, {}, "rows"),
        ({"varlen": True}, {"seqlen_k": 0}, "keys"),
        ({"head_dim": 256, "head_dim_v": 256, "mask": True, "alibi": True}, {}, "together"),
        ({"head_dim": 320, "head_dim_v": 320}, {}, "head_dim"),
    ],
)
def test_left_to_mma(asked: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    wanted, numbers = problem(**{"head_dim": 128} | {}), geometry(**changes)
    wanted = replace(wanted, **asked)
    assert why in sm90.refusal(wanted, numbers)
    assert sm90.select(wanted, numbers) is None


def test_unequal_head_dims() -> None:
    numbers = geometry(192, head_dim_v=128)
    config = sm90.select(replace(problem(192), head_dim_v=128), numbers)
    assert config is not None
    assert "_d192_dv128_" in config.name
    assert dict(config.constants)["int kHeadDimV"] == "128"


def test_every_warpgroup_has_registers() -> None:
    """A block starts with what launch bounds leave each thread; setmaxnreg only moves registers between warpgroups."""
    for config in CONFIGS.values():
        constants = dict(config.constants)
        loading, computing = (int(constants[f"int k{role}Registers"]) for role in ("Load", "Compute"))
        at_start = min(65536 // config.num_threads // 8 * 8, 255) * config.num_threads
        assert 128 * loading + (config.num_threads - 128) * computing <= at_start


@pytest.mark.parametrize("pairs", [1, 7, 31, 64, 960])
@pytest.mark.parametrize("group", [1, 4])
def test_sections_are_even(pairs: int, group: int) -> None:
    """With groups of heads, whose tiles are dealt together, it is the heads of keys that count."""
    numbers = geometry(batch=1, num_heads=pairs * group, num_heads_k=pairs, window=(-1, 0))
    size = sm90.heads_per_section(problem(), numbers)
    assert 1 <= size <= pairs
    sections = -(-pairs // size)
    assert sections * size - pairs < sections  # none is shorter than the others by more than its share


@pytest.mark.parametrize(("seqlen", "causal", "mebibytes"), [(1024, True, 16), (8192, True, 128), (8192, False, 16)])
def test_sections_hold_what_the_cache_does(seqlen: int, causal: bool, mebibytes: int) -> None:
    """Long causal rows alone read their keys from device memory, for the sake of a long list of tiles."""
    numbers = geometry(head_dim=256, seqlen=seqlen, batch=200, num_heads_k=8, window=(-1, 0 if causal else -1))
    keys = sm90.heads_per_section(problem(256), numbers) * seqlen * (256 + 256) * 2
    assert mebibytes / 2 < keys / 2**20 <= mebibytes


@pytest.mark.parametrize(("rows", "group"), [(64, 1), (65, 1), (64, 4), (128, 5), (1000, 8)])
def test_tiles_hold_all_units(rows: int, group: int) -> None:
    """Heads that share their keys fill tiles together; of others each fills its own."""
    numbers = geometry(batch=3, num_heads=2 * group, num_heads_k=2, seqlen_q=rows)
    config = sm90.select(problem(), numbers)
    assert config is not None
    assert config.tile is not None
    assert dict(config.constants)["bool kPacksHeads"] == ("true" if group > 1 else "false")
    of_head, total = sm90.num_tiles(problem(), numbers, config.tile)
    units = -(-rows // 64) * group
    assert units <= of_head * 3 < units + 3  # three warpgroups, a unit each
    assert total == of_head * 2 * 3  # heads of keys, entries
