"""Few rows against many keys: tiles, splits, kernel configurations and plans of ``cuda_src/fa2/decode.cuh``.

Such a call only reads keys and values: its speed is the memory's bandwidth, reached where every multiprocessor always
has tens of kilobytes on their way. The result's bits depend on the number of splits, which by default follows from the
sizes, the batch's among them; with ``num_splits`` given, or tiles enough for one split, they depend on the row's own
entry only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .dispatch import check_supported, kernel_config, kernel_name
from .errors import UnsupportedProblem
from .launch import device_arch
from .plans import Geometry, Plan, attention_params, explain_choice
from .problem import AttentionProblem, KernelConfig, Tile
from .tiles import HOST_GAP, SHARED_LIMITS, rounded_head_dims

MAX_ROWS = 64  # packed rows (query rows × heads of a group) up to which this beats the forward kernel on long caches
MIN_KEYS = 512  # below, one thread block of the forward kernel is done before a split and its combination are

MAX_SPLITS = 256
_STEP_BYTES = 32 << 10  # of keys and values that four warps read in one step
_WARP_KEYS = 64  # at most, of a step: bounds the registers of the scores
_HOST_MULTIPROCESSORS = 4  # so that a CPU splits keys as a GPU does


@dataclass(frozen=True, slots=True)
class Splits:
    """How a call divides its keys among thread blocks, and what it needs for that."""

    num_splits: int
    row_blocks: int  # tiles of packed rows of one head of keys
    thread_blocks: int


def serves(problem: AttentionProblem, geometry: Geometry, arch: str) -> bool:
    """Whether a call of flash_attention goes to the decode kernel rather than to the forward kernel."""
    if problem.varlen or problem.dropout or problem.algorithm != "fa2" or geometry.seqlen_k < MIN_KEYS:
        return False
    return 0 < packed_rows(geometry) <= MAX_ROWS and choose(problem, arch, packed_rows(geometry)) is not None


def packed_rows(geometry: Geometry) -> int:
    """Rows of one entry that read the same head of keys."""
    return geometry.num_heads // max(geometry.num_heads_k, 1) * geometry.seqlen_q


def candidates(problem: AttentionProblem, arch: str, rows: int) -> Iterator[Tile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    chunks = -(-dv // 256)  # a warp's 16 rows of 256 columns of the output are 128 of a lane's registers
    size = 4 if problem.dtype == "fp32" else 2
    # The rows of a tile cost products only: a second m-tile spares reading the keys again, where registers allow.
    block_m = 32 if rows > 16 and max(d, dv) <= 128 and size == 2 else 16
    if arch == "host":
        yield Tile(block_m, 64, 2, 2, 1, chunks)
        return
    per_key = (d + dv // chunks) * size
    keys = min(max(_STEP_BYTES // per_key // 64 * 16, 16), _WARP_KEYS)  # of one step of a warp
    # One thread block an SM with 64 KB steps (on an H200 1 to 5 % faster than two with 32 KB steps, which need twice
    # the splits); where shared memory is small, fewer stages, smaller steps, fewer warps.
    if block_m == 16:
        yield Tile(block_m, 4 * min(2 * keys, _WARP_KEYS), 4, 3, 1, chunks)
    for warps, stages in ((8, 2), (4, 3), (4, 2), (2, 3), (2, 2)):
        yield Tile(block_m, warps * keys, warps, stages, 1, chunks)
    yield Tile(16, 16, 1, 2, 1, chunks)


def shared_bytes(tile: Tile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/decode.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    dv //= tile.v_chunks
    size = 4 if problem.dtype == "fp32" else 2
    gap = HOST_GAP if arch == "host" else 0
    keys_or_parts = max(tile.stages * tile.block_n * (d + dv) * size, tile.num_warps * tile.block_m * dv * 4)
    return tile.block_m * d * size + gap + keys_or_parts + gap + tile.num_warps * tile.block_m * 8


def choose(problem: AttentionProblem, arch: str, rows: int) -> Tile | None:
    """The preferred tile for ``rows`` packed rows that fits ``arch``, if any does."""
    limit = SHARED_LIMITS[arch]
    for tile in candidates(problem, arch, rows):
        if shared_bytes(tile, problem, arch) <= limit:
            return tile
    return None


@lru_cache(maxsize=4096)
def decode_config(problem: AttentionProblem, arch: str, rows: int, tile: Tile | None = None) -> KernelConfig:
    """The kernel for ``rows`` packed rows of ``problem`` on ``arch``, with the preferred tile or the given one.

    Raises :class:`UnsupportedProblem` where no tile fits.
    """
    check_supported(problem, arch)
    tile = tile or choose(problem, arch, rows)
    if tile is None:
        raise UnsupportedProblem(
            f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in {problem.dtype} need more shared "
            f"memory with a key-value cache than the {SHARED_LIMITS[arch] >> 10} KB of a GPU of compute capability "
            f"{int(arch) / 10}. Use 16-bit tensors, or flash_attention on the filled part of the cache."
        )
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_s{tile.stages}_c{tile.v_chunks}"
    constants = (
        ("int kVChunks", str(tile.v_chunks)),
        ("int kNumWarps", str(tile.num_warps)),
        ("int kStages", str(tile.stages)),
        _paged(problem),
    )
    name = kernel_name("fa2_decode", problem, numbers + _paged_name(problem), arch)
    sizes = (d, dv // tile.v_chunks)
    shared = shared_bytes(tile, problem, arch)
    return kernel_config("fa2_decode", name, "fa2/decode.cuh", problem, arch, tile, sizes, constants, shared)


@lru_cache(maxsize=4096)
def combine_config(problem: AttentionProblem, arch: str) -> KernelConfig:
    """The kernel that makes one row of the splits' parts of it."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    tile = Tile(1, 1, 4, 1, 1)
    groups = tile.num_warps * 32 // (dv // (4 if problem.dtype == "fp32" else 8))
    constants = (("int kNumWarps", str(tile.num_warps)),)
    name = kernel_name("fa2_combine", problem, f"w{tile.num_warps}", arch)
    return kernel_config(
        "fa2_combine", name, "fa2/combine.cuh", problem, arch, tile, (d, dv), constants, groups * dv * 4
    )


@lru_cache(maxsize=4096)
def append_config(problem: AttentionProblem, arch: str) -> KernelConfig:
    """The kernel that writes new keys and values into a cache."""
    check_supported(problem, arch)
    tile = Tile(1, 1, 4, 1, 1)
    constants = (("int kNumWarps", str(tile.num_warps)), _paged(problem))
    name = kernel_name("fa2_append", problem, f"w{tile.num_warps}{_paged_name(problem)}", arch)
    sizes = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    return kernel_config("fa2_append", name, "fa2/append.cuh", problem, arch, tile, sizes, constants, 0)


def _paged(problem: AttentionProblem) -> tuple[str, str]:
    return ("bool kPaged", "true" if problem.paged else "false")


def _paged_name(problem: AttentionProblem) -> str:
    return "_paged" if problem.paged else ""


def num_splits(tiles: int, slots: int, key_blocks: int) -> int:
    """Thread blocks that share the keys of a tile of rows.

    ``tiles``: thread blocks without splitting; ``slots``: thread blocks the GPU holds at once; ``key_blocks``: steps of
    a thread block over all keys. The slots work in rounds, and a thread block takes as long as its share of the steps
    and one more to start; splitting at all costs another kernel, about one more.
    """
    best, least = 1, float("inf")
    for share in range(max(key_blocks, 1), 0, -1):
        splits = -(-key_blocks // share) if key_blocks else 1
        if splits > MAX_SPLITS:
            break
        time = -(-tiles * splits // slots) * (share + 1) + (splits > 1)
        if time < least:
            best, least = splits, time
    return best


def reachable_keys(geometry: Geometry) -> int:
    """Keys that the rows of a call may see, as far as window and lengths tell."""
    left, right = geometry.window
    if left < 0 or right < 0:
        return geometry.seqlen_k
    return min(geometry.seqlen_k, left + right + geometry.seqlen_q)


def splits_of(config: KernelConfig, geometry: Geometry, multiprocessors: int, asked: int | None) -> Splits:
    """The grid of a call; ``asked``: how many splits the user wants, None = as many as are fastest."""
    tile = config.tile
    assert tile is not None
    row_blocks = -(-packed_rows(geometry) // tile.block_m)
    tiles = row_blocks * geometry.num_heads_k * geometry.batch * tile.v_chunks
    key_blocks = -(-reachable_keys(geometry) // tile.block_n)
    chosen = num_splits(tiles, multiprocessors * tile.min_blocks, key_blocks) if asked is None else asked
    chosen = max(min(chosen, MAX_SPLITS), 1)
    return Splits(chosen, row_blocks, tiles * chosen)


def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workspace(problem: AttentionProblem, geometry: Geometry, splits: int) -> dict[str, int]:
    """Elements of the fp32 tensors that :func:`decode_plan` needs, by their names in the call; uninitialised."""
    if splits == 1:
        return {}
    rows = splits * geometry.batch * geometry.num_heads * geometry.seqlen_q
    dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)[1]
    return {"split_out": rows * dv, "split_max": rows, "split_sum": rows}


def decode_plan(
    problem: AttentionProblem, geometry: Geometry, device: torch.device, asked_splits: int | None = None
) -> tuple[Plan, dict[str, int]]:
    """The plan that reads q, k, v and what the problem names and writes out and lse; and its workspaces."""
    params = attention_params(geometry, problem)
    kernels, workspaces = decode_kernels(problem, geometry, params, device, asked_splits)
    plan = Plan(kernels, params, device)
    explain_choice(problem, plan.config, plan.launchers[0].grid)
    return plan, workspaces


def decode_kernels(
    problem: AttentionProblem,
    geometry: Geometry,
    params: np.ndarray[Any, Any],
    device: torch.device,
    asked_splits: int | None,
) -> tuple[list[tuple[KernelConfig, int]], dict[str, int]]:
    """The kernels of a plan, each with its number of thread blocks; fills the numbers of splits and blocks."""
    arch = device_arch(device)
    config = decode_config(problem, arch, packed_rows(geometry))
    splits = splits_of(config, geometry, multiprocessors(device), asked_splits)
    params["num_splits"], params["num_m_blocks"] = splits.num_splits, splits.row_blocks
    kernels = [(config, splits.thread_blocks)]
    if splits.num_splits > 1:
        rows = geometry.batch * geometry.num_heads * geometry.seqlen_q
        kernels.append((combine_config(problem, arch), rows))
    return kernels, workspace(problem, geometry, splits.num_splits)
