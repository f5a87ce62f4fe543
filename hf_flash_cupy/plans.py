"""A call of one geometry, ready to launch: the parameter struct is filled once, calls only write the pointers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import dispatch, env
from .launch import Launcher, device_arch
from .params import ATTENTION_PARAMS, Run
from .problem import AttentionProblem, KernelConfig

_LOG2_E = math.log2(math.e)
_explained: set[AttentionProblem] = set()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The run-time numbers of a call. Strides in elements, (batch, row, head) each."""

    batch: int
    num_heads: int
    num_heads_k: int
    seqlen_q: int  # varlen: total_q
    seqlen_k: int  # varlen: total_k
    head_dim: int
    head_dim_v: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int]  # (batch, head)
    mask_strides: tuple[int, int, int, int]
    interval_strides: tuple[int, int, int]
    window: tuple[int, int]
    softmax_scale: float
    softcap: float
    bias_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    bias_shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # before broadcasting
    alibi_batch_stride: int = 0
    dropout_p: float = 0.0
    dout_strides: tuple[int, int, int] = (0, 0, 0)  # of a backward call


def _pointer_words() -> dict[str, int]:
    """Where each pointer of the struct lies, in 8-byte words."""
    words = {}
    for name, (dtype, offset, *_) in (ATTENTION_PARAMS.fields or {}).items():
        if dtype == np.uint64 or dtype.names:  # a TensorRef starts with its pointer
            words[name] = offset // 8
    return words


POINTER_WORDS = _pointer_words()
NUM_TILES_WORD = ATTENTION_PARAMS.fields["num_tiles"][1] // 8  # type: ignore[index]


class Content(NamedTuple):
    """What a geometry writes into a plan: its struct without pointers, and each kernel's number of thread blocks."""

    raw: bytes | bytearray
    blocks: tuple[int, ...]
    memory: tuple[int, int] = (0, 0)  # of a plan that splits keys: floats of a thread block's part, and tiles


class Plan:
    """Kernels that run one after the other on one parameter struct; calls share it, so a plan belongs to one thread."""

    def __init__(
        self, kernels: list[tuple[KernelConfig, int]], params: np.ndarray[Any, Any], device: torch.device
    ) -> None:
        """``kernels``: each with the number of its thread blocks."""
        self._raw = memoryview(params.view(np.uint8).data)
        self._words = self._raw.cast("Q")  # pointers are written through it
        self.content: Content | None = None  # the geometry it was made for, until load
        self.launchers = [Launcher(config, params, num_tiles, device) for config, num_tiles in kernels]

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; the tensors, by their names in the struct, have the plan's geometry.

        Every call of a plan names the same.
        """
        words = self._words
        for name, tensor in tensors.items():
            words[POINTER_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        for launcher in self.launchers:
            words[NUM_TILES_WORD] = launcher.num_tiles
            launcher()

    def load(self, content: Content) -> None:
        """Makes the plan one for another geometry of the same kernels."""
        if content is not self.content:
            self._raw[:] = content.raw
            for launcher, blocks in zip(self.launchers, content.blocks, strict=True):
                launcher.resize(blocks)
            self.content = content

    @property
    def config(self) -> KernelConfig:
        return self.launchers[0].config


def forward_plan(problem: AttentionProblem, geometry: Geometry, device: torch.device) -> Plan:
    """Reads q, k, v and what the problem names; writes out and lse."""
    config = dispatch.select(problem, device_arch(device))
    tile = config.tile
    assert tile is not None
    params = attention_params(geometry, problem)
    num_m_blocks, num_tiles = row_blocks(geometry, problem, tile.block_m)
    params["num_m_blocks"] = num_m_blocks
    plan = Plan([(config, num_tiles * tile.v_chunks)], params, device)
    plan.content = Content(params.tobytes(), (num_tiles * tile.v_chunks,))
    explain_choice(problem, config, plan.launchers[0].grid)
    return plan


def explain_choice(problem: AttentionProblem, config: KernelConfig, grid: tuple[int, int]) -> None:
    """Prints the kernel once a problem, if the user asked for that."""
    if env.explain() and problem not in _explained:
        _explained.add(problem)
        print(f"hf_flash_cupy: {problem} -> {config.name}, first with grid {grid}")


def row_blocks(geometry: Geometry, problem: AttentionProblem, block_m: int) -> tuple[int, int]:
    """Row blocks (of a head; packed: of a head over all entries) and thread blocks of the grid."""
    blocks = -(-geometry.seqlen_q // block_m)
    if problem.varlen:  # each entry, and the rows beyond the last offset, may end in one block that is not full
        blocks += geometry.batch + 1
        return blocks, blocks * geometry.num_heads
    return blocks, blocks * geometry.num_heads * geometry.batch


_DIMENSIONS = ("batch", "head", "row", "col")
_TENSORS = Run(
    ATTENTION_PARAMS,
    *(
        f"{name}.{field}"
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        for field in ("data", "batch_stride", "row_stride", "head_stride")
    ),
)
_STRIDES = Run(
    *(ATTENTION_PARAMS, "lse_batch_stride", "lse_head_stride"),
    *(f"{name}_{dimension}_stride" for name in ("mask", "bias") for dimension in _DIMENSIONS),
    *(f"interval_{dimension}_stride" for dimension in _DIMENSIONS[:3]),
    "alibi_batch_stride",
)
_SIZES = Run(ATTENTION_PARAMS, "batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
_SECTION = Run(ATTENTION_PARAMS, "heads_per_section")
_REST = Run(
    *(ATTENTION_PARAMS, "window_left", "window_right", "bias_batch", "bias_heads", "bias_rows", "bias_cols"),
    *("softmax_scale", "score_scale_log2", "softcap", "softcap_inner", "dropout_threshold", "dropout_scale"),
)


_SEQLEN_K = Run(ATTENTION_PARAMS, "seqlen_k")
_K, _V = (
    Run(ATTENTION_PARAMS, f"{name}.batch_stride", f"{name}.row_stride", f"{name}.head_stride") for name in ("k", "v")
)
_MASK = Run(ATTENTION_PARAMS, *(f"mask_{dimension}_stride" for dimension in _DIMENSIONS))
_WINDOW = Run(ATTENTION_PARAMS, "window_left", "window_right")


def write_keys(raw: bytearray, seqlen_k: int, k_strides: tuple[int, int, int], v_strides: tuple[int, int, int]) -> None:
    """Other keys and values into a forward call's struct, whose rows are too few to care for heads_per_section."""
    _SEQLEN_K.write(raw, seqlen_k)
    _K.write(raw, *k_strides)
    _V.write(raw, *v_strides)


def write_window(raw: bytearray, window: tuple[int, int]) -> None:
    _WINDOW.write(raw, *window)


def write_mask(raw: bytearray, strides: tuple[int, int, int, int]) -> None:
    _MASK.write(raw, *strides)


def attention_params(geometry: Geometry, problem: AttentionProblem) -> np.ndarray[Any, Any]:
    """The struct without pointers and without the numbers of blocks, which are the kernels'."""
    raw, g = bytearray(ATTENTION_PARAMS.itemsize), geometry
    tensors = (g.q_strides, g.k_strides, g.v_strides, g.out_strides, g.dout_strides, *gradient_strides(g))
    _TENSORS.write(raw, *(number for strides in tensors for number in (0, *strides)))
    _STRIDES.write(raw, *g.lse_strides, *g.mask_strides, *g.bias_strides, *g.interval_strides, g.alibi_batch_stride)
    _SIZES.write(raw, g.batch, g.num_heads, g.num_heads_k, g.seqlen_q, g.seqlen_k, g.head_dim, g.head_dim_v)
    _SECTION.write(raw, _heads_per_section(g, problem))
    capped, threshold = g.softcap > 0, min(round(g.dropout_p * 65536), 65535)
    _REST.write(
        raw,
        *(*g.window, *g.bias_shape),
        *(g.softmax_scale, (1.0 if capped else g.softmax_scale) * _LOG2_E),
        *(g.softcap, g.softmax_scale / g.softcap if capped else 0.0),
        *(threshold, 65536 / (65536 - threshold)),
    )
    return np.frombuffer(raw, ATTENTION_PARAMS)


def gradient_strides(geometry: Geometry) -> tuple[tuple[int, int, int], ...]:
    """Of dq, dk and dv, which are contiguous; a packed tensor has no batch stride."""
    g = geometry
    rows_q, rows_k = g.num_heads * g.head_dim, g.num_heads_k * g.head_dim
    rows_v = g.num_heads_k * g.head_dim_v
    return (
        (g.seqlen_q * rows_q, rows_q, g.head_dim),
        (g.seqlen_k * rows_k, rows_k, g.head_dim),
        (g.seqlen_k * rows_v, rows_v, g.head_dim_v),
    )


_L2_BYTES = 32 << 20  # of an A100 and later about 40 to 60 MB: leave room for q and out


def _heads_per_section(geometry: Geometry, problem: AttentionProblem) -> int:
    """How many (batch, head) pairs share the L2 cache with their keys and values. 1 unless rows differ in length."""
    if geometry.window == (-1, -1):
        return 1
    size = 4 if problem.dtype == "fp32" else 2
    group = geometry.num_heads // geometry.num_heads_k
    one = geometry.seqlen_k * (geometry.head_dim + geometry.head_dim_v) * size
    pairs = geometry.num_heads * geometry.batch
    return max(min(_L2_BYTES // max(one, 1) * group, pairs), min(group, pairs), 1)
