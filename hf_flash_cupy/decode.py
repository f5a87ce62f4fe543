"""Few rows against many keys: tiles, splits, kernel configurations and plans of ``cuda_src/fa2/decode.cuh``.

Such a call only reads keys and values: its speed is the memory's bandwidth, reached where every multiprocessor always
has tens of kilobytes on their way. The result's bits depend on the tile and the number of splits, which by default
follow from the sizes, the batch's among them; with ``num_splits`` given they depend on the row's own entry only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import split_workspace
from .dispatch import check_supported, kernel_config, kernel_name
from .errors import UnsupportedProblem
from .launch import device_arch
from .params import ATTENTION_PARAMS, Run
from .plans import POINTER_WORDS, Content, Geometry, Plan, attention_params, explain_choice
from .problem import AttentionProblem, KernelConfig, Tile
from .tiles import HOST_GAP, SHARED_LIMITS, rounded_head_dims

MAX_ROWS = 64  # packed rows (query rows × heads of a group) up to which this beats the forward kernel on long caches
MIN_KEYS = 512  # below, one thread block of the forward kernel is done before a split and its combination are

MAX_SPLITS = 256
_STEP_BYTES = 32 << 10  # of keys and values that four warps read in one step
_WARP_KEYS = 64  # at most, of a step: bounds the registers of the scores
_HOST_MULTIPROCESSORS = 4  # so that a CPU splits keys as a GPU does
KERNEL = "fa2_decode"
_NUM_SPLITS = Run(ATTENTION_PARAMS, "num_splits")
_PARTS, _ARRIVALS = POINTER_WORDS["split_parts"], POINTER_WORDS["split_arrivals"]


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


def candidates(problem: AttentionProblem, arch: str, rows: int, rounds: bool = False) -> Iterator[Tile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken.

    ``rounds``: for more thread blocks than the GPU holds at once.
    """
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    chunks = -(-dv // 256)  # a warp's 16 rows of 256 columns of the output are 128 of a lane's registers
    size = 4 if problem.dtype == "fp32" else 2
    # The rows of a tile cost products only: a second m-tile spares reading the keys again, where registers allow.
    widest = 96 if arch == "75" and problem.bias != "none" else 128
    block_m = 32 if rows > 16 and max(d, dv) <= widest and size == 2 else 16
    if arch == "host":
        yield Tile(block_m, 64, 2, 2, 1, chunks)
        return
    per_key = (d + dv // chunks) * size
    keys = min(max(_STEP_BYTES // per_key // 64 * 16, 16), _WARP_KEYS)  # of one step of a warp
    # One thread block an SM with 64 KB steps (on an H200 1 to 5 % faster than two with 32 KB steps, which need twice
    # the splits), by eight warps: the last step and the combination are over sooner. In several rounds four warps with
    # twice the keys each are 1 to 2 % faster there. Where shared memory is small, fewer stages, smaller steps, fewer
    # warps.
    if block_m == 16:
        yield Tile(block_m, 4 * min(2 * keys, _WARP_KEYS), 4 if rounds else 8, 3, 1, chunks)
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


@lru_cache(maxsize=4096)
def choose(problem: AttentionProblem, arch: str, rows: int, rounds: bool = False) -> Tile | None:
    """The preferred tile for ``rows`` packed rows that fits ``arch``, if any does."""
    limit = SHARED_LIMITS[arch]
    for tile in candidates(problem, arch, rows, rounds):
        if shared_bytes(tile, problem, arch) <= limit:
            return tile
    return None


@lru_cache(maxsize=4096)
def decode_config(
    problem: AttentionProblem, arch: str, rows: int, rounds: bool = False, tile: Tile | None = None
) -> KernelConfig:
    """The kernel for ``rows`` packed rows of ``problem`` on ``arch``, with the preferred tile or the given one.

    Raises :class:`UnsupportedProblem` where no tile fits.
    """
    check_supported(problem, arch)
    tile = tile or choose(problem, arch, rows, rounds)
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
    name = kernel_name(KERNEL, problem, numbers + _paged_name(problem), arch)
    sizes = (d, dv // tile.v_chunks)
    shared = shared_bytes(tile, problem, arch)
    return kernel_config(KERNEL, name, "fa2/decode.cuh", problem, arch, tile, sizes, constants, shared)


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


@lru_cache(maxsize=4096)
def num_splits(tiles: int, slots: int, key_blocks: int) -> int:
    """Thread blocks that share the keys of a tile of rows.

    ``tiles``: thread blocks without splitting; ``slots``: thread blocks the GPU holds at once; ``key_blocks``: steps of
    a thread block over all keys. The slots work in rounds, and a thread block takes as long as its share of the steps
    and one more to start; splitting at all costs a combination, about one more.
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


def reachable_keys(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> int:
    """Keys that the rows of a call may see, as far as window and lengths tell."""
    left, right = window
    return seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + seqlen_q)


def splits_of(config: KernelConfig, geometry: Geometry, multiprocessors: int, asked: int | None) -> Splits:
    """The grid of a call; ``asked``: how many splits the user wants, None = as many as are fastest."""
    tile = config.tile
    assert tile is not None
    row_blocks = -(-packed_rows(geometry) // tile.block_m)
    tiles = row_blocks * geometry.num_heads_k * geometry.batch * tile.v_chunks
    key_blocks = -(-reachable_keys(geometry.seqlen_q, geometry.seqlen_k, geometry.window) // tile.block_n)
    chosen = num_splits(tiles, multiprocessors * tile.min_blocks, key_blocks) if asked is None else asked
    chosen = max(min(chosen, MAX_SPLITS), 1)
    return Splits(chosen, row_blocks, tiles * chosen)


def chosen(
    problem: AttentionProblem, geometry: Geometry, arch: str, multiprocessors: int, asked: int | None
) -> tuple[KernelConfig, Splits]:
    """The kernel of a call and its grid; ``asked`` as for :func:`splits_of`: then the batch has no say in either."""
    rows = packed_rows(geometry)
    config = decode_config(problem, arch, rows)
    splits = splits_of(config, geometry, multiprocessors, asked)
    if asked is None and splits.num_splits == 1 and splits.thread_blocks > multiprocessors:
        config = decode_config(problem, arch, rows, rounds=True)
        splits = splits_of(config, geometry, multiprocessors, asked)
    return config, splits


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def part_floats(config: KernelConfig, geometry: Geometry) -> int:
    """fp32 elements that a thread block of a split call leaves to be combined, see SplitParts of combine.cuh."""
    tile, dv = config.tile, int(dict(config.constants)["int kHeadDimV"])
    assert tile is not None
    return min(tile.block_m, packed_rows(geometry)) * (dv + 2)


class DecodePlan(Plan):
    """Appending, if there is anything to append, and attention, if there is anything to attend to."""

    def __init__(
        self,
        kernels: list[tuple[KernelConfig, int]],
        params: np.ndarray[Any, Any],
        device: torch.device,
        memory: tuple[int, int],
    ) -> None:
        """``memory``: as in :class:`Content`."""
        super().__init__(kernels, params, device)
        self._device = device
        self._part, self._tiles = memory
        split_workspace.prepare(device)

    def __call__(self, **tensors: Tensor | None) -> None:
        blocks = self.launchers[-1].num_tiles
        if blocks > self._tiles > 0:
            words, floats = self._words, blocks * self._part
            _alive, words[_PARTS], words[_ARRIVALS] = split_workspace.lend(self._device, floats, self._tiles)
        super().__call__(**tensors)


def decode_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> DecodePlan:
    """The plan that reads q, k, v and what the problem names and writes out and lse."""
    params = attention_params(geometry, problem)
    (config, blocks), memory = decode_kernel(problem, geometry, params, device, None)
    plan = DecodePlan([(config, blocks)], params, device, memory)
    plan.content = Content(params.tobytes(), (blocks,), memory)
    explain_choice(problem, config, plan.launchers[0].grid)
    return plan


def regrown(config: KernelConfig, content: Content, raw: bytearray, keys: int, device: torch.device) -> Content | None:
    """A plan's content with the grid for so many reachable ``keys``; None where another tile may serve them."""
    tile = config.tile
    assert tile is not None
    (blocks,), (_, tiles) = content.blocks, content.memory
    slots = multiprocessors(device)
    splits = num_splits(tiles, slots * tile.min_blocks, -(-keys // tile.block_n))
    if tiles > slots and (splits == 1) != (blocks == tiles):
        return None
    _NUM_SPLITS.write(raw, splits)
    return Content(raw, (tiles * splits,), content.memory)


def decode_kernel(
    problem: AttentionProblem,
    geometry: Geometry,
    params: np.ndarray[Any, Any],
    device: torch.device,
    asked_splits: int | None,
) -> tuple[tuple[KernelConfig, int], tuple[int, int]]:
    """The kernel with its number of thread blocks, and its memory; fills the numbers of splits and blocks."""
    config, splits = chosen(problem, geometry, device_arch(device), multiprocessors(device), asked_splits)
    params["num_splits"], params["num_m_blocks"] = splits.num_splits, splits.row_blocks
    tiles = splits.thread_blocks // splits.num_splits
    return (config, splits.thread_blocks), (part_floats(config, geometry), tiles)
