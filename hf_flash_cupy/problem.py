"""What is asked for (problems) and what serves it (kernel configurations): frozen, printable, stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["fp16", "bf16", "fp32"]
Bias = Literal["none", "element", "fp32"]
Algorithm = Literal["fa1", "fa2"]

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Everything of a call that decides which kernel runs; sizes that do not are left to the parameters."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    seqlen_q: int  # of the longest sequence
    vector: bool  # every row of q, k, v, out starts on 16 bytes and is whole 16-byte chunks
    intervals: bool = False  # key_intervals given
    mask: bool = False  # dense mask given
    softcap: bool = False
    positive_scale: bool = True  # softmax_scale > 0; with softcap always True
    varlen: bool = False
    tf32: bool = False  # fp32 products on tensor cores, if the user allowed it
    alibi: bool = False  # alibi_slopes given
    bias: Bias = "none"  # bias given: in the inputs' dtype, or in float32
    dropout: bool = False  # dropout_p > 0
    algorithm: Algorithm = "fa2"
    deterministic: bool = False  # backward only: gradients bit-equal from run to run
    paged: bool = False  # with a key-value cache only: k and v are pages

    @property
    def has_holes(self) -> bool:
        """Whether keys inside a row block's range may be hidden from all of its rows (kHasHoles of the kernels)."""
        return self.intervals or self.mask or self.bias != "none"


@dataclass(frozen=True, slots=True)
class Tile:
    """The numbers of one kernel shape; ``shared_bytes`` follows from them (tiles.py)."""

    block_m: int  # rows of a thread block
    block_n: int  # keys of one step
    num_warps: int  # a warp owns block_m / num_warps rows, a multiple of 16
    stages: int  # blocks of k and v in shared memory
    min_blocks: int  # thread blocks that must fit an SM: bounds the registers of a thread
    v_chunks: int = 1  # thread blocks that share a row block, each with its part of v's columns


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One kernel, fully decided: what :mod:`hf_flash_cupy.jit` needs to build it."""

    kernel: str  # C++ function template hfc::<kernel><Config>(const Params&), e.g. "fa2_forward"
    name: str  # unique readable entry point, e.g. "fa2_forward_bf16_d64_m128_n64_w4_s2_sm80"
    include: str  # header below cuda_src that defines the template, e.g. "fa2/forward.cuh"
    params: str  # C++ struct name and key of params.PARAMS, e.g. "AttentionParams"
    arch: str  # "75" "80" "86" "89" "90" "90a" "100" "120" or "host"
    constants: tuple[tuple[str, str], ...]  # ("using Element", "bf16"), ("int kBlockM", "128") …
    num_threads: int  # threads of a block
    min_blocks: int  # second number of __launch_bounds__
    shared_bytes: int  # dynamic shared memory of a block, bytes
    tile: Tile | None = None
