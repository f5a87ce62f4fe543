"""What is measured: shapes, their useful work, and the presets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

DIRECTIONS = ("forward", "backward", "both")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Shape:
    """One row: q (batch, seqlen, heads, head_dim), k and v (batch, seqlen, heads_k, head_dim or head_dim_v)."""

    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"
    head_dim_v: int = 0  # 0: head_dim
    window: int = -1  # of a causal row: keys left of its own that it sees, negative: all
    packed: tuple[int, ...] = ()  # lengths of the sequences that lie end to end in the one entry

    @property
    def values_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def pairs(self) -> float:
        """Of a row and a key that it sees, in one head. Half under a causal mask, as the papers have it."""
        if self.window >= 0:
            seen = min(self.window + 1, self.seqlen)  # by all but the first rows
            return seen * self.seqlen - seen * (seen - 1) / 2
        return sum(length**2 for length in self.packed or (self.seqlen,)) * (0.5 if self.causal else 1.0)

    def flops(self, direction: str) -> float:
        """Useful work as both papers count it (Dao 2023, section 4.1).

        Forward: two products of ``pairs`` · head_dim multiply-adds per head. Backward: five products, hence 2.5 times
        that; recomputed products do not count.
        """
        forward = 2 * self.batch * self.heads * self.pairs * (self.head_dim + self.values_dim)
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    @property
    def label(self) -> str:
        heads = str(self.heads) if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        sizes = str(self.head_dim) + f"/{self.head_dim_v}" * bool(self.head_dim_v)
        mask = " causal" * self.causal + f" window {self.window}" * (self.window >= 0)
        mask += f" in {len(self.packed)} sequences" * bool(self.packed)
        return f"B{self.batch} S{self.seqlen} H{heads} D{sizes}{mask} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named list of rows."""

    about: str
    shapes: tuple[Shape, ...]
    directions: tuple[str, ...]
    implementations: tuple[str, ...] = ()  # empty: every one


def papers_shapes(
    dims: Iterable[int], lengths: Iterable[int], causal: Iterable[bool], *, tokens: int = 16384, hidden: int = 2048
) -> Iterator[Shape]:
    """The papers' table (Dao 2023, section 4.1): the batch holds ``tokens``, heads = ``hidden`` / head_dim."""
    for head_dim, seqlen, flag in product(dims, lengths, causal):
        heads = max(hidden // head_dim, 1)
        yield Shape(max(tokens // seqlen, 1), seqlen, heads, heads, head_dim, flag)


def with_heads_k(shapes: Iterable[Shape], heads_k: int) -> list[Shape]:
    """The same shapes with ``heads_k`` heads of k and v. Raises ValueError where they do not divide those of q."""
    changed = [replace(shape, heads_k=heads_k) for shape in shapes]
    for shape in changed:
        if shape.heads % heads_k:
            raise ValueError(f"--kv-heads {heads_k}: must divide the {shape.heads} heads of q ({shape.label}).")
    return changed


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_BOTH = (False, True)
_CELLS = (1024, 4096, 16384)
_MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 128)  # 16,384 tokens

PRESETS = {
    "papers": Preset(
        "the papers' tables: 16,384 tokens, hidden size 2048",
        tuple(papers_shapes((64, 128, 256), _LENGTHS, _BOTH)),
        DIRECTIONS,
    ),
    "quick": Preset(
        "four cells of the papers' tables",
        tuple(papers_shapes((64, 128), (4096,), _BOTH)),
        ("forward", "backward"),
    ),
    "cells": Preset(
        "the papers' tables at 1,024, 4,096 and 16,384 tokens",
        tuple(papers_shapes((64, 128, 256), _CELLS, _BOTH)),
        ("forward", "backward"),
    ),
    "fa1": Preset(
        "FlashAttention-1 and -2 against standard attention: 128 heads in all, D 64",
        tuple(Shape(8, s, 16, 16, 64, causal) for s, causal in product((1024, 2048, 4096, 8192, 16384), _BOTH)),
        DIRECTIONS,
        ("cupy_fa1", "cupy_fa2", "eager", "flash", "flash_attn"),
    ),
    "few-heads": Preset(
        "parallel granularity: batch × heads from 1 upwards against the number of SMs",
        tuple(
            Shape(1, 4096, heads, heads, head_dim, False)
            for head_dim in (64, 128)
            for heads in (1, 2, 4, 8, 16, 32, 64, 128, 132, 256)
        ),
        ("forward", "backward"),
        ("cupy_fa1", "cupy_fa2", "eager", "flash"),
    ),
    "training": Preset(
        "shapes of models in training: grouped queries, causal",
        (
            Shape(4, 4096, 32, 8, 64, True),
            Shape(2, 8192, 32, 8, 128, True),
            Shape(4, 4096, 32, 32, 80, True),
            Shape(4, 4096, 16, 8, 256, True),
            Shape(4, 4096, 32, 8, 128, True, "float16"),
            Shape(4, 2048, 32, 32, 96, True),
        ),
        DIRECTIONS,
    ),
    "model-shapes": Preset(
        "forward passes of models: grouped queries, latent attention, windows, packed, float16",
        (
            Shape(2, 8192, 32, 8, 128, True),
            Shape(4, 4096, 32, 8, 64, True),
            Shape(4, 4096, 16, 16, 192, True, head_dim_v=128),
            Shape(1, 16384, 16, 16, 128, True, window=1024),
            Shape(1, 16384, 32, 32, 64, True, window=1024),
            Shape(1, 16384, 16, 16, 128, True, packed=_MIXED),
            Shape(1, 16384, 32, 8, 128, True, packed=_MIXED),
            Shape(1, 16384, 32, 32, 64, True, packed=_MIXED),
            *(Shape(4, 4096, 16, 16, 128, *mask_dtype) for mask_dtype in product(_BOTH, ("bfloat16", "float16"))),
        ),
        ("forward",),
        ("cupy_fa2", "flash", "cudnn", "fa3", "fa4"),
    ),
    "decode": Preset("one row an entry against a long cache: 32 heads over 8 of keys, D 128", (), ()),
    "smoke": Preset(
        "a tiny shape that runs anywhere, to see that the benchmark works",
        (Shape(1, 64, 2, 2, 32, False, "float32"), Shape(1, 48, 2, 1, 32, True, "float32")),
        DIRECTIONS,
        ("cupy_fa1", "cupy_fa2", "eager", "math"),
    ),
}
