"""A call of one geometry, ready to launch: the parameter struct is filled once, calls only write the pointers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch, env
from .launch import Launcher, device_arch
from .params import ATTENTION_PARAMS
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
_NUM_TILES = ATTENTION_PARAMS.fields["num_tiles"][1] // 8  # type: ignore[index]


class Plan:
    """Kernels that run one after the other on one parameter struct; calls share it, so a plan belongs to one thread."""

    def __init__(
        self, kernels: list[tuple[KernelConfig, int]], params: np.ndarray[Any, Any], device: torch.device
    ) -> None:
        """``kernels``: each with the number of its thread blocks."""
        self._params = params
        self._words = memoryview(params.view(np.uint8).data).cast("Q")  # pointers are written through it
        self.launchers = [Launcher(config, params, num_tiles, device) for config, num_tiles in kernels]

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; the tensors, by their names in the struct, have the plan's geometry."""
        words = self._words
        for name, tensor in tensors.items():
            words[POINTER_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        for launcher in self.launchers:
            words[_NUM_TILES] = launcher.num_tiles
            launcher()

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


def attention_params(geometry: Geometry, problem: AttentionProblem) -> np.ndarray[Any, Any]:
    """The struct without pointers and without the numbers of blocks, which are the kernels'."""
    params = np.zeros(1, ATTENTION_PARAMS)
    for name in ("q", "k", "v", "out", "dout"):
        strides = getattr(geometry, f"{name}_strides")
        for field, stride in zip(("batch_stride", "row_stride", "head_stride"), strides, strict=True):
            params[name][field] = stride
    params["lse_batch_stride"], params["lse_head_stride"] = geometry.lse_strides
    for field, stride in zip(("batch", "head", "row", "col"), geometry.mask_strides, strict=True):
        params[f"mask_{field}_stride"] = stride
    for field, stride in zip(("batch", "head", "row"), geometry.interval_strides, strict=True):
        params[f"interval_{field}_stride"] = stride
    for field, stride, size in zip(
        ("batch", "head", "row", "col"), geometry.bias_strides, geometry.bias_shape, strict=True
    ):
        params[f"bias_{field}_stride"] = stride
        params["bias_heads" if field == "head" else "bias_batch" if field == "batch" else f"bias_{field}s"] = size
    params["alibi_batch_stride"] = geometry.alibi_batch_stride
    for name in ("q", "k", "v"):  # gradients are contiguous; a packed tensor has no batch stride
        heads = geometry.num_heads if name == "q" else geometry.num_heads_k
        row = heads * (geometry.head_dim_v if name == "v" else geometry.head_dim)
        seqlen = geometry.seqlen_q if name == "q" else geometry.seqlen_k
        params[f"d{name}"]["batch_stride"] = seqlen * row
        params[f"d{name}"]["row_stride"] = row
        params[f"d{name}"]["head_stride"] = row // max(heads, 1)
    for field in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        params[field] = getattr(geometry, field)
    params["window_left"], params["window_right"] = geometry.window
    params["heads_per_section"] = _heads_per_section(geometry, problem)
    params["softmax_scale"] = geometry.softmax_scale
    threshold = min(round(geometry.dropout_p * 65536), 65535)
    params["dropout_threshold"] = threshold
    params["dropout_scale"] = 65536 / (65536 - threshold)
    params["score_scale_log2"] = (1.0 if geometry.softcap > 0 else geometry.softmax_scale) * _LOG2_E
    params["softcap"] = geometry.softcap
    params["softcap_inner"] = geometry.softmax_scale / geometry.softcap if geometry.softcap > 0 else 0.0
    return params


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
