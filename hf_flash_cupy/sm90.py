"""The forward kernel of compute capability 9.0: which problems it serves, its settings by shape, and its plans.

Everything but :class:`ForwardSm90Plan` is a pure function of numbers: no GPU is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from . import dispatch, env, tensormap
from .launch import Launcher
from .params import FORWARD_SM90_PARAMS
from .plans import POINTER_WORDS as ATTENTION_WORDS
from .plans import Geometry, attention_params, explain_choice
from .problem import AttentionProblem, DType, KernelConfig, Tile
from .tensormap import TensorBox

ENABLED = False  # whether calls take this kernel

ARCH = "90a"
UNIT_ROWS = 64  # kUnitRows: rows of a warpgroup
PANEL_COLUMNS = 64  # kPanelColumns: columns of a box
_STORE_ROWS = 16  # rows that a warp stores at once
_TILE_SLOTS, _ALIGNMENT = 2, 1024  # kTileSlots, kAlignment

# (head_dim, head_dim_v) of the kernels, by cost. Any other is padded with zeros up to the next, by the copy engine.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
MIN_HEAD_DIM = 48  # below, more of a tile would be padding than not
MIN_ROWS = 64  # rows below which most of a tile would be empty


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the kernel depends on the shape. None changes what is computed."""

    warpgroups: int  # that compute, 64 rows each
    block_n: int  # keys of one step
    stages: int  # blocks of k and v in shared memory
    turns: bool  # warpgroups start their products one after the other
    fused: bool = True  # two places for q: the first scores of a tile beside the last output of the one before


# Registers of a thread, (loading, computing) warpgroups: 65,536 in all, less what a block's threads start with.
_REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}


def settings(head_dims: tuple[int, int], length: int, causal: bool, crowded: bool = False) -> Settings:
    """The settings for ``head_dims`` of HEAD_DIMS, measured on an H200. More warpgroups hide more of the softmax.

    ``length``: rows or keys, the fewer. ``crowded``: scores are changed before the softmax, which takes registers.
    """
    if head_dims == (64, 64):
        # The softmax costs as much as the products: 128 keys a step spend the least beside it, and turns keep the
        # warpgroups apart. Short rows want four warpgroups that drift freely instead; under a causal mask, where their
        # tiles differ in length, all but the longest do.
        long = length > (8192 if causal else 1024) and not crowded
        return Settings(3, 128, 5, turns=True) if long else Settings(4, 64, 8, turns=False)
    if head_dims in ((96, 96), (128, 128)):
        # 64 keys divide every power of two, and make the diagonal of a warpgroup's rows one block. Turns pay at 128
        # columns but for the shortest causal tiles; at 96 the products are too short to wait for.
        return Settings(3, 64, 4, turns=head_dims == (128, 128) and (length > 512 or not causal))
    if head_dims == (192, 128):
        return Settings(3, 64, 2, turns=False)  # all of the shared memory
    if head_dims == (192, 192):
        return Settings(2, 80, 2, turns=False)  # the output takes the registers of a third warpgroup
    # The output alone is 128 registers: two warpgroups, and no room for a second q.
    return Settings(2, 64, 2, turns=False, fused=False)


def _settings(problem: AttentionProblem, geometry: Geometry) -> Settings:
    length = min(geometry.seqlen_q, geometry.seqlen_k)
    crowded = problem.softcap or problem.alibi
    return settings(kernel_head_dims(problem), length, geometry.window[1] >= 0, crowded)


def kernel_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Of HEAD_DIMS, those that hold the problem's."""
    asked = (problem.head_dim, problem.head_dim_v)
    return next(sizes for sizes in HEAD_DIMS if all(size >= one for size, one in zip(sizes, asked, strict=True)))


def shared_bytes(chosen: Settings, head_dims: tuple[int, int]) -> int:
    """Shared memory of the plan in cuda_src/fa2/forward_sm90_traits.cuh, which asserts this number."""
    row, row_v = (-(-size // PANEL_COLUMNS) * PANEL_COLUMNS * 2 for size in head_dims)
    q_slots = 2 if chosen.fused else 1
    q = q_slots * chosen.warpgroups * UNIT_ROWS * row
    keys_and_values = chosen.stages * chosen.block_n * (row + row_v)
    barriers = 2 * (q_slots * chosen.warpgroups + 2 * chosen.stages + _TILE_SLOTS)
    return _ALIGNMENT + q + keys_and_values + _TILE_SLOTS * 16 + 8 * barriers


def refusal(problem: AttentionProblem, geometry: Geometry) -> str:
    """Why the kernel does not serve a problem, which the one of mma.sync then does; "" where it does."""
    features = {
        "key_intervals": problem.intervals,
        "mask": problem.mask,
        "packed sequences": problem.varlen,
        "bias": problem.bias != "none",
        "dropout": problem.dropout,
        "a window to the left": geometry.window[0] >= 0,
    }
    if named := [name for name, given in features.items() if given]:
        return ", ".join(named)
    if problem.dtype == "fp32":
        return "float32"
    sizes = (problem.head_dim, problem.head_dim_v)
    if max(sizes) > HEAD_DIMS[-1][0] or min(sizes) < MIN_HEAD_DIM:
        return f"head_dim {sizes[0]}, head_dim_v {sizes[1]}: {MIN_HEAD_DIM} to {HEAD_DIMS[-1][0]} are served"
    if not problem.vector or not all(box.is_encodable for box in boxes(problem, geometry, block_n=64).values()):
        return "tensors whose rows do not start on 16 bytes, or are broadcast"
    if geometry.seqlen_q < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows"
    return ""


@lru_cache(maxsize=4096)
def select(problem: AttentionProblem, geometry: Geometry) -> KernelConfig | None:
    """The kernel that serves the problem, None where mma.sync's does."""
    if refusal(problem, geometry):
        return None
    return config(problem, kernel_head_dims(problem), geometry.window[1] >= 0, _settings(problem, geometry))


def config(problem: AttentionProblem, head_dims: tuple[int, int], causal: bool, chosen: Settings) -> KernelConfig:
    """The kernel of the given settings; ``head_dims`` of HEAD_DIMS."""
    load, compute = _REGISTERS[chosen.warpgroups]
    constants = (
        ("int kWarpgroups", str(chosen.warpgroups)),
        ("int kStages", str(chosen.stages)),
        ("bool kCausal", _cxx(causal)),
        ("bool kTurns", _cxx(chosen.turns)),
        ("bool kFused", _cxx(chosen.fused)),
        ("int kLoadRegisters", str(load)),
        ("int kComputeRegisters", str(compute)),
    )
    numbers = f"g{chosen.warpgroups}_n{chosen.block_n}_s{chosen.stages}"
    numbers += "_turns" * chosen.turns + "_unfused" * (not chosen.fused) + "_causal" * causal
    name = dispatch.kernel_name("fa2_forward_sm90", problem, numbers, ARCH, head_dims)
    tile = Tile(
        block_m=UNIT_ROWS * chosen.warpgroups,
        block_n=chosen.block_n,
        num_warps=4 * chosen.warpgroups,
        stages=chosen.stages,
        min_blocks=1,
    )
    shared = shared_bytes(chosen, head_dims)
    made = dispatch.kernel_config(
        *("fa2_forward_sm90", name, "fa2/forward_sm90.cuh", problem, ARCH, tile, head_dims, constants, shared)
    )
    return replace(made, params="ForwardSm90Params", num_threads=128 * (chosen.warpgroups + 1))


def reachable_configs() -> Iterator[KernelConfig]:
    """Every configuration that :func:`select` can give, each once."""
    seen: set[str] = set()
    dtypes: tuple[DType, ...] = ("fp16", "bf16")
    features: tuple[dict[str, bool], ...] = ({}, {"softcap": True}, {"alibi": True}, {"positive_scale": False})
    features += ({"softcap": True, "alibi": True},)
    for dtype, head_dims, causal, length, given in itertools.product(
        dtypes, HEAD_DIMS, (False, True), (512, 16384), features
    ):
        problem = replace(AttentionProblem(dtype, *head_dims, length, vector=True), **given)  # type: ignore[arg-type]
        crowded = problem.softcap or problem.alibi
        made = config(problem, head_dims, causal, settings(head_dims, length, causal, crowded))
        if made.name not in seen:
            seen.add(made.name)
            yield made


def _cxx(value: bool) -> str:
    return "true" if value else "false"


def num_tiles(geometry: Geometry, tile: Tile) -> tuple[int, int]:
    """Row tiles of a head, and of all."""
    units = -(-geometry.seqlen_q // UNIT_ROWS)
    of_head = -(-units // (tile.block_m // UNIT_ROWS))
    return of_head, of_head * geometry.num_heads * geometry.batch


def heads_per_section(geometry: Geometry, causal: bool) -> int:
    """(batch, head) pairs whose tiles run interleaved, longest first: as many as keep their k and v in the L2 cache."""
    # Under a causal mask tiles differ in length, and a longer list of short ones to fill up with is worth some misses.
    l2_bytes = (32 if causal else 16) << 20
    pairs = geometry.batch * geometry.num_heads
    group = geometry.num_heads // geometry.num_heads_k
    one = geometry.seqlen_k * (geometry.head_dim + geometry.head_dim_v) * 2
    most = max(l2_bytes // max(one, 1), 1) * group
    return -(-pairs // -(-pairs // most))  # sections of one size


def boxes(problem: AttentionProblem, geometry: Geometry, block_n: int) -> dict[str, TensorBox]:
    """What the copy engine is told of q, k, v and out."""
    rows = {"q": UNIT_ROWS, "k": block_n, "v": block_n, "out": _STORE_ROWS}
    return {name: _box(problem, geometry, name, count) for name, count in rows.items()}


def _box(problem: AttentionProblem, geometry: Geometry, name: str, rows: int) -> TensorBox:
    of_q = name in ("q", "out")
    columns = geometry.head_dim if name in ("q", "k") else geometry.head_dim_v
    sizes = (
        geometry.seqlen_q if of_q else geometry.seqlen_k,
        geometry.num_heads if of_q else geometry.num_heads_k,
        geometry.batch,
    )
    batch, row, head = getattr(geometry, f"{name}_strides")
    # A dimension of size 1 may have any stride; one of 16 bytes is never stepped over.
    strides = [2 * stride if size > 1 else 16 for stride, size in zip((row, head, batch), sizes, strict=True)]
    return TensorBox(problem.dtype, (columns, *sizes), (strides[0], strides[1], strides[2]), (PANEL_COLUMNS, rows))


def _pointer_words() -> dict[str, int]:
    """Where each tensor's address lies in the struct, in 8-byte words: q, k, v and out in their maps."""
    fields = FORWARD_SM90_PARAMS.fields
    assert fields is not None
    attention = fields["attention"][1] // 8
    words = {name: attention + word for name, word in ATTENTION_WORDS.items()}
    maps = {name: fields[name][1] // 8 + tensormap.ADDRESS_WORD for name in ("q", "k", "v", "out")}
    return words | maps | {"tile_counter": fields["tile_counter"][1] // 8}


_WORDS = _pointer_words()


class ForwardSm90Plan:
    """As :class:`hf_flash_cupy.plans.Plan`: one geometry, ready to launch, for one thread."""

    def __init__(
        self, config: KernelConfig, problem: AttentionProblem, geometry: Geometry, device: torch.device
    ) -> None:
        assert config.tile is not None
        self.config = config
        of_head, total = num_tiles(geometry, config.tile)
        causal = geometry.window[1] >= 0
        params = np.zeros(1, FORWARD_SM90_PARAMS)
        params["attention"] = attention_params(geometry, problem)
        params["attention"]["num_m_blocks"] = of_head
        params["attention"]["num_tiles"] = total
        params["attention"]["heads_per_section"] = heads_per_section(geometry, causal)
        self._words = memoryview(params.view(np.uint8).data).cast("Q")
        self._boxes = boxes(problem, geometry, config.tile.block_n)
        for name, box in self._boxes.items():
            self._write_map(name, tensormap.encode(box))
        self._patched = tensormap.address_is_a_word()
        grid = min(torch.cuda.get_device_properties(device).multi_processor_count, total)
        self._dynamic = total > grid
        self._device = device
        self.launchers = [Launcher(config, params, grid, device)]
        explain_choice(problem, config, self.launchers[0].grid)

    def _write_map(self, name: str, words: tuple[int, ...]) -> None:
        for word, value in enumerate(words, _WORDS[name] - tensormap.ADDRESS_WORD):
            self._words[word] = value

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; q, k, v, out, lse and sinks have the plan's geometry."""
        words = self._words
        for name, tensor in tensors.items():
            words[_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        if not self._patched:
            for name, box in self._boxes.items():
                self._write_map(name, tensormap.encode.__wrapped__(box, words[_WORDS[name]]))
        if self._dynamic:
            _alive, words[_WORDS["tile_counter"]] = tile_counter(self._device)
        self.launchers[0]()


_RING = 1 << 14


class _CounterRing:
    """Zeroed words of device memory, each lent to a launch that leaves it 0.

    Launches of several streams may run at once, so that they must not share a word. A word comes round again after as
    many launches as the ring is long, which is more than all of a device's queues hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(_RING, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # other streams than the one that zeroes will use them
        self._address = self._words.data_ptr()
        self._count = itertools.count()  # next() is atomic: threads share the ring

    def lend(self) -> int:
        return self._address + next(self._count) % _RING * 4


@cache
def _ring(device: torch.device) -> _CounterRing:
    return _CounterRing(device)


def tile_counter(device: torch.device) -> tuple[Tensor | None, int]:
    """The address of a word that is 0 and that no other launch uses, and what must live until the launch.

    A graph's launches repeat, beside whatever runs then: theirs are words of the graph's own memory, zeroed by it.
    """
    if torch.cuda.is_current_stream_capturing():
        word = torch.zeros(1, dtype=torch.int32, device=device)
        return word, word.data_ptr()
    return None, _ring(device).lend()


def select_on(device: torch.device, problem: AttentionProblem, geometry: Geometry) -> KernelConfig | None:
    """The kernel for a call on ``device``, None where another serves it."""
    return select(problem, geometry) if serves(device) else None


def serves(device: torch.device) -> bool:
    """Whether calls on ``device`` may take this kernel: compute capability 9.0, and no other architecture forced."""
    return (
        ENABLED
        and device.type == "cuda"
        and env.forced_arch() is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )
