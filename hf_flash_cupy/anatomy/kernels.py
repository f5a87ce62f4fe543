"""Which kernels serve a shape, and what a compiler says of them. Nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_flash_cupy import call, cards, dispatch, env, fa1, fa2_backward, sm90
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
    def row_groups(self) -> int:
        """Groups of warps, each with row blocks of its own, that have the keys of a block in common."""
        return int(dict(self.config.constants).get("int kGroups", "1"))

    @property
    def parts(self) -> int:
        """Warps, or the warpgroups that compute, that share the rows or keys of a block."""
        return self.block_m // sm90.UNIT_ROWS if self.stays else self.config.num_threads // 32 // self.row_groups

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
        if (algorithm, direction) == ("fa2", "forward"):
            problem, geometry = problem_of(shape, algorithm), geometry_of(shape)
            if (hopper := sm90.select(problem, geometry)) is not None:
                return _hopper(problem, geometry, hopper, compile_it)
            note = f"not the kernel of TMA and wgmma: {sm90.refusal(problem, geometry)}"
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


def _hopper(problem: AttentionProblem, geometry: Geometry, config: KernelConfig, compile_it: bool) -> Kernel:
    """The forward kernel of compute capability 9.0."""
    tile = config.tile
    assert tile is not None
    _, tiles = sm90.num_tiles(problem, geometry, tile)
    registers, spills, reason = _resources(config) if compile_it else (None, 0, "not compiled")
    group = geometry.num_heads // geometry.num_heads_k if sm90.packs_heads(problem, geometry) else 1
    other = dispatch.select(problem, config.arch.removesuffix("a"))
    note = f"HF_FLASH_CUPY_ARCH={other.arch} gives the mma.sync kernel {other.name} in its place"
    return Kernel(config, tile.block_m, tile.block_n, 1, tiles, registers, spills, reason, group, note)


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

    "90a": the forward pass has a kernel of its own there, unless HF_FLASH_CUPY_ARCH forces another architecture.
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
