"""The forward kernel of compute capability 9.0: which problems it serves, and its settings by shape.

Pure functions of numbers: no GPU is needed, but for asking which one a device is (:func:`serves`). Plans:
:mod:`hf_flash_cupy.sm90_plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from . import dispatch, env
from .plans import Geometry
from .problem import AttentionProblem, DType, KernelConfig, Tile
from .tensormap import TensorBox

ARCH = "90a"
UNIT_ROWS = 64  # kUnitRows: rows of a warpgroup
PANEL_COLUMNS = 64  # kPanelColumns: columns of a box
_STORE_ROWS = 16  # rows that a warp stores at once
_TILE_SLOTS, _ALIGNMENT = 2, 1024  # kTileSlots, kAlignment

# (head_dim, head_dim_v) of the kernels, by cost. Any other is padded with zeros up to the next, by the copy engine.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
MIN_HEAD_DIM = 48  # below, more of a tile would be padding than not
MIN_ROWS = 64  # rows below which most of a tile would be empty


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the kernel depends on the shape. None changes what is computed."""

    warpgroups: int  # that compute, 64 rows each
    block_n: int  # keys of one step
    stages: int  # blocks of k and v in shared memory
    turns: bool  # warpgroups start their products one after the other
    fused: bool = True  # two places for q: the first scores of a tile beside the last output of the one before
    packs: bool = False  # rows of all heads that share a head of keys fill a tile together


@dataclass(frozen=True, slots=True)
class Visibility:
    """How the kernel is told which keys a row sees: constants of it."""

    causal: bool = False  # a bound to the right
    left: bool = False  # one to the left
    holes: bool = False  # whatever is asked for, row by row: intervals or a mask is
    varlen: bool = False  # within its packed sequence

    @property
    def clears(self) -> bool:
        """Whether blocks may hold keys that no row sees, so that a loading warp looks at their values (kClears)."""
        return self.left or self.holes or self.varlen


def _registers(warpgroups: int, visible: Visibility) -> tuple[int, int]:
    """Of a thread of the loading and of the computing warpgroups: 65,536 in all, less what a block starts with."""
    if visible.holes:  # the loading warps look at every row
        return {2: (56, 224), 3: (56, 152)}[warpgroups]
    return {2: (40, 232) if visible.clears else (24, 240), 3: (32, 160), 4: (32, 112)}[warpgroups]


def settings(head_dims: tuple[int, int], length: int, visible: Visibility, crowded: bool = False) -> Settings:
    """The settings for ``head_dims`` of HEAD_DIMS, measured on an H200. More warpgroups hide more of the softmax.

    ``length``: rows or keys, the fewer. ``crowded``: scores are changed before the softmax, which takes registers.
    """
    chosen = _settings_of_size(head_dims, length, visible, crowded)
    if visible.holes:  # rows of one tile may see keys far apart: no warpgroup runs ahead into the next tile
        return replace(chosen, turns=False, fused=False)
    return chosen


def _settings_of_size(head_dims: tuple[int, int], length: int, visible: Visibility, crowded: bool) -> Settings:
    causal = visible.causal
    if head_dims == (64, 64):
        # The softmax costs as much as the products: 128 keys a step spend the least beside it, and turns keep the
        # warpgroups apart. Short rows want four warpgroups that drift freely instead; under a causal mask, where their
        # tiles differ in length, all but the longest do. Four leave no registers to more than that.
        if visible.holes or (visible.clears and crowded):
            return Settings(3, 64, 8, turns=False)
        if visible.clears:
            return Settings(3, 128, 5, turns=False)
        long = length > (8192 if causal else 1024) and not crowded
        return Settings(3, 128, 5, turns=True) if long else Settings(4, 64, 8, turns=False)
    if head_dims in ((96, 96), (128, 128)):
        # 64 keys divide every power of two, and make the diagonal of a warpgroup's rows one block. Turns pay at 128
        # columns but for the shortest causal tiles; at 96 the products are too short to wait for.
        return Settings(3, 64, 4, turns=head_dims == (128, 128) and (length > 512 or not causal))
    if head_dims == (192, 128):
        if visible.left:  # blocks passed on at both ends of a tile take more than two places
            return Settings(3, 64, 3, turns=False, fused=False)
        return Settings(3, 64, 2, turns=False)  # all of the shared memory
    if head_dims == (192, 192):
        # The output takes the registers of a third warpgroup. A second q wins nothing, and compiles a tenth longer.
        return Settings(2, 80, 2, turns=False, fused=False)
    # The output alone is 128 registers: two warpgroups, and no room for a second q.
    return Settings(2, 64, 2, turns=False, fused=False)


def visibility(problem: AttentionProblem, window: tuple[int, int]) -> Visibility:
    """What of the kernel's visibility the call needs."""
    if problem.intervals or problem.mask:
        return Visibility(holes=True)  # row by row, window and all
    left, right = window
    return Visibility(causal=right >= 0, left=left >= 0, varlen=problem.varlen)


def _window(geometry: Geometry) -> tuple[int, int]:
    """The bounds that hide a key from some row; -1 for others."""
    left, right = geometry.window
    return (left if left < geometry.seqlen_k - 1 else -1, right if right < geometry.seqlen_q - 1 else -1)


def _settings(problem: AttentionProblem, geometry: Geometry) -> Settings:
    length = min(problem.seqlen_q, geometry.seqlen_q, geometry.seqlen_k)
    crowded = problem.softcap or problem.alibi
    chosen = settings(kernel_head_dims(problem), length, visibility(problem, _window(geometry)), crowded)
    return replace(chosen, packs=packs_heads(problem, geometry))


def packs_heads(problem: AttentionProblem, geometry: Geometry) -> bool:
    """Whether the heads of a group share tiles: few rows then fill them, and many see more nearly the same keys."""
    holes = visibility(problem, _window(geometry)).holes  # which may differ from head to head
    return geometry.num_heads > geometry.num_heads_k and not holes


def _dealt(problem: AttentionProblem, geometry: Geometry) -> tuple[int, int]:
    """Heads whose tiles are dealt apart from each other, and heads of queries that share each."""
    packs = packs_heads(problem, geometry)
    group = geometry.num_heads // geometry.num_heads_k
    return (geometry.num_heads_k, group) if packs else (geometry.num_heads, 1)


def kernel_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Of HEAD_DIMS, those that hold the problem's."""
    asked = (problem.head_dim, problem.head_dim_v)
    return next(sizes for sizes in HEAD_DIMS if all(size >= one for size, one in zip(sizes, asked, strict=True)))


def shared_bytes(chosen: Settings, head_dims: tuple[int, int], visible: Visibility) -> int:
    """Shared memory of the plan in cuda_src/fa2/forward_sm90_traits.cuh, which asserts this number."""
    row, row_v = (-(-size // PANEL_COLUMNS) * PANEL_COLUMNS * 2 for size in head_dims)
    q_slots = 2 if chosen.fused else 1
    q = q_slots * chosen.warpgroups * UNIT_ROWS * row
    keys_and_values = chosen.stages * chosen.block_n * (row + row_v)
    barriers = 2 * (q_slots * chosen.warpgroups + 2 * chosen.stages + _TILE_SLOTS)
    barriers += chosen.stages if visible.clears else 0
    record = 16 * (1 + visible.varlen + (1 + chosen.warpgroups if visible.holes else 0))
    return _ALIGNMENT + q + keys_and_values + _TILE_SLOTS * record + 8 * barriers


def refusal(problem: AttentionProblem, geometry: Geometry) -> str:
    """Why the kernel does not serve a problem, which the one of mma.sync then does; "" where it does."""
    if why := refusal_of_problem(problem):
        return why
    if not all(box.is_encodable for box in boxes(problem, geometry, block_n=64).values()):
        return "tensors whose rows do not start on 16 bytes, or are broadcast"
    if geometry.seqlen_q < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows"
    return "" if geometry.seqlen_k > 0 else "no keys"


def refusal_of_problem(problem: AttentionProblem) -> str:
    """The same, whatever the geometry."""
    features = {"bias": problem.bias != "none", "dropout": problem.dropout, "float32": problem.dtype == "fp32"}
    if named := [name for name, given in features.items() if given]:
        return ", ".join(named)
    sizes = (problem.head_dim, problem.head_dim_v)
    if max(sizes) > HEAD_DIMS[-1][0] or min(sizes) < MIN_HEAD_DIM:
        return f"head_dim {sizes[0]}, head_dim_v {sizes[1]}: {MIN_HEAD_DIM} to {HEAD_DIMS[-1][0]} are served"
    if not problem.vector:
        return "tensors whose rows do not start on 16 bytes"
    if max(sizes) > 192 and problem.mask and problem.alibi:
        return "mask and alibi_slopes together above head_dim 192: there are no registers left"
    return f"fewer than {MIN_ROWS} rows" if problem.seqlen_q < MIN_ROWS else ""


@lru_cache(maxsize=4096)
def select(problem: AttentionProblem, geometry: Geometry, arch: str = ARCH) -> KernelConfig | None:
    """The kernel that serves the problem, None where mma.sync's does. ``arch``: ARCH or "host"."""
    if refusal(problem, geometry):
        return None
    visible = visibility(problem, _window(geometry))
    return config(problem, kernel_head_dims(problem), visible, _settings(problem, geometry), arch)


def config(
    problem: AttentionProblem, head_dims: tuple[int, int], visible: Visibility, chosen: Settings, arch: str = ARCH
) -> KernelConfig:
    """The kernel of the given settings; ``head_dims`` of HEAD_DIMS."""
    load, compute = _registers(chosen.warpgroups, visible)
    constants = (
        ("int kWarpgroups", str(chosen.warpgroups)),
        ("int kStages", str(chosen.stages)),
        ("bool kCausal", _cxx(visible.causal)),
        ("bool kLeft", _cxx(visible.left)),
        ("bool kTurns", _cxx(chosen.turns)),
        ("bool kPacksHeads", _cxx(chosen.packs)),
        ("bool kFused", _cxx(chosen.fused)),
        ("int kLoadRegisters", str(load)),
        ("int kComputeRegisters", str(compute)),
    )
    numbers = f"g{chosen.warpgroups}_n{chosen.block_n}_s{chosen.stages}"
    numbers += "_turns" * chosen.turns + "_unfused" * (not chosen.fused)
    numbers += "_gqa" * chosen.packs + "_left" * visible.left + "_causal" * visible.causal
    name = dispatch.kernel_name("fa2_forward_sm90", problem, numbers, arch, head_dims)
    tile = Tile(
        block_m=UNIT_ROWS * chosen.warpgroups,
        block_n=chosen.block_n,
        num_warps=4 * chosen.warpgroups,
        stages=chosen.stages,
        min_blocks=1,
    )
    shared = shared_bytes(chosen, head_dims, visible)
    made = dispatch.kernel_config(
        *("fa2_forward_sm90", name, "fa2/forward_sm90.cuh", problem, arch, tile, head_dims, constants, shared)
    )
    return replace(made, params="ForwardSm90Params", num_threads=128 * (chosen.warpgroups + 1))


_WINDOWS = ((-1, -1), (-1, 0), (0, -1), (0, 0))  # bounds of each kind


def configs_of(problem: AttentionProblem, windows: Iterable[tuple[int, int]] = _WINDOWS) -> Iterator[KernelConfig]:
    """Every configuration that :func:`select` can give for a problem that is served and one of ``windows``."""
    head_dims = kernel_head_dims(problem)
    for window, length in itertools.product(windows, (512, 16384)):
        visible = visibility(problem, window)
        chosen = settings(head_dims, length, visible, problem.softcap or problem.alibi)
        for packs in (False,) if visible.holes else (False, True):
            yield config(problem, head_dims, visible, replace(chosen, packs=packs))


def reachable_configs() -> Iterator[KernelConfig]:
    """Every configuration that :func:`select` can give, each once."""
    seen: set[str] = set()
    dtypes: tuple[DType, ...] = ("fp16", "bf16")
    scores: tuple[dict[str, bool], ...] = ({}, {"softcap": True}, {"alibi": True}, {"positive_scale": False})
    scores += ({"softcap": True, "alibi": True},)
    keys: tuple[dict[str, bool], ...] = ({}, {"varlen": True}, {"intervals": True}, {"mask": True})
    keys += ({"intervals": True, "mask": True},)
    for dtype, head_dims, modified, hidden in itertools.product(dtypes, HEAD_DIMS, scores, keys):
        problem = AttentionProblem(dtype, *head_dims, MIN_ROWS, vector=True)
        asked = replace(problem, **modified, **hidden)  # type: ignore[arg-type]
        for made in () if refusal_of_problem(asked) else configs_of(asked):
            if made.name not in seen:
                seen.add(made.name)
                yield made


def _cxx(value: bool) -> str:
    return "true" if value else "false"


def num_tiles(problem: AttentionProblem, geometry: Geometry, tile: Tile) -> tuple[int, int]:
    """Tiles of a head of :func:`_dealt` (packed: at most, over all entries), and of all."""
    heads, group = _dealt(problem, geometry)
    warpgroups = tile.block_m // UNIT_ROWS
    units = -(-geometry.seqlen_q // UNIT_ROWS)
    if problem.varlen:
        # Each entry, and the rows beyond the last offset, may end in a unit and a tile that are not full.
        entries = geometry.batch + 1
        of_head = -(-(units + entries) * group // warpgroups) + entries
        return of_head, of_head * heads
    of_head = -(-units * group // warpgroups)
    return of_head, of_head * heads * geometry.batch


def heads_per_section(problem: AttentionProblem, geometry: Geometry) -> int:
    """(batch, head) pairs whose tiles run interleaved, longest first: as many as keep their k and v in the L2 cache."""
    # Under a causal mask tiles differ in length, and a longer list of short ones to fill up with is worth misses: tiles
    # of one head that run at once read the same keys anyway. Not so where heads have few tiles: of a long list every
    # level of rows would read all keys from device memory again (a quarter slower at 1,024 rows of 256 columns).
    crosses = _window(geometry)[1] >= 0 and geometry.seqlen_k > 2048
    l2_bytes = (128 if crosses else 16) << 20
    heads, group = _dealt(problem, geometry)
    pairs = geometry.batch * heads
    one = geometry.seqlen_k * (geometry.head_dim + geometry.head_dim_v) * 2
    most = max(l2_bytes // max(one, 1), 1) * (geometry.num_heads // geometry.num_heads_k // group)
    return -(-pairs // -(-pairs // most))  # sections of one size


def boxes(problem: AttentionProblem, geometry: Geometry, block_n: int) -> dict[str, TensorBox]:
    """What the copy engine is told of q, k, v and out."""
    rows = {"q": UNIT_ROWS, "k": block_n, "v": block_n, "out": _STORE_ROWS}
    return {name: _box(problem, geometry, name, count) for name, count in rows.items()}


def _box(problem: AttentionProblem, geometry: Geometry, name: str, rows: int) -> TensorBox:
    of_q = name in ("q", "out")
    columns = geometry.head_dim if name in ("q", "k") else geometry.head_dim_v
    sizes = (
        geometry.seqlen_q if of_q else geometry.seqlen_k,
        geometry.num_heads if of_q else geometry.num_heads_k,
        1 if problem.varlen else geometry.batch,
    )
    return tensor_box(problem.dtype, columns, sizes, getattr(geometry, f"{name}_strides"), rows)


def tensor_box(
    dtype: DType, columns: int, sizes: tuple[int, int, int], strides: tuple[int, int, int], rows: int
) -> TensorBox:
    """``sizes``: rows, heads, entries; ``strides``: of entry, row, head, in elements; ``rows`` of a box."""
    batch, row, head = strides
    # A dimension of size 1 may have any stride; one of 16 bytes is never stepped over.
    steps = [2 * stride if size > 1 else 16 for stride, size in zip((row, head, batch), sizes, strict=True)]
    return TensorBox(dtype, (columns, *sizes), (steps[0], steps[1], steps[2]), (PANEL_COLUMNS, rows))


def select_on(device: torch.device, problem: AttentionProblem, geometry: Geometry) -> KernelConfig | None:
    """The kernel for a call on ``device``, None where another serves it."""
    if not serves(device):
        return None
    return select(problem, geometry, "host" if device.type == "cpu" else ARCH)


def serves(device: torch.device) -> bool:
    """Whether calls on ``device`` may take this kernel: compute capability 9.0, and no other architecture forced.

    On the CPU they do where HF_FLASH_CUPY_ARCH asks for it.
    """
    if device.type == "cpu":
        return env.forced_arch() == ARCH
    return device.type == "cuda" and env.forced_arch() is None and torch.cuda.get_device_capability(device) == (9, 0)
