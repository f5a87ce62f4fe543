"""(arch, dtype, head_dim, head_dim_v, seqlen_q) → tile numbers. Every row says why it is that number.

A tile number never changes what is computed, only how fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product

from .problem import AttentionProblem, Bias, DType, Tile

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
# deep, so 16 apart up to 128; above, 32 and then 64 apart is never more than 25 % waste.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Different sizes for q·k and v pair freely: fewer sizes keep the number of kernels down.
UNEQUAL_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)

SHORT_SEQLEN_Q = 64  # rows up to which a small row block wastes less than it loses

HOST_GAP = 128  # kSharedGap of isa/host


@cache
def rounded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head sizes of the kernel that serves (head_dim, head_dim_v)."""
    allowed = HEAD_DIMS if head_dim == head_dim_v else UNEQUAL_HEAD_DIMS
    return _round(head_dim, allowed), _round(head_dim_v, allowed)


def _round(size: int, allowed: tuple[int, ...]) -> int:
    return next(value for value in allowed if value >= size)


def shared_bytes(tile: Tile, problem: AttentionProblem, arch: str) -> int:
    """Shared memory of the plan in cuda_src/fa2/forward.cuh, which asserts this number."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    dv //= tile.v_chunks
    size = 4 if problem.dtype == "fp32" else 2
    gap = HOST_GAP if arch == "host" else 0
    q_or_out = tile.block_m * max(d, dv) * size
    k, v = (tile.stages * tile.block_n * width * size for width in (d, dv))
    intervals = (tile.block_m + tile.num_warps) * 8 if problem.intervals else 0
    return q_or_out + gap + k + gap + v + gap + intervals


def candidates(problem: AttentionProblem, arch: str) -> Iterator[Tile]:
    """Tiles in order of preference; the first that fits the arch's shared memory is taken."""
    d, dv = rounded_head_dims(problem.head_dim, problem.head_dim_v)
    # A warp's 16 rows of 256 columns of the output are 128 of a lane's 255 registers. Wider outputs are shared among
    # thread blocks, each of which computes the scores again: 512 columns cost 1.5 times the products.
    chunks = -(-dv // 256)
    heavy = problem.dropout or problem.bias != "none"  # random bits, or where a bias lies, take 30 to 60 registers
    if arch == "75" and problem.dtype != "fp32" and dv // chunks > 224 and (heavy or problem.alibi or d != dv):
        chunks *= 2  # sm_75 copies through registers
    widest = max(d, dv // chunks)
    if arch == "host":
        # Two warps of 32 rows: each fetched operand of a product serves two m-tiles.
        yield Tile(64, 64 if widest <= 128 else 32, 2, 1, 1, chunks)
        return
    if problem.dtype == "fp32":
        yield from _fp32_candidates(widest, dv, chunks)
        return
    if widest <= (64 if arch == "75" else 128) and problem.seqlen_q > SHORT_SEQLEN_Q and not heavy:
        # 32 rows a warp: every operand fetched from shared memory feeds two products. Two blocks an SM hide each
        # other's softmax behind their products; registers allow no third.
        if widest <= 64:
            # A second stage needs one barrier a step instead of two (measured: +8 %).
            yield Tile(128, 64, 4, 2, 2)
        elif widest == 128 and d == dv and _plain(problem) and SHARED_LIMITS[arch] >= 128 << 10:
            yield Tile(128, 64, 4, 1, 2)  # twice 64 KB
        elif problem.vector and not _crowds_128(problem, widest):
            # The registers that the other features take on top of the output's are those of half the scores.
            yield Tile(128, 32, 4, 1, 2)
    # 16 rows a warp: the output alone takes 128 registers at head size 256.
    if d <= 256 and chunks == 1 and (widest <= 224 or not (problem.mask or problem.dropout)):
        yield Tile(64, 64, 4, 1, 2 if widest > 64 or heavy else 3)
    # Beside 256 columns: random bits, or the numbers of a chunk, leave registers for the scores of 16 keys.
    crowded = dv // chunks > 224 and (problem.dropout or (chunks > 1 and d < 192))
    if not crowded and (widest <= 192 or arch != "75"):
        yield Tile(64, 32, 4, 1, 2, chunks)  # at head size 512 112 KB: two blocks on an SM with 227
    yield Tile(64, 16, 4, 1, 1, chunks)  # at head size 512 88 KB of the 99 that sm_86, sm_89 and sm_120 have
    yield Tile(32, 16, 2, 1, 1, chunks)  # and 56 of sm_75's 64


def _fp32_candidates(widest: int, dv: int, chunks: int) -> Iterator[Tile]:
    """32-bit operands take twice the shared memory and registers: 16 rows a warp."""
    yield Tile(64, 32, 4, 1, 2 if widest <= 64 else 1, chunks)
    yield Tile(32, 32, 2, 1, 1, chunks)
    yield Tile(32, 16, 2, 1, 1, chunks)
    yield Tile(16, 16, 1, 1, 1, chunks)  # at head size 512 80 KB
    if dv % (32 * chunks) == 0:
        yield Tile(16, 16, 1, 1, 1, 2 * chunks)  # sm_75 up to head size 448


def _plain(problem: AttentionProblem) -> bool:
    features = problem.mask or problem.softcap or problem.varlen or problem.alibi
    return problem.vector and problem.positive_scale and not features


def _crowds_128(problem: AttentionProblem, widest: int) -> bool:
    """Whether 32 rows a warp and these features need more registers than there are."""
    ranges = problem.intervals or problem.varlen
    wide = widest > 112 and (problem.softcap or (problem.intervals and not problem.positive_scale))
    return problem.mask or (problem.alibi and ranges) or wide


def choose(problem: AttentionProblem, arch: str) -> Tile | None:
    """The preferred tile that fits ``arch``, if any does."""
    limit = SHARED_LIMITS[arch]
    return next((tile for tile in candidates(problem, arch) if shared_bytes(tile, problem, arch) <= limit), None)


@dataclass(frozen=True, slots=True)
class _Features:
    intervals: bool = False
    mask: bool = False
    varlen: bool = False
    softcap: bool = False
    positive_scale: bool = True
    alibi: bool = False
    bias: Bias = "none"
    dropout: bool = False


def _feature_combinations() -> Iterator[_Features]:
    """Masks and scales in every combination; ALiBi, bias and dropout alone, and with all that goes with them."""
    scores = ((False, True), (False, False), (True, True))  # softcap, positive_scale
    masks = (  # intervals, mask, varlen
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (True, True, False),
        (False, False, True),
    )
    for (intervals, mask, varlen), (softcap, positive_scale) in product(masks, scores):
        yield _Features(intervals, mask, varlen, softcap, positive_scale)
    yield _Features(alibi=True)
    yield _Features(dropout=True)
    yield _Features(varlen=True, softcap=True, alibi=True, dropout=True)
    biases: tuple[Bias, ...] = ("element", "fp32")
    for bias in biases:
        yield _Features(bias=bias)
        yield _Features(intervals=True, mask=True, softcap=True, alibi=True, bias=bias, dropout=True)


_PRODUCTS: tuple[tuple[DType, bool], ...] = (
    ("fp16", False),
    ("bf16", False),
    ("fp32", False),
    ("fp32", True),
)


def reachable_problems(arch: str) -> Iterator[AttentionProblem]:
    """Problems that reach every shape of kernel that a call on ``arch`` can, with few features and with many."""
    pairs = [(d, d) for d in HEAD_DIMS]
    pairs += [(d, dv) for d in UNEQUAL_HEAD_DIMS for dv in UNEQUAL_HEAD_DIMS if d != dv]
    combinations = [asdict(features) for features in _feature_combinations()]
    for dtype, tf32 in _PRODUCTS:
        if ((dtype == "bf16" or tf32) and arch == "75") or (tf32 and arch == "host"):
            continue
        for (d, dv), vector, long in product(pairs, (False, True), (False, True)):
            if long and (dtype == "fp32" or max(d, dv) > 128 or arch == "host"):
                continue  # the same kernel as for few rows
            for features in combinations:
                yield AttentionProblem(
                    dtype=dtype,
                    head_dim=d,
                    head_dim_v=dv,
                    seqlen_q=SHORT_SEQLEN_Q + 1 if long else 1,
                    vector=vector,
                    tf32=tf32,
                    **features,
                )
