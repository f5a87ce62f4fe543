"""(arch, dtype, head_dim, head_dim_v, seqlen_q) → tile numbers. Every row says why it is that number.

A tile number never changes what is computed, only how fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .problem import AttentionProblem, DType, Tile

# Shared memory one thread block may use, bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMITS: dict[str, int] = {
    "75": 64 << 10,
    "80": 163 << 10,
    "86": 99 << 10,
    "87": 163 << 10,
    "88": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "90a": 227 << 10,
    "100": 227 << 10,
    "103": 227 << 10,
    "110": 227 << 10,
    "120": 99 << 10,
    "121": 99 << 10,
    "host": 1 << 30,
}
ARCHS = ("75", "80", "86", "89", "90", "100", "120")

# Head sizes a kernel is built for; any other is padded with zeros in shared memory up to the next. Products are 16
# deep, so 16 apart up to 128; above, 32 apart is never more than 25 % waste.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# Different sizes for q·k and v pair freely: 32 apart keeps the number of kernels down.
UNEQUAL_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)

SHORT_SEQLEN_Q = 64  # rows up to which a small row block wastes less than it loses

_HOST_GAP = 128  # kSharedGap of isa/host


def rounded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head sizes of the kernel that serves (head_dim, head_dim_v)."""
    allowed = HEAD_DIMS if head_dim == head_dim_v else UNEQUAL_HEAD_DIMS
    return _round(head_dim, allowed), _round(head_dim_v, allowed)


def _round(size: int, allowed: tuple[int, ...]) -> int:
    return next(value for value in allowed if value >= size)


def shared_bytes(tile: Tile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/forward.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    size = 4 if problem.dtype == "fp32" else 2
    gap = _HOST_GAP if arch == "host" else 0
    q_or_out = tile.block_m * max(d, dv) * size
    k, v = (tile.stages * tile.block_n * width * size for width in (d, dv))
    intervals = (tile.block_m + tile.num_warps) * 8 if problem.intervals else 0
    return q_or_out + gap + k + gap + v + gap + intervals


def candidates(problem: AttentionProblem, arch: str) -> Iterator[Tile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    widest = max(d, dv)
    if arch == "host":
        # Two warps of 32 rows: each fetched operand of a product serves two m-tiles.
        yield Tile(64, 64 if widest <= 128 else 32, 2, 1, 1)
        return
    if problem.dtype == "fp32":
        # 32-bit operands take twice the shared memory and registers: 16 rows a warp.
        yield Tile(64, 32, 4, 1, 2 if widest <= 64 else 1)
        yield Tile(32, 32, 2, 1, 1)
        yield Tile(32, 16, 2, 1, 1)
        yield Tile(16, 16, 1, 1, 1)
        return
    if widest <= (64 if arch == "75" else 128) and problem.seqlen_q > SHORT_SEQLEN_Q:
        # 32 rows a warp: every operand fetched from shared memory feeds two products. Two blocks an SM hide each
        # other's softmax behind their products; registers allow no third.
        if widest <= 64:
            # A second stage needs one barrier a step instead of two (measured: +8 %).
            yield Tile(128, 64, 4, 2, 2)
        elif widest == 128 and d == dv and _plain(problem) and SHARED_LIMITS[arch] >= 128 << 10:
            yield Tile(128, 64, 4, 1, 2)  # twice 64 KB
        elif problem.vector and not problem.mask:
            # The registers that the other features take on top of the output's are those of half the scores.
            yield Tile(128, 32, 4, 1, 2)
    # 16 rows a warp: the output alone takes 128 registers at head size 256.
    if widest <= 224 or not problem.mask:
        yield Tile(64, 64, 4, 1, 2 if widest > 64 else 3)
    if widest <= 192 or arch != "75":
        yield Tile(64, 32, 4, 1, 2)
    yield Tile(64, 16, 4, 1, 1)
    yield Tile(32, 16, 2, 1, 1)


def _plain(problem: AttentionProblem) -> bool:
    return problem.vector and problem.positive_scale and not (problem.mask or problem.softcap or problem.varlen)


def choose(problem: AttentionProblem, arch: str) -> Tile:
    """The preferred tile that fits ``arch``."""
    limit = SHARED_LIMITS[arch]
    return next(tile for tile in candidates(problem, arch) if shared_bytes(tile, problem, arch) <= limit)


_SCORES = ((False, True), (False, False), (True, True))  # softcap, positive_scale
_MASKS = (  # intervals, mask, varlen
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (False, False, True),
)
_PRODUCTS: tuple[tuple[DType, bool], ...] = (
    ("fp16", False),
    ("bf16", False),
    ("fp32", False),
    ("fp32", True),
)


def reachable_problems(arch: str) -> Iterator[AttentionProblem]:
    """One problem for every kernel that a call on ``arch`` can reach."""
    pairs = [(d, d) for d in HEAD_DIMS]
    pairs += [(d, dv) for d in UNEQUAL_HEAD_DIMS for dv in UNEQUAL_HEAD_DIMS if d != dv]
    for dtype, tf32 in _PRODUCTS:
        if ((dtype == "bf16" or tf32) and arch == "75") or (tf32 and arch == "host"):
            continue
        for d, dv in pairs:
            for vector, long, (softcap, positive_scale), (intervals, mask, varlen) in product(
                (False, True), (False, True), _SCORES, _MASKS
            ):
                if long and (dtype == "fp32" or max(d, dv) > 128 or arch == "host"):
                    continue  # the same kernel as for few rows
                yield AttentionProblem(
                    dtype=dtype,
                    head_dim=d,
                    head_dim_v=dv,
                    seqlen_q=SHORT_SEQLEN_Q + 1 if long else 1,
                    vector=vector,
                    intervals=intervals,
                    mask=mask,
                    softcap=softcap,
                    positive_scale=positive_scale,
                    varlen=varlen,
                    tf32=tf32,
                )
