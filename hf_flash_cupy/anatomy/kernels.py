"""Which kernels serve a shape, and what a compiler says of them. Nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_flash_cupy import call, cards, dispatch, env, fa1, fa2_backward, sm90, sm90_backward
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.errors import CompilationError, MissingDependency
from hf_flash_cupy.plans import Geometry
from hf_flash_cupy.problem import AttentionProblem, DType, KernelConfig
from hf_flash_cupy.tiles import ARCHS

_DTYPES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel that does the work of one algorithm and direction, and its launch."""

    config: KernelConfig
    block_m: int  # B_r
    block_n: int  # B_c
    chunks: int  # thread blocks that share the columns of one result
    num_blocks: int  # thread blocks of the grid; where they stay, the tiles that they take
    registers: int | None  # of a thread; None where no NVRTC could be asked
    spill_bytes: int
    why_unknown: str = ""  # why registers are not known
    group: int = 1  # query heads whose rows share a tile
    note: str = ""  # which other kernel there is, or why there is none

    @property
    def stays(self) -> bool:
        """Whether its thread blocks stay, one an SM, and take tile after tile; one of their warpgroups loads."""
        return self.config.kernel == "fa2_forward_sm90"

    @property
    def has_warpgroups(self) -> bool:
        """Whether warpgroups compute, and one more loads: the kernels of compute capability 9.0."""
        return self.config.kernel.endswith("_sm90")

    @property
    def row_groups(self) -> int:
        """Groups of warps, each with row blocks of its own, that have the keys of a block in common."""
        return int(dict(self.config.constants).get("int kGroups", "1"))

    @property
    def parts(self) -> int:
        """Warps, or the warpgroups that compute, that share the rows or keys of a block."""
        if self.has_warpgroups:
            return self.config.num_threads // 128 - 1
        return self.config.num_threads // 32 // self.row_groups

    @property
    def row_bytes(self) -> int:
        """Of each row, what a backward kernel is given beside q and dout."""
        if not self.has_warpgroups:
            return 4  # delta
        return sm90_backward.statistics_bytes(self.block_m)[1] // self.block_m

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that fit an SM at once."""
        config = self.config
        arch = config.arch.removesuffix("a")
        return cards.blocks_per_sm(arch, config.num_threads, config.shared_bytes, self.registers)


def problem_of(shape: Shape, algorithm: str) -> AttentionProblem:
    """The problem that a plain call on contiguous tensors of this shape is."""
    return AttentionProblem(
        dtype=_DTYPES[shape.dtype],
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim,
        seqlen_q=shape.seqlen,
        vector=shape.head_dim * (4 if shape.dtype == "float32" else 2) % 16 == 0,
        algorithm=algorithm,  # type: ignore[arg-type]
    )


def geometry_of(shape: Shape) -> Geometry:
    """The numbers of that call."""
    sizes = [(shape.batch, shape.seqlen, heads, shape.head_dim) for heads in (shape.heads, shape.heads_k)]
    q, k = (torch.empty(size, dtype=getattr(torch, shape.dtype), device="meta") for size in sizes)
    strides = [(x.stride(0), x.stride(1), x.stride(2)) for x in (q, k, k)]
    options = call.Options(causal=shape.causal)
    return call.geometry_of(
        q, k, shape.seqlen, (strides[0], strides[1], strides[2]), {}, options, shape.batch, shape.batch
    )


def find(shape: Shape, algorithm: str, direction: str, arch: str, compile_it: bool = True) -> Kernel:
    """The main kernel of "fa1" or "fa2" on ``arch``; "90a": what a call takes there. Raises UnsupportedProblem."""
    note = ""
    if arch == sm90.ARCH:
        arch = arch.removesuffix("a")
        if algorithm == "fa2":
            problem, geometry = problem_of(shape, algorithm), geometry_of(shape)
            found, refusal = (_hopper if direction == "forward" else _hopper_backward)(problem, geometry, compile_it)
            if found is not None:
                return found
            note = f"not the kernel of TMA and wgmma: {refusal}"
    config, block_m, block_n, chunks = _select(problem_of(shape, algorithm), direction, arch)
    if algorithm == "fa1":  # a thread block a head; backward, one of k and v
        blocks = shape.heads if direction == "forward" else shape.heads_k
    elif direction == "forward":  # a thread block a row block
        blocks = shape.heads * -(-shape.seqlen // block_m)
    else:  # a thread block a key block: the query heads that share it come one after the other
        blocks = shape.heads_k * -(-shape.seqlen // block_n)
    registers, spills, reason = _resources(config) if compile_it else (None, 0, "not compiled")
    total = shape.batch * blocks * chunks
    return Kernel(config, block_m, block_n, chunks, total, registers, spills, reason, note=note)


def _hopper(problem: AttentionProblem, geometry: Geometry, compile_it: bool) -> tuple[Kernel | None, str]:
    """The forward kernel of compute capability 9.0, or why it does not serve the call."""
    config = sm90.select(problem, geometry)
    if config is None:
        return None, sm90.refusal(problem, geometry)
    tile = config.tile
    assert tile is not None
    _, tiles = sm90.num_tiles(problem, geometry, tile)
    registers, spills, reason = _resources(config) if compile_it else (None, 0, "not compiled")
    group = geometry.num_heads // geometry.num_heads_k if sm90.packs_heads(problem, geometry) else 1
    note = _in_its_place(dispatch.select(problem, config.arch.removesuffix("a")))
    return Kernel(config, tile.block_m, tile.block_n, 1, tiles, registers, spills, reason, group, note), ""


def _hopper_backward(problem: AttentionProblem, geometry: Geometry, compile_it: bool) -> tuple[Kernel | None, str]:
    """The same of the backward pass: a thread block a key block."""
    geometry = replace(geometry, dout_strides=geometry.out_strides)
    configs = sm90_backward.select(problem, geometry)
    if configs is None:
        return None, sm90_backward.refusal(problem, geometry)
    config = configs["main"]
    assert config.tile is not None
    blocks = sm90_backward.num_blocks(problem, geometry)[1] * geometry.num_heads_k * geometry.batch
    registers, spills, reason = _resources(config) if compile_it else (None, 0, "not compiled")
    note = _in_its_place(fa2_backward.configs(problem, config.arch.removesuffix("a"))["main"])
    tile = config.tile
    return Kernel(config, tile.block_m, tile.block_n, 1, blocks, registers, spills, reason, note=note), ""


def _in_its_place(other: KernelConfig) -> str:
    return f"HF_FLASH_CUPY_ARCH={other.arch} gives the mma.sync kernel {other.name} in its place"


def _select(problem: AttentionProblem, direction: str, arch: str) -> tuple[KernelConfig, int, int, int]:
    """The kernel, its rows and its keys of a step, its chunks."""
    if direction == "backward" and problem.algorithm == "fa2":
        dispatch.select(problem, arch)  # what has no forward pass has no backward pass
        shape = fa2_backward.choose(problem, arch)
        return fa2_backward.configs(problem, arch)["main"], shape.block_m, shape.block_n, shape.chunks
    if direction == "backward":
        config = fa1.backward_config(problem, arch)
    else:
        config = fa1.forward_config(problem, arch) if problem.algorithm == "fa1" else dispatch.select(problem, arch)
    assert config.tile is not None
    chunks = int(dict(config.constants).get("int kVChunks", "1"))
    return config, config.tile.block_m, config.tile.block_n, chunks


def _resources(config: KernelConfig) -> tuple[int | None, int, str]:
    """Registers of a thread, spilled bytes, and why they are not known."""
    from hf_flash_cupy.jit import compiler, module

    try:
        entry = module.ensure_cached(config)
    except (MissingDependency, CompilationError) as error:
        return None, 0, str(error).partition("\n")[0]
    found = compiler.resource_usage(entry.meta["log"])
    if found is None:
        return None, 0, "compiled to PTX: the driver decides"
    return found.registers, found.spill_bytes, ""


def kernel_arch(capability: str) -> str:
    """The architecture whose kernels a call takes on a compute capability. Raises ValueError where there is none.

    "90a": FlashAttention-2 has kernels of its own there, unless HF_FLASH_CUPY_ARCH forces another architecture.
    """
    known = [arch for arch in ARCHS if capability.isdecimal() and int(arch) <= int(capability)]
    if not known:
        raise ValueError(f"--arch {capability}: must be a compute capability of 75 or above (90 for an H100 or H200).")
    forced = env.forced_arch()
    if forced is not None and forced not in known:
        raise ValueError(
            f"HF_FLASH_CUPY_ARCH={forced}: for compute capability {capability} supported are {', '.join(known)}; "
            "unset it or choose one of these."
        )
    return forced or (sm90.ARCH if capability == sm90.ARCH.removesuffix("a") else known[-1])
