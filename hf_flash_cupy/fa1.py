"""FlashAttention-1 (Dao et al. 2022, Algorithms 1 and 4): tiles, kernel configurations and plans of ``cuda_src/fa1``.

The algorithm's cost is its memory traffic: O, l and m (backward: dQ) are read and written once for each block of keys,
so B_c, the keys of a block, is as large as shared memory allows. One thread block walks a whole head, so few heads
leave multiprocessors idle, whatever the numbers here say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from .dispatch import check_supported, kernel_config, kernel_name
from .errors import UnsupportedProblem
from .launch import device_arch
from .plans import Geometry, Plan, attention_params
from .problem import AttentionProblem, KernelConfig, Tile
from .tiles import HOST_GAP, SHARED_LIMITS

# Head sizes a kernel is built for; any other is padded with zeros up to the next.
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """B_r and B_c, the warps that split rows and keys, and the columns of V whose products they add up at once."""

    block_m: int  # B_r
    block_n: int  # B_c; a warp has block_n * groups / num_warps keys, a multiple of 16
    num_warps: int
    slab: int  # divides head_dim_v
    groups: int  # of num_warps / groups warps that split the keys, each group with a row block of its own


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """B_r and B_c, and how the warps divide the keys. A tile number never changes what is computed, only how fast."""

    block_m: int  # B_r
    block_n: int  # B_c
    num_warps: int
    warp_keys: int  # keys of a group of num_warps * warp_keys / block_n warps, which divide the columns of dk and dv
    stages: int  # row blocks of q and dout in shared memory


def rounded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head sizes of the kernel that serves (head_dim, head_dim_v)."""
    return tuple(next(value for value in HEAD_DIMS if value >= size) for size in (head_dim, head_dim_v))  # type: ignore[return-value]


def forward_tiles(problem: AttentionProblem, arch: str) -> Iterator[ForwardTile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken.

    Of a step of B_r rows and B_c keys: 4 · B_r · B_c · D operations; 8 · B_r · D bytes a warp through shared memory
    (partial products, written and read), which more keys a warp make up for; 8 · B_r · D bytes of O from and to device
    memory, which more keys a block make up for. Every group reads K and V for itself, which more rows a group make up
    for. The warps of one group wait for each other at every exchange, so that its steps are a chain of latencies;
    several groups fill each other's gaps, best with a warp of each on every one of a multiprocessor's four schedulers.

    Predicted for an H200, head size 64, 16384 rows and keys, 128 heads (one a multiprocessor), of 64 rows and 512 keys,
    8.4 MFLOP, in clocks: tensor cores 3,200, exponentials 2,000, issue of all instructions 3,500; shared memory 5,300
    with four groups of 16 rows (512 KB of K and V, 128 KB of products, 32 KB of Q), 3,300 with two of 32 rows. One
    group takes 14,000 (measured): hardly anything overlaps. Four groups take 6,500 to 8,500, two 7,000 to 10,000, or
    240 to 310 and 200 to 290 TFLOP/s on 128 multiprocessors. O crosses HBM 32 times, 34 GB, 1 of 4.8 TB/s.
    At head size 128 products weigh twice: shared memory takes 6,500 clocks with four groups, 4,500 with two.
    """
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    slab = dv if dv <= 96 else 64  # the products of 32 rows and 64 columns take 64 registers
    if arch == "host":
        yield ForwardTile(16, 64, 4, slab, 2)  # two groups of two warps, for what they exchange to be exercised
        return
    narrow = problem.dtype != "fp32"  # sums of plain products have a register for every summand
    # Positions, random bits, and what a cap is computed with beside a mask, take the registers of a second group.
    heavy = problem.bias != "none" or problem.alibi or problem.dropout or (problem.softcap and problem.has_holes)
    plain = problem.vector and not (heavy or problem.has_holes or problem.varlen or problem.softcap)
    for keys in (512, 256, 128):
        if keys * max(d, dv) > 512 * 64:
            continue  # K and V fill 128 KB at most: the products of all groups need 64
        if narrow and plain and d == dv <= 96:
            yield ForwardTile(16, keys, 16, slab, 4)  # sixteen warps have 128 registers a thread
        if narrow and not heavy and slab == 64 <= d:
            yield ForwardTile(32, keys, 8, slab, 2)
        yield ForwardTile(32, keys, 8, slab, 1)
    # 99 KB (sm_86, sm_89, sm_120), 64 KB (sm_75), and wide heads: two warps a group have half of the products.
    for keys in (128, 64):
        if narrow:
            yield ForwardTile(16, keys, 8, slab, 4)
        yield ForwardTile(32, keys, 4, slab, 1)
    if narrow:
        yield ForwardTile(16, 64, 4, slab, 2)
    yield ForwardTile(16, 64, 4, slab, 1)  # head size 512 in 163 KB
    yield ForwardTile(16, 32, 2, slab, 1)
    yield ForwardTile(16, 16, 1, slab, 1)
    yield ForwardTile(16, 16, 1, 32, 1)  # the least there is: 512 in fp32 fits 99 KB


def _forward_tile(problem: AttentionProblem, arch: str) -> ForwardTile:
    """The preferred tile that fits the shared memory of ``arch``."""
    for tile in forward_tiles(problem, arch):
        if forward_shared_bytes(tile, problem, arch) <= SHARED_LIMITS[arch]:
            return tile
    raise _too_wide(problem, arch)


def forward_shared_bytes(tile: ForwardTile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa1/forward.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    size = 4 if problem.dtype == "fp32" else 2
    gap = HOST_GAP if arch == "host" else 0
    q, k, v = tile.groups * tile.block_m * d * size, tile.block_n * d * size, tile.block_n * dv * size
    partials = tile.num_warps * tile.block_m * tile.slab * 4
    row_table = tile.num_warps * tile.block_m * 4
    return q + k + v + partials + 2 * row_table + 5 * gap


@lru_cache(maxsize=4096)
def forward_config(problem: AttentionProblem, arch: str, tile: ForwardTile | None = None) -> KernelConfig:
    """The forward kernel for ``problem`` on ``arch`` ("75" … "120", "host"), with the preferred tile or the given one.

    Raises :class:`UnsupportedProblem` where no tile fits.
    """
    check_supported(problem, arch)
    tile = tile or _forward_tile(problem, arch)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_s{tile.slab}_g{tile.groups}"
    constants = (("int kSlab", str(tile.slab)), ("int kGroups", str(tile.groups)))
    shared = forward_shared_bytes(tile, problem, arch)
    return _config(
        "forward", problem, arch, Tile(tile.block_m, tile.block_n, tile.num_warps, 1, 1), numbers, constants, shared
    )


def _config(
    direction: str,
    problem: AttentionProblem,
    arch: str,
    tile: Tile,
    numbers: str,
    constants: tuple[tuple[str, str], ...],
    shared: int,
) -> KernelConfig:
    sizes = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    kernel = f"fa1_{direction}"
    name = kernel_name(kernel, problem, numbers, arch, sizes)
    constants = (("int kNumWarps", str(tile.num_warps)), *constants)
    return kernel_config(kernel, name, f"fa1/{direction}.cuh", problem, arch, tile, sizes, constants, shared)


def _too_wide(problem: AttentionProblem, arch: str) -> UnsupportedProblem:
    return UnsupportedProblem(
        f'algorithm="fa1" keeps blocks of q, k and v in shared memory: head_dim {problem.head_dim} and head_dim_v '
        f"{problem.head_dim_v} in {problem.dtype} do not fit the {SHARED_LIMITS[arch] >> 10} KB of a GPU of compute "
        f"capability {int(arch) / 10}. Use 16-bit tensors."
    )


def forward_workspace(problem: AttentionProblem, geometry: Geometry) -> dict[str, int]:
    """Elements of the fp32 tensors that :func:`fa1_forward_plan` needs, by their names in the call; uninitialised."""
    return {"out_accum": _rows(problem, geometry) * rounded_head_dims(problem.head_dim, problem.head_dim_v)[1]}


def _rows(problem: AttentionProblem, geometry: Geometry) -> int:
    return prod((1 if problem.varlen else geometry.batch, geometry.num_heads, geometry.seqlen_q))


def fa1_forward_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Plan:
    """Reads q, k, v and what the problem names; writes out, lse, row_max and row_sum, by way of the workspaces."""
    config = forward_config(problem, device_arch(device))
    entries = geometry.batch + 1 if problem.varlen else geometry.batch  # one more: the rows beyond the last offset
    return Plan([(config, entries * geometry.num_heads)], attention_params(geometry, problem), device)


def backward_tiles(problem: AttentionProblem, arch: str) -> Iterator[BackwardTile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken.

    dK and dV stay in registers, B_c · (D + D_v) numbers of the block: 128 a thread at eight warps, which bounds B_c. dQ
    is read and written once for each block of keys, 8 · B_r · D bytes for 10 · B_r · B_c · D operations.
    """
    widest = max(rounded_head_dims(problem.head_dim, problem.head_dim_v))
    if arch == "host":
        yield BackwardTile(32, 64, 4, 32 if widest <= 128 else 16, 1)
        return
    # Few registers are left beside dk, dv, scores and dp where a warp has 32 keys, at head size 128 64 rows, at 512 32:
    # what features keep, or the sums of plain fp32 products, need them.
    narrow = problem.dtype != "fp32"
    plain = narrow and not (problem.has_holes or problem.varlen or problem.softcap or problem.dropout)
    if widest <= 32:
        yield BackwardTile(64, 256 if plain else 128, 8, 32 if plain else 16, 2)
    if widest <= 64 and plain:
        yield BackwardTile(32, 256, 8, 32, 2)
    roomy = plain and SHARED_LIMITS[arch] > 163 << 10  # sm_80 is one register short of it at head size 128
    if widest <= (128 if roomy else 64) and narrow:
        yield BackwardTile(64, 128, 8, 16, 2)
    if widest <= 128:
        yield BackwardTile(32, 128, 8, 16, 2)
        yield BackwardTile(32, 128, 8, 16, 1)
    if widest <= 192:
        yield BackwardTile(64, 64, 8, 16, 2)  # two warps a key group, each with half of the columns
    yield BackwardTile(32, 64, 8, 16, 2)
    yield BackwardTile(32, 64, 8, 16, 1)
    if widest <= 256 or plain:
        yield BackwardTile(32, 32, 8, 16, 1)  # four warps a key group: head size 512
    yield BackwardTile(16, 32, 8, 16, 1)
    yield BackwardTile(16, 16, 4, 16, 1)
    yield BackwardTile(16, 16, 2, 16, 1)


def _backward_tile(problem: AttentionProblem, arch: str) -> BackwardTile:
    """The preferred tile that fits the shared memory and registers of ``arch``."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    for tile in backward_tiles(problem, arch):
        columns = 16 * tile.num_warps * tile.warp_keys // tile.block_n  # that the warps of a key group divide
        registers = tile.block_n * (d + dv) // (32 * tile.num_warps)  # of dK and dV
        fits = backward_shared_bytes(tile, problem, arch) <= SHARED_LIMITS[arch]
        if fits and (registers <= 160 or arch == "host") and d % columns == dv % columns == 0:
            return tile
    raise _too_wide(problem, arch)


def backward_shared_bytes(tile: BackwardTile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa1/backward_traits.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    size = 4 if problem.dtype == "fp32" else 2
    gap = HOST_GAP if arch == "host" else 0
    k_and_v = tile.block_n * (d + dv) * size
    q_and_dout = tile.stages * tile.block_m * (d + dv) * size
    p_and_ds = 2 * tile.block_m * tile.block_n * size
    statistics = tile.stages * 2 * tile.block_m * 4
    seen = tile.num_warps * 16 if problem.has_holes else 0
    return k_and_v + q_and_dout + p_and_ds + statistics + seen + 7 * gap


@lru_cache(maxsize=4096)
def backward_config(problem: AttentionProblem, arch: str, tile: BackwardTile | None = None) -> KernelConfig:
    """The backward kernel for ``problem`` on ``arch``, with the preferred tile or the given one.

    Raises :class:`UnsupportedProblem` where no tile fits.
    """
    check_supported(problem, arch)
    tile = tile or _backward_tile(problem, arch)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_k{tile.warp_keys}_s{tile.stages}"
    constants = (("int kWarpKeys", str(tile.warp_keys)), ("int kStages", str(tile.stages)))
    shared = backward_shared_bytes(tile, problem, arch)
    whole = Tile(tile.block_m, tile.block_n, tile.num_warps, tile.stages, 1)
    return _config("backward", problem, arch, whole, numbers, constants, shared)


def backward_workspace(problem: AttentionProblem, geometry: Geometry) -> dict[str, int]:
    """Elements of the fp32 tensors that :func:`fa1_backward_plan` needs, by their names in the call; uninitialised."""
    rows = _rows(problem, geometry)
    return {"dq_accum": rows * rounded_head_dims(problem.head_dim, problem.head_dim_v)[0], "delta": rows}


def fa1_backward_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Plan:
    """Reads q, k, v, out, dout, lse, dlse and what the problem names; writes delta, dq, dk, dv, by way of dq_accum."""
    config = backward_config(problem, device_arch(device))
    entries = geometry.batch + 1 if problem.varlen else geometry.batch
    return Plan([(config, entries * geometry.num_heads_k)], attention_params(geometry, problem), device)
