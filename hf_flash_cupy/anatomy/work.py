"""Operations and bytes of the three algorithms, counted from their loops. Pure.

N = seqlen, D = head_dim; per head, then times batch × heads. An operation is one addition, multiplication, maximum or
exponential; a fused multiply-add counts as two. Of device memory, ``moved`` is what the thread blocks load and store
(the L2 cache serves a part of it), ``least`` what any algorithm must: each tensor once. Columns of zeros that fill up a
head size, and the last row or key block, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_flash_cupy.bench.shapes import Shape

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tile numbers of a kernel that work depends on."""

    block_m: int  # B_r
    block_n: int  # B_c
    parts: int  # warps, or warpgroups, that share its rows or keys
    chunks: int = 1  # thread blocks that share the columns of a wide result; each computes the scores anew
    group: int = 1  # query heads whose rows share a row block
    row_bytes: int = 4  # of a row, what a backward kernel is given beside q and dout: delta, or more


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes from and to device memory."""

    read: float
    written: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one call costs. ``other``: operations outside matrix instructions, by what they are for."""

    matrix: float  # FLOPs of matrix instructions, those on hidden scores of visited tiles included
    other: dict[str, float]
    moved: Traffic
    least: Traffic
    extra_bytes: float  # device memory beyond inputs and results
    visits: int = 0  # (row block, key block) pairs of one head, or of the heads that share row blocks
    notes: tuple[str, ...] = field(default=())

    @property
    def other_total(self) -> float:
        return sum(self.other.values())


def visits(shape: Shape, block_m: int, block_n: int) -> int:
    """Pairs of a row block and a key block of one head in which some row sees some key."""
    row_blocks = -(-shape.seqlen // block_m)
    if not shape.causal:
        return row_blocks * -(-shape.seqlen // block_n)
    return sum(-(-min((i + 1) * block_m, shape.seqlen) // block_n) for i in range(row_blocks))


def standard(shape: Shape, direction: str) -> Work:
    """Dao 2022, Algorithms 0 and 3, as plain PyTorch operations run them: S and P go through device memory."""
    heads, size, rows = shape.batch * shape.heads, _BYTES[shape.dtype], shape.seqlen * shape.head_dim
    n = shape.seqlen**2
    score, tensor = n * size, rows * size
    mask = (score + n, score) if shape.causal else (0, 0)  # masked_fill: reads the scores and a mask of one byte
    other: dict[str, float]
    if direction == "forward":
        other = {"exponentials": n, "maximum, subtraction, sum, division of softmax": 4 * n, "scaling of q": rows}
        moved = Traffic(4 * tensor + 2 * score + mask[0], 2 * tensor + 2 * score + mask[1])
        matrix, extra = 4 * n * shape.head_dim, 2 * score
    else:
        other = {"gradient of softmax": 4 * n, "scaling of dq": rows}
        moved = Traffic(5 * tensor + 5 * score + mask[0], 4 * tensor + 2 * score + mask[1])
        matrix, extra = 8 * n * shape.head_dim, 2 * score
    notes = ("extra memory of the backward is beside P, kept from the forward",) if direction == "backward" else ()
    return _scaled(heads, matrix, other, moved, _least(shape, direction), extra, notes=notes)


def fa1_forward(shape: Shape, blocks: Blocks) -> Work:
    """Dao 2022, Algorithm 1: for each key block all row blocks; O (fp32), l, m rewritten at every visit but one."""
    rows, size = shape.seqlen * shape.head_dim, _BYTES[shape.dtype]
    pairs = visits(shape, blocks.block_m, blocks.block_n)
    scores = _scores_by_keys(shape, blocks)
    visited = pairs * blocks.block_m * shape.head_dim  # elements of O (or Q) in all visits
    again = max(visited - rows, 0)  # all but a row's first visit read O, all but its last write it
    state = again / shape.head_dim * 8
    other = _softmax(scores) | {
        "sum of the warps' partial products": visited * blocks.parts,
        "rescaling and adding O (line 12)": 3 * visited,
        "m and l (line 11): per row and visit": visited / shape.head_dim * (2 * blocks.parts + 8),
    }
    moved = Traffic(2 * rows * size + visited * size + again * 4 + state, rows * size + again * 4 + state)
    extra = 4 * rows + 8 * shape.seqlen
    heads = shape.batch * shape.heads
    return _scaled(heads, 4 * scores * shape.head_dim, other, moved, _least(shape, "forward"), extra, pairs)


def fa2_forward(shape: Shape, blocks: Blocks) -> Work:
    """Dao 2023, Algorithm 1: for each row block all key blocks; O, l and m stay in registers."""
    rows, size = shape.seqlen * shape.head_dim, _BYTES[shape.dtype]
    pairs = visits(shape, blocks.block_m, blocks.block_n)
    scores = _scores_by_rows(shape, blocks)
    keys = min(pairs * blocks.block_n, -(-shape.seqlen // blocks.block_m) * shape.seqlen) * shape.head_dim
    chunks = blocks.chunks
    other = _softmax(scores * chunks) | {"rescaling O, at least once": rows, "normalising O, once": rows}
    moved = Traffic((rows + keys) * size * chunks + keys * size, rows * size)
    notes = ("O is rescaled only where a row's maximum grows by more than 2^8, not in every step",)
    heads = shape.batch * shape.heads
    matrix = (2 + 2 * chunks) * scores * shape.head_dim
    return _scaled(heads, matrix, other, moved, _least(shape, "forward"), 0, pairs, notes)


def fa2_forward_sm90(shape: Shape, blocks: Blocks) -> Work:
    """The same by the kernel of compute capability 9.0, which takes maxima only of blocks that may need one.

    Rows are dealt in units, one a warpgroup; those of the heads of a group are one list, neighbours in rows together.
    """
    rows, size = shape.seqlen * shape.head_dim, _BYTES[shape.dtype]
    unit = blocks.block_m // blocks.parts
    key_blocks = [-(-end // blocks.block_n) for end in _ends_of_tiles(shape, blocks)]
    keys = sum(min(count * blocks.block_n, shape.seqlen) for count in key_blocks) * shape.head_dim
    scores = _scores_by_rows(shape, blocks)
    other: dict[str, float] = {
        "exponentials": scores,
        "scaling, subtraction, sum of softmax": 3 * scores,
        "maximum: of a row's first key block, and of those of which it may not see all": _maxima(shape, unit, blocks),
        "normalising O, once": rows,
    }
    moved = Traffic((rows + 2 * keys / blocks.group) * size, rows * size)
    notes = ("of a key block that is seen whole no maximum is taken: O is rescaled where its sum exceeds 2^15",)
    heads, pairs = shape.batch * shape.heads, sum(key_blocks)
    return _scaled(heads, 4 * scores * shape.head_dim, other, moved, _least(shape, "forward"), 0, pairs, notes)


def _ends_of_tiles(shape: Shape, blocks: Blocks) -> list[int]:
    """Keys that each tile of a group of heads loads: up to those of its last row. The first tiles have a unit less."""
    unit = blocks.block_m // blocks.parts
    units = -(-shape.seqlen // unit) * blocks.group
    tiles = -(-units // blocks.parts)
    missing = tiles * blocks.parts - units
    last_units = [blocks.parts * (m + 1) - min(m + 1, missing) - 1 for m in range(tiles)]
    ends = [min((last // blocks.group + 1) * unit, shape.seqlen) for last in last_units]
    return ends if shape.causal else [shape.seqlen] * tiles


def _maxima(shape: Shape, unit: int, blocks: Blocks) -> int:
    """Scores of a head of which a maximum is taken: in a unit's last block, and in all that a row may see in part."""
    units = -(-shape.seqlen // unit)
    count = units
    if shape.causal:
        ends = [-(-min((i + 1) * unit, shape.seqlen) // blocks.block_n) for i in range(units)]
        count = sum(max(end - (i * unit + 1) // blocks.block_n, 1) for i, end in enumerate(ends))
    return count * unit * blocks.block_n


def fa2_backward(shape: Shape, blocks: Blocks) -> Work:
    """Dao 2023, Algorithm 2: for each key block all row blocks; dK, dV stay in registers, dQ is summed in fp32."""
    rows, size = shape.seqlen * shape.head_dim, _BYTES[shape.dtype]
    pairs = visits(shape, blocks.block_m, blocks.block_n)
    scores = pairs * blocks.block_m * blocks.block_n
    visited = pairs * blocks.block_m * shape.head_dim
    chunks = blocks.chunks
    other = _gradient(scores * chunks) | {
        "delta = rowsum(dO ∘ O)": 2 * rows,
        "dQ added in fp32 (atomics)": visited,
    }
    group = shape.heads // shape.heads_k  # query heads that share K_j, V_j, and sum up dK_j, dV_j, in one thread block
    per_row = blocks.row_bytes * shape.seqlen
    prepare = Traffic(2 * rows * size, per_row + 4 * rows)  # out, dout → delta; dq's sums cleared
    main = Traffic(
        chunks
        * (2 * rows * size / group + 2 * visited * size + 8 * visited / shape.head_dim),  # K, V; Q, dO, lse, delta
        2 * rows * size / group + 4 * visited,  # dK, dV; what is added to dQ
    )
    finish = Traffic(4 * rows, rows * size)
    parts = (prepare, main, finish)
    moved = Traffic(sum(part.read for part in parts), sum(part.written for part in parts))
    extra = 4 * rows + per_row
    heads = shape.batch * shape.heads
    matrix = (6 + 4 * chunks) * scores * shape.head_dim
    return _scaled(heads, matrix, other, moved, _least(shape, "backward"), extra, pairs)


def fa1_backward(shape: Shape, blocks: Blocks) -> Work:
    """Dao 2022, Algorithm 4: one thread block a key head; dQ (fp32) read and rewritten at every visit but one."""
    rows, size = shape.seqlen * shape.head_dim, _BYTES[shape.dtype]
    pairs = visits(shape, blocks.block_m, blocks.block_n)
    scores = pairs * blocks.block_m * blocks.block_n
    visited = pairs * blocks.block_m * shape.head_dim
    again = max(visited - rows, 0)  # a row's first visit starts dQ at 0, its last writes the result
    group = shape.heads // shape.heads_k
    other = _gradient(scores) | {"delta = rowsum(dO ∘ O), once a row": 2 * rows}
    prepare = Traffic(2 * rows * size, 4 * shape.seqlen)  # out, dout → delta
    main = Traffic(
        2 * rows * size / group + 2 * visited * size + 8 * visited / shape.head_dim + 4 * again,
        2 * rows * size / group + 4 * again + rows * size,
    )
    moved = Traffic(prepare.read + main.read, prepare.written + main.written)
    extra = 4 * rows + 4 * shape.seqlen
    heads = shape.batch * shape.heads
    matrix = 10 * scores * shape.head_dim
    return _scaled(heads, matrix, other, moved, _least(shape, "backward"), extra, pairs)


def _scores_by_rows(shape: Shape, blocks: Blocks) -> int:
    """Scores that warps or warpgroups compute where each owns rows: it skips key blocks that none of them sees."""
    rows = blocks.block_m // blocks.parts
    return visits(shape, rows, blocks.block_n) * rows * blocks.block_n


def _scores_by_keys(shape: Shape, blocks: Blocks) -> int:
    """Scores that warps compute where each owns keys of the block: a warp skips row blocks that see none of them."""
    keys = blocks.block_n // blocks.parts
    return visits(shape, blocks.block_m, keys) * blocks.block_m * keys


def _softmax(scores: float) -> dict[str, float]:
    return {"exponentials": scores, "scaling, subtraction, maximum, sum of softmax": 4 * scores}


def _gradient(scores: float) -> dict[str, float]:
    return {
        "exponentials (P recomputed)": scores,
        "scaling, subtraction of lse": 2 * scores,
        "dS = P ∘ (dP - delta)": 2 * scores,
    }


def _least(shape: Shape, direction: str) -> Traffic:
    """Every tensor once, for the whole call. k and v have heads_k heads."""
    one = shape.batch * shape.seqlen * shape.head_dim * _BYTES[shape.dtype]
    q, kv = one * shape.heads, 2 * one * shape.heads_k
    lse = 4 * shape.batch * shape.seqlen * shape.heads
    return Traffic(q + kv, q) if direction == "forward" else Traffic(3 * q + kv + lse, q + kv)


def _scaled(
    heads: int,
    matrix: float,
    other: dict[str, float],
    moved: Traffic,
    least: Traffic,
    extra: float,
    pairs: int = 0,
    notes: tuple[str, ...] = (),
) -> Work:
    """From one head to all of them."""
    return Work(
        matrix=heads * matrix,
        other={name: heads * value for name, value in other.items()},
        moved=Traffic(heads * moved.read, heads * moved.written),
        least=least,
        extra_bytes=heads * extra,
        visits=pairs,
        notes=notes,
    )
