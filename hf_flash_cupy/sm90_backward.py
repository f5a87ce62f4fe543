"""The backward kernels of compute capability 9.0: which problems they serve, and their numbers.

Pure functions of numbers: no GPU is needed. Plans: :mod:`hf_flash_cupy.sm90_backward_plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch

from . import sm90
from .dispatch import kernel_config, kernel_name
from .plans import Geometry, gradient_strides
from .problem import AttentionProblem, DType, KernelConfig, Tile
from .tensormap import TensorBox

# What the main kernel is told of the keys that a row sees: all; those up to the diagonal, or a bound to its right;
# those of an interval of its own, which windows to the left are as well.
Visibility = Literal["full", "causal", "intervals"]

HEAD_DIMS = (64, 128, 256)  # of the kernels. Any other is padded with zeros up to the next, by the copy engine.
MIN_HEAD_DIM = 48  # below, more of a tile would be padding than not
_SERVED = range(MIN_HEAD_DIM, HEAD_DIMS[-1] + 1)
MIN_ROWS = 64  # rows below which most of a tile would be empty
# Keys of a thread block: 64 for each of two warpgroups; or, where dk and dv of 64 take all registers, 64 for both.
BLOCK_N = {64: 128, 128: 128, 256: 64}
# Rows of a step. Registers hold S and dP of so many rows beside dk and dv, whose columns take the rest: twice the
# columns leave half the rows.
BLOCK_M = {64: 128, 128: 64, 256: 64}
_LOAD_REGISTERS, _COMPUTE_REGISTERS = 24, 240  # of a thread: 65,536 in all
_UNIT_KEYS = 64  # kUnitKeys: keys of a warpgroup's products
_STORE_ROWS = 16  # rows of dk and dv that a warp stores at once
_ROW_SLOTS, _SLACK = 2, 768  # kRowSlots, kSlack
_LEAST_HEADS = {"causal": 4, "intervals": 8}  # of a section
_ORDERED_HEADS = 16  # heads that at least share the GPU, so that few of its thread blocks wait for each other
_ORDERED_SECTIONS = 8  # of a causal mask, at least, if not one
_SCALES = (2.0**-64, 2.0**100)  # of softmax_scale: beyond, lse in units of a product leaves float32's range


def serves_tensors(dtype: torch.dtype | None, head_dim: int, head_dim_v: int) -> bool:
    """Whether tensors of this kind are served, whatever the mask."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim == head_dim_v and head_dim in _SERVED


def kernel_head_dim(problem: AttentionProblem) -> int:
    """Of HEAD_DIMS, the one that holds the problem's."""
    return next(size for size in HEAD_DIMS if size >= max(problem.head_dim, problem.head_dim_v))


def statistics_bytes(block_m: int) -> tuple[int, int]:
    """RowStatistics::kSharedBytes and kBytes of cuda_src/fa2/backward_sm90_traits.cuh."""
    return 8 * block_m + 16, 16 * block_m + 16


def shared_bytes(head_dim: int) -> int:
    """Shared memory of the plan in cuda_src/fa2/backward_sm90_traits.cuh, which the main kernel asserts."""
    block_m, block_n = BLOCK_M[head_dim], BLOCK_N[head_dim]
    shares_keys = block_n == _UNIT_KEYS
    dout_slots, ds_slots, dq_parts = (1, 2, 2) if shares_keys else (_ROW_SLOTS, 3, 1)
    keys_and_values = 2 * block_n * head_dim * 2
    rows = (_ROW_SLOTS + dout_slots) * block_m * head_dim * 2
    ds = ds_slots * block_m * block_n * 2
    dq = block_m * head_dim * 4 // dq_parts
    statistics = _ROW_SLOTS * statistics_bytes(block_m)[0]
    barriers = 2 + 2 * (_ROW_SLOTS + dout_slots) + ds_slots + 2 * 2
    if shares_keys:
        dq += block_m * block_n * 4  # and P
        barriers += ds_slots + 1
    return _SLACK + keys_and_values + rows + ds + dq + statistics + 8 * barriers


def refusal(problem: AttentionProblem, geometry: Geometry) -> str:
    """Why the kernels do not serve a backward call, which those of mma.sync then do; "" where they do."""
    if why := refusal_of_problem(problem):
        return why
    if not _SCALES[0] <= geometry.softmax_scale <= _SCALES[1]:
        return f"softmax_scale {geometry.softmax_scale}: {_SCALES[0]:.2g} to {_SCALES[1]:.2g} are served"
    if geometry.seqlen_q < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows"
    if geometry.seqlen_k == 0:
        return "no keys"
    if problem.deterministic and visibility(problem, geometry) == "intervals":
        return "deterministic gradients with key intervals or a window to the left"
    encodable = all(box.is_encodable for box in boxes(problem, geometry).values())
    return "" if encodable else "tensors whose rows do not start on 16 bytes, or are broadcast"


def refusal_of_problem(problem: AttentionProblem) -> str:
    """The same, whatever the geometry."""
    features = {
        "FlashAttention-1": problem.algorithm != "fa2",
        "packed sequences": problem.varlen,
        "mask": problem.mask,
        "bias": problem.bias != "none",
        "alibi_slopes": problem.alibi,
        "softcap": problem.softcap,
        "dropout": problem.dropout,
        "softmax_scale of 0 or below": not problem.positive_scale,
        "float32": problem.dtype == "fp32",
    }
    if named := [name for name, given in features.items() if given]:
        return ", ".join(named)
    sizes = (problem.head_dim, problem.head_dim_v)
    if sizes[0] != sizes[1]:
        return f"head_dim {sizes[0]}, head_dim_v {sizes[1]}: equal ones are served"
    if sizes[0] not in _SERVED:
        return f"head_dim {sizes[0]}: {MIN_HEAD_DIM} to {HEAD_DIMS[-1]} are served"
    return "" if problem.vector else "tensors whose rows do not start on 16 bytes"


@lru_cache(maxsize=4096)
def select(problem: AttentionProblem, geometry: Geometry, arch: str = sm90.ARCH) -> dict[str, KernelConfig] | None:
    """The kernels that serve a backward call, in the order they run; None where those of mma.sync do.

    ``arch``: that of Hopper, or "host".
    """
    if refusal(problem, geometry):
        return None
    visible = visibility(problem, geometry)
    return configs(problem.dtype, kernel_head_dim(problem), visible, problem.deterministic, arch)


def visibility(problem: AttentionProblem, geometry: Geometry) -> Visibility:
    """What the main kernel needs to know of the keys that rows see."""
    if problem.intervals or 0 <= geometry.window[0] < geometry.seqlen_k - 1:
        return "intervals"
    return "causal" if is_causal(geometry) else "full"


def is_causal(geometry: Geometry) -> bool:
    """Whether the window's bound to the right hides a key from some row."""
    return 0 <= geometry.window[1] < geometry.seqlen_q - 1


def configs(
    dtype: DType, head_dim: int, visible: Visibility, deterministic: bool = False, arch: str = sm90.ARCH
) -> dict[str, KernelConfig]:
    """The kernels of one backward pass in the order they run, by name; ``head_dim`` of HEAD_DIMS."""
    rows, tile_bytes = "fa2/backward_sm90_rows.cuh", BLOCK_M[head_dim] * head_dim * 2
    noted: Visibility = "intervals" if visible == "intervals" else "full"  # by prepare, for main
    main = "fa2/backward_sm90.cuh"
    kernels: dict[str, tuple[str, str, Visibility, bool, int, int]] = {
        # include, visibility, whether it knows of the order of dq's parts, threads, shared memory
        "prepare": ("fa2_backward_sm90_prepare", rows, noted, deterministic, 128, 0),
        "main": ("fa2_backward_sm90", main, visible, deterministic, 384, shared_bytes(head_dim)),
        "finish": ("fa2_backward_sm90_finish", rows, "full", False, 256, tile_bytes),
    }
    return {part: _config(*numbers, dtype, head_dim, arch) for part, numbers in kernels.items()}


def _config(
    kernel: str,
    include: str,
    visible: Visibility,
    deterministic: bool,
    threads: int,
    shared: int,
    dtype: DType,
    head_dim: int,
    arch: str,
) -> KernelConfig:
    tile = Tile(BLOCK_M[head_dim], BLOCK_N[head_dim], num_warps=threads // 32, stages=_ROW_SLOTS, min_blocks=1)
    problem = AttentionProblem(dtype, head_dim, head_dim, 1, vector=True, intervals=visible == "intervals")
    causal = visible == "causal"
    numbers = f"m{tile.block_m}_n{tile.block_n}" + "_causal" * causal + "_deterministic" * deterministic
    sizes = (head_dim, head_dim)
    name = kernel_name(kernel, problem, numbers, arch, sizes)
    constants = (
        ("int kNumWarps", str(tile.num_warps)),
        ("int kRowChunks", "1"),
        ("bool kCausal", "true" if causal else "false"),
        ("bool kDeterministic", "true" if deterministic else "false"),
        ("int kLoadRegisters", str(_LOAD_REGISTERS)),
        ("int kComputeRegisters", str(_COMPUTE_REGISTERS)),
    )
    made = kernel_config(kernel, name, include, problem, arch, tile, sizes, constants, shared)
    return replace(made, params="BackwardSm90Params")


def reachable_configs() -> Iterator[KernelConfig]:
    """Every configuration that :func:`select` can give, each once."""
    seen: set[str] = set()
    dtypes: tuple[DType, ...] = ("fp16", "bf16")
    kinds: tuple[tuple[Visibility, bool], ...] = (
        *itertools.product(("full", "causal"), (False, True)),  # type: ignore[arg-type]
        ("intervals", False),
    )
    for dtype, head_dim, (visible, deterministic) in itertools.product(dtypes, HEAD_DIMS, kinds):
        for made in configs(dtype, head_dim, visible, deterministic).values():
            if made.name not in seen:
                seen.add(made.name)
                yield made


def num_blocks(problem: AttentionProblem, geometry: Geometry) -> tuple[int, int]:
    """Row blocks and key blocks of a head."""
    head_dim = kernel_head_dim(problem)
    return -(-geometry.seqlen_q // BLOCK_M[head_dim]), -(-geometry.seqlen_k // BLOCK_N[head_dim])


def workspaces(problem: AttentionProblem, geometry: Geometry) -> dict[str, int]:
    """Elements of 4 bytes that the kernels share, by their names in the plan's call."""
    head_dim = kernel_head_dim(problem)
    block_m = BLOCK_M[head_dim]
    m_blocks = num_blocks(problem, geometry)[0]
    blocks = m_blocks * geometry.num_heads * geometry.batch
    sizes = {"dq_accum": blocks * block_m * head_dim, "row_statistics": blocks * statistics_bytes(block_m)[1] // 4}
    if problem.deterministic:
        sizes |= {"dq_turns": 2 * blocks}
    if visibility(problem, geometry) == "intervals":
        blocks = m_blocks * geometry.batch * (geometry.num_heads if geometry.interval_strides[1] else 1)
        sizes |= {"row_block_keys": blocks * 4, "row_intervals": blocks * block_m * 2}
    return sizes


def heads_per_section(problem: AttentionProblem, geometry: Geometry) -> int:
    """(batch, key head) pairs whose key blocks run interleaved, longest first: as many as keep q, dout and dq's sums in
    the L2 cache, but not so few that the end of a section is long. 1 where key blocks are of one length. Deterministic
    gradients have their own rule: cuda_src/fa2/backward_sm90_order.cuh."""
    visible = visibility(problem, geometry)
    if visible == "full" and not problem.deterministic:
        return 1
    group = geometry.num_heads // geometry.num_heads_k
    one = group * geometry.seqlen_q * kernel_head_dim(problem) * (2 + 2 + 4)
    pairs = geometry.batch * geometry.num_heads_k
    fit = (32 << 20) // max(one, 1)
    if not problem.deterministic:
        return min(max(fit, _LEAST_HEADS[visible]), pairs)
    if visible == "full":
        return min(max(fit, _ORDERED_HEADS), pairs)
    few = min(fit, pairs // _ORDERED_SECTIONS)
    return few if few >= 2 else pairs


def boxes(problem: AttentionProblem, geometry: Geometry) -> dict[str, TensorBox]:
    """What the copy engine is told of each tensor."""
    g, head_dim = geometry, kernel_head_dim(problem)
    block_m, block_n = BLOCK_M[head_dim], BLOCK_N[head_dim]
    _, dk_strides, dv_strides = gradient_strides(g)
    of_q, of_k = (g.seqlen_q, g.num_heads, g.batch), (g.seqlen_k, g.num_heads_k, g.batch)
    asked = {
        "q": (of_q, g.q_strides, block_m),
        "k": (of_k, g.k_strides, block_n),
        "v": (of_k, g.v_strides, block_n),
        "dout": (of_q, g.dout_strides, block_m),
        "dk": (of_k, dk_strides, _STORE_ROWS),
        "dv": (of_k, dv_strides, _STORE_ROWS),
    }
    return {
        name: sm90.tensor_box(problem.dtype, g.head_dim, sizes, strides, rows)
        for name, (sizes, strides, rows) in asked.items()
    }


def select_on(device: torch.device, problem: AttentionProblem, geometry: Geometry) -> dict[str, KernelConfig] | None:
    """The kernels for a call on ``device``, None where others serve it."""
    if not sm90.serves(device):
        return None
    return select(problem, geometry, "host" if device.type == "cpu" else sm90.ARCH)
