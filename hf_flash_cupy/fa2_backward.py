"""FlashAttention-2's backward pass (Dao 2023, Algorithm 2): tiles, kernel configurations, plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from . import tiles
from .dispatch import kernel_config, kernel_name
from .errors import UnsupportedProblem
from .launch import device_arch
from .plans import Geometry, Plan, attention_params, row_blocks
from .problem import AttentionProblem, KernelConfig, Tile

# Two warps share the columns of dk and dv by pairs of 8; above 128 four do, above 256 in several chunks.
_HEAD_DIM_STEP = 32


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """The numbers of one backward kernel shape. A tile number never changes what is computed, only how fast."""

    block_m: int  # rows of one step
    block_n: int  # keys of a thread block
    num_warps: int
    score_warps: int  # warps that divide the rows of the scores; the others of a row divide the keys
    key_warps: int  # warps that divide the keys of dk and dv; the others divide the columns
    row_warps: int  # warps that divide the rows of dq; the others divide the columns
    stages: int  # row blocks of q and dout in shared memory
    min_blocks: int  # thread blocks that must fit an SM
    chunks: int = 1  # thread blocks that divide the columns of dq, dk and dv

    def __str__(self) -> str:
        warps = f"w{self.num_warps}_{self.score_warps}{self.key_warps}{self.row_warps}"
        return f"m{self.block_m}_n{self.block_n}_{warps}_s{self.stages}_c{self.chunks}"


def rounded_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """The head sizes of the kernel that serves the problem: padded with zeros in shared memory."""
    sizes = problem.head_dim, problem.head_dim_v
    step = _HEAD_DIM_STEP if max(sizes) <= 128 else 2 * _HEAD_DIM_STEP if max(sizes) <= 256 else 4 * _HEAD_DIM_STEP
    return -(-sizes[0] // step) * step, -(-sizes[1] // step) * step


def shared_bytes(tile: BackwardTile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/backward.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem)
    size = 4 if problem.dtype == "fp32" else 2
    gap = tiles.HOST_GAP if arch == "host" else 0
    k_and_v = tile.block_n * (d + dv) * size + 2 * gap
    q_and_dout = tile.stages * tile.block_m * (d + dv) * size + 2 * gap
    p_and_ds = 2 * (tile.block_m * tile.block_n * size + gap)
    statistics = tile.stages * 2 * tile.block_m * 4 + gap
    seen = tile.num_warps * 16 if problem.has_holes else 0
    return k_and_v + q_and_dout + p_and_ds + statistics + seen


def candidates(problem: AttentionProblem, arch: str) -> Iterator[BackwardTile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken."""
    widest = max(rounded_head_dims(problem))
    if arch == "host":
        yield BackwardTile(64, 64, 4, 2, 2, 2, 1, 1, 1 if widest <= 256 else 2)
        return
    if problem.dtype != "fp32" and widest <= 128:
        featured = problem.softcap or problem.dropout or problem.varlen or problem.alibi or problem.has_holes
        plain = problem.vector and not featured
        if widest <= 64 and plain and problem.seqlen_q > 1024:
            # The largest tile fetches the fewest operands a product, at the price of every register; with few rows its
            # blocks are too few and too long.
            yield BackwardTile(128, 128, 8, 4, 4, 4, 2, 1)
        # Thread blocks that do not wait for each other hide one's exponentials behind the other's products: at head
        # size 128 two of 64 keys are 2 % (long) to 7 % (short) faster than one of 128 keys.
        yield BackwardTile(64, 64, 4, 2, 2, 2, 2, 3 if widest <= 64 and plain else 2)
        yield BackwardTile(64, 64, 4, 2, 2, 2, 1, 3 if widest <= 64 and plain else 2)
        yield BackwardTile(32, 64, 4, 2, 2, 2, 1, 1)
    elif problem.dtype != "fp32":
        # dk and dv alone take 128 registers of eight warps at head size 256.
        chunks = 1 if widest <= 256 else 2
        if not (problem.softcap or problem.varlen or problem.has_holes):  # which take the registers
            # Shared memory bounds the speed: warps of 32 x 32 scores fetch two thirds of what those of 16 x 32 do. That
            # leaves one place for q and dout, whose next rows come while products that no longer need it run.
            yield BackwardTile(128, 64, 8, 4, 2, 2, 1, 1, chunks)
        yield BackwardTile(64, 64, 8, 4, 2, 2, 2, 1, chunks)
        yield BackwardTile(64, 64, 8, 4, 2, 2, 1, 1, chunks)
    yield BackwardTile(32, 32, 4, 2, 2, 2, 1, 1, 1 if widest <= 256 else 2)
    yield BackwardTile(16, 16, 1, 1, 1, 1, 1, 1, 1 if widest <= 128 else 2 if widest <= 256 else 4)


def choose(problem: AttentionProblem, arch: str) -> BackwardTile:
    """The preferred tile that fits ``arch``."""
    limit = tiles.SHARED_LIMITS[arch]
    for tile in candidates(problem, arch):
        if shared_bytes(tile, problem, arch) <= limit:
            return tile
    raise _too_large(problem, arch)


def _too_large(problem: AttentionProblem, arch: str) -> UnsupportedProblem:
    return UnsupportedProblem(
        f"The gradient of head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in {problem.dtype} needs "
        f"more shared memory than sm_{arch} has. Use float16 or bfloat16, or a smaller head size."
    )


def dq_shared_bytes(tile: Tile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/backward_dq.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem)
    size = 4 if problem.dtype == "fp32" else 2
    gaps = 4 * (tiles.HOST_GAP if arch == "host" else 0)
    intervals = (tile.block_m + tile.num_warps) * 8 if problem.intervals else 0
    return (tile.block_m + tile.stages * tile.block_n) * (d + dv) * size + gaps + intervals


def dq_candidates(problem: AttentionProblem, arch: str) -> Iterator[Tile]:
    """Tiles of the kernel that computes dq alone, which owns rows as the forward pass does."""
    widest = max(rounded_head_dims(problem))
    if arch == "host":
        yield Tile(64, 64 if widest <= 128 else 32, 2, 1, 1)
        return
    if problem.dtype != "fp32":
        if widest <= 128 and not problem.has_holes:
            # 32 rows a warp: every operand fetched from shared memory feeds two products.
            yield Tile(128, 64 if widest <= 64 else 32, 4, 2, 2)
        if widest <= 128:
            yield Tile(64, 64, 4, 1, 2)
        if tiles.SHARED_LIMITS[arch] >= 192 << 10:
            yield Tile(64, 32, 4, 1, 2)  # twice 96 KB at head size 256
        yield Tile(64, 32, 4, 2, 1)
        yield Tile(64, 32, 4, 1, 1)
    yield Tile(32, 32, 2, 1, 1)
    yield Tile(16, 16, 1, 1, 1)


def dq_chunks(problem: AttentionProblem) -> int:
    """Thread blocks that divide the columns of dq: 16 rows of 256 columns take half the registers of a warp."""
    return 1 if max(rounded_head_dims(problem)) <= 256 else 2


def dq_choose(problem: AttentionProblem, arch: str) -> Tile:
    """The preferred tile of the kernel for dq alone that fits ``arch``."""
    limit = tiles.SHARED_LIMITS[arch]
    for tile in dq_candidates(problem, arch):
        if dq_shared_bytes(tile, problem, arch) <= limit:
            return tile
    raise _too_large(problem, arch)


def configs(problem: AttentionProblem, arch: str) -> dict[str, KernelConfig]:
    """The kernels of one backward pass in the order they run, by name."""
    tile = choose(problem, arch)
    kernels = ["prepare", "main", "dq" if problem.deterministic else "finish"]
    made = {kernel: _config(kernel, problem, arch, tile) for kernel in kernels if kernel != "dq"}
    if problem.deterministic:
        made["dq"] = _dq_config(problem, arch, dq_choose(problem, arch))
    return made


_KERNELS = {
    "prepare": ("fa2_backward_prepare", "fa2/backward_rows.cuh"),
    "main": ("fa2_backward", "fa2/backward.cuh"),
    "finish": ("fa2_backward_finish", "fa2/backward_rows.cuh"),
}


def _config(part: str, problem: AttentionProblem, arch: str, tile: BackwardTile) -> KernelConfig:
    kernel, include = _KERNELS[part]
    size = 4 if problem.dtype == "fp32" else 2
    shared = {
        "prepare": 0,
        "main": shared_bytes(tile, problem, arch),
        "finish": tile.block_m * rounded_head_dims(problem)[0] * size,
    }[part]
    if part != "main":
        problem = replace(
            AttentionProblem(problem.dtype, problem.head_dim, problem.head_dim_v, 1, problem.vector),
            varlen=problem.varlen,
            deterministic=problem.deterministic,
            intervals=problem.intervals and part == "prepare",
        )
    constants = (
        ("int kScoreWarps", str(tile.score_warps)),
        ("int kKeyWarps", str(tile.key_warps)),
        ("int kRowWarps", str(tile.row_warps)),
        ("int kChunks", str(tile.chunks)),
        ("int kRowChunks", "1"),
        ("bool kAccumulateDq", "false" if problem.deterministic else "true"),
    )
    numbers = f"{tile}_deterministic" if problem.deterministic else str(tile)
    return _kernel_config(kernel, include, problem, arch, tile, numbers, constants, shared)


def _dq_config(problem: AttentionProblem, arch: str, tile: Tile) -> KernelConfig:
    chunks = dq_chunks(problem)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_s{tile.stages}_c{chunks}"
    shared = dq_shared_bytes(tile, problem, arch)
    constants = (("int kChunks", str(chunks)), ("int kRowChunks", str(chunks)))
    return _kernel_config("fa2_backward_dq", "fa2/backward_dq.cuh", problem, arch, tile, numbers, constants, shared)


def _kernel_config(
    kernel: str,
    include: str,
    problem: AttentionProblem,
    arch: str,
    tile: BackwardTile | Tile,
    numbers: str,
    constants: tuple[tuple[str, str], ...],
    shared: int,
) -> KernelConfig:
    sizes = rounded_head_dims(problem)
    name = kernel_name(kernel, problem, numbers, arch, sizes)
    constants = (("int kNumWarps", str(tile.num_warps)), ("int kStages", str(tile.stages)), *constants)
    whole = Tile(tile.block_m, tile.block_n, tile.num_warps, tile.stages, tile.min_blocks)
    return kernel_config(kernel, name, include, problem, arch, whole, sizes, constants, shared)


def workspaces(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> dict[str, int]:
    """Elements of 4 bytes of each, by their names in the struct."""
    tile = choose(problem, device_arch(device))
    blocks, all_blocks = row_blocks(geometry, problem, tile.block_m)
    dq_accum = 0 if problem.deterministic else all_blocks * tile.block_m * rounded_head_dims(problem)[0]
    sizes = {"dq_accum": dq_accum}
    if problem.intervals:
        heads = geometry.num_heads if geometry.interval_strides[1] else 1
        sizes["row_block_keys"] = geometry.batch * heads * blocks * 4
    return sizes


def backward_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Plan:
    """Reads q, k, v, out, dout, lse, dlse and what the problem names; writes delta, :func:`workspaces`, dq, dk, dv."""
    arch = device_arch(device)
    tile = choose(problem, arch)
    num_row_blocks = row_blocks(geometry, problem, tile.block_m)[1]
    num_n_blocks, num_key_blocks = key_blocks(geometry, problem, tile.block_n)
    kernels = configs(problem, arch)
    steps = [(kernels["prepare"], num_row_blocks), (kernels["main"], num_key_blocks * tile.chunks)]
    if problem.deterministic:
        num_dq_blocks = row_blocks(geometry, problem, dq_choose(problem, arch).block_m)[1]
        steps.append((kernels["dq"], num_dq_blocks * dq_chunks(problem)))
    else:
        steps.append((kernels["finish"], num_row_blocks))
    params = attention_params(geometry, problem)
    params["num_n_blocks"] = num_n_blocks
    return Plan(steps, params, device)


def bias_shared_bytes(tile: Tile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/backward_bias.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem)
    size = 4 if problem.dtype == "fp32" else 2
    gaps = 4 * (tiles.HOST_GAP if arch == "host" else 0)
    return (tile.block_m + tile.block_n) * (d + dv) * size + gaps + tile.block_m * tile.block_n * 4


def bias_choose(problem: AttentionProblem, arch: str) -> Tile:
    """The largest tile of the bias gradient's kernel that fits ``arch``."""
    limit = tiles.SHARED_LIMITS[arch]
    for tile in (Tile(64, 64, 4, 1, 1), Tile(32, 32, 2, 1, 1), Tile(16, 16, 1, 1, 1)):
        if bias_shared_bytes(tile, problem, arch) <= limit:
            return tile
    raise _too_large(problem, arch)


def bias_config(problem: AttentionProblem, arch: str) -> KernelConfig:
    """The kernel of the bias gradient."""
    tile = bias_choose(problem, arch)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}"
    shared = bias_shared_bytes(tile, problem, arch)
    return _kernel_config("fa2_backward_bias", "fa2/backward_bias.cuh", problem, arch, tile, numbers, (), shared)


def bias_backward_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Plan:
    """After :func:`backward_plan`, whose delta it reads: writes dbias, float32, summed where the bias broadcasts."""
    arch = device_arch(device)
    tile, config = bias_choose(problem, arch), bias_config(problem, arch)
    batch, heads, rows, cols = geometry.bias_shape
    m_blocks = 1 if rows == 1 else -(-geometry.seqlen_q // tile.block_m)
    n_blocks = 1 if cols == 1 else -(-geometry.seqlen_k // tile.block_n)
    return Plan([(config, batch * heads * m_blocks * n_blocks)], attention_params(geometry, problem), device)


def key_blocks(geometry: Geometry, problem: AttentionProblem, block_n: int) -> tuple[int, int]:
    """Key blocks of a head (packed: of a head over all entries) and of all heads and batch entries together."""
    blocks = -(-geometry.seqlen_k // block_n)
    if problem.varlen:
        blocks += geometry.batch + 1
        return blocks, blocks * geometry.num_heads_k
    return blocks, blocks * geometry.num_heads_k * geometry.batch
