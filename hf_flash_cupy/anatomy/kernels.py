"""Which kernels serve a shape, and what a compiler says of them. Nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass

from hf_flash_cupy import cards, dispatch, fa1, fa2_backward
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.errors import CompilationError, MissingDependency
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
    num_blocks: int  # thread blocks of the grid
    registers: int | None  # of a thread; None where no NVRTC could be asked
    spill_bytes: int
    why_unknown: str = ""  # why registers are not known

    @property
    def num_warps(self) -> int:
        return self.config.num_threads // 32

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that fit an SM at once."""
        config = self.config
        return cards.blocks_per_sm(config.arch, config.num_threads, config.shared_bytes, self.registers)


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


def find(shape: Shape, algorithm: str, direction: str, arch: str, compile_it: bool = True) -> Kernel:
    """The main kernel of "fa1" or "fa2". Raises UnsupportedProblem."""
    config, block_m, block_n, chunks = _select(problem_of(shape, algorithm), direction, arch)
    if algorithm == "fa1":  # a thread block a head; backward, one of k and v
        blocks = shape.heads if direction == "forward" else shape.heads_k
    elif direction == "forward":  # a thread block a row block
        blocks = shape.heads * -(-shape.seqlen // block_m)
    else:  # a thread block a key block: the query heads that share it come one after the other
        blocks = shape.heads_k * -(-shape.seqlen // block_n)
    registers, spills, reason = _resources(config) if compile_it else (None, 0, "not compiled")
    return Kernel(config, block_m, block_n, chunks, shape.batch * blocks * chunks, registers, spills, reason)


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
    """The architecture whose kernels serve a compute capability. Raises ValueError for one that none does."""
    known = [arch for arch in ARCHS if capability.isdecimal() and int(arch) <= int(capability)]
    if not known:
        raise ValueError(f"--arch {capability}: must be a compute capability of 75 or above (90 for an H100 or H200).")
    return known[-1]
