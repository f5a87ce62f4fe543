"""select(problem, arch) → KernelConfig: pure, cached, printable."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from . import tiles
from .errors import UnsupportedProblem
from .problem import MAX_HEAD_DIM, AttentionProblem, KernelConfig, Tile


@lru_cache(maxsize=4096)
def select(problem: AttentionProblem, arch: str) -> KernelConfig:
    """The kernel that serves ``problem`` on ``arch`` ("75" … "120", or "host").

    Raises :class:`UnsupportedProblem` where there is none.
    """
    check_supported(problem, arch)
    tile = tiles.choose(problem, arch)
    if tile is None:
        raise UnsupportedProblem(
            f"head_dim {problem.head_dim} in {problem.dtype} needs more shared memory than the "
            f"{tiles.SHARED_LIMITS[arch] >> 10} KB that a thread block has on compute capability "
            f"{int(arch) // 10}.{int(arch) % 10}. Load the model in float16 (dtype=torch.float16), or use "
            'attn_implementation="sdpa".'
        )
    return forward_config(problem, arch, tile)


def forward_config(problem: AttentionProblem, arch: str, tile: Tile) -> KernelConfig:
    """The FlashAttention-2 forward kernel for ``problem`` with the given tile numbers."""
    head_dim, head_dim_v = tiles.rounded_head_dims(problem.head_dim, problem.head_dim_v)
    shared = tiles.shared_bytes(tile, problem, arch)
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_s{tile.stages}"
    numbers += f"_c{tile.v_chunks}" if tile.v_chunks > 1 else ""
    constants = (
        ("int kVChunks", str(tile.v_chunks)),
        ("int kNumWarps", str(tile.num_warps)),
        ("int kStages", str(tile.stages)),
    )
    name = kernel_name("fa2_forward", problem, numbers, arch)
    sizes = (head_dim, head_dim_v // tile.v_chunks)
    return kernel_config("fa2_forward", name, "fa2/forward.cuh", problem, arch, tile, sizes, constants, shared)


def check_supported(problem: AttentionProblem, arch: str) -> None:
    """Raises :class:`UnsupportedProblem` for what no kernel of either algorithm and direction serves on ``arch``."""
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        raise UnsupportedProblem(
            f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v}: at most {MAX_HEAD_DIM} is supported. "
            'Use attn_implementation="sdpa" for this model.'
        )
    if problem.dtype == "bf16" and arch == "75":
        raise UnsupportedProblem(
            "bfloat16 needs a GPU of compute capability 8.0 or newer; this one is 7.5. "
            "Load the model in float16 (dtype=torch.float16), which runs on its tensor cores."
        )


def kernel_config(
    kernel: str,
    name: str,
    include: str,
    problem: AttentionProblem,
    arch: str,
    tile: Tile,
    head_dims: tuple[int, int],
    constants: tuple[tuple[str, str], ...],
    shared: int,
) -> KernelConfig:
    """A kernel of either algorithm and direction: what all have in common, and its own ``constants``."""
    return KernelConfig(
        kernel=kernel,
        name=name,
        include=include,
        params="AttentionParams",
        arch=arch,
        constants=(
            ("int kBlockM", str(tile.block_m)),
            ("int kBlockN", str(tile.block_n)),
            ("int kHeadDim", str(head_dims[0])),
            ("int kHeadDimV", str(head_dims[1])),
            *constants,
            *feature_constants(problem),
            ("int kSharedBytes", str(shared)),
        ),
        num_threads=tile.num_warps * 32,
        min_blocks=tile.min_blocks,
        shared_bytes=shared,
        tile=tile,
    )


def feature_constants(problem: AttentionProblem) -> tuple[tuple[str, str], ...]:
    """What every kernel's ``Config`` says of the problem: element types, and which features are on."""
    element = _ELEMENTS[problem.dtype]
    return (
        ("using Element", element),
        ("using Multiply", "tf32" if problem.tf32 else element),
        ("using Bias", "float" if problem.bias == "fp32" else element),
        *((f"bool k{name}", "true" if value else "false") for name, value in _features(problem).items()),
    )


def kernel_name(
    kernel: str, problem: AttentionProblem, numbers: str, arch: str, head_dims: tuple[int, int] | None = None
) -> str:
    """Unique and readable: kernel, product, head sizes (padded), tile numbers, features, architecture."""
    head_dim, head_dim_v = head_dims or tiles.rounded_head_dims(problem.head_dim, problem.head_dim_v)
    sizes = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}_dv{head_dim_v}"
    features = _features(problem)
    names = {name: name.lower() for name in features}
    names["Bias"] = "bias" if problem.bias == "element" or problem.dtype == "fp32" else "biasfp32"
    on = [names[name] for name, value in features.items() if value and name != "PositiveScale"]
    on += [] if features["PositiveScale"] else ["anyscale"]
    product = "tf32" if problem.tf32 else problem.dtype
    return "_".join([kernel, product, sizes, numbers, *on, "host" if arch == "host" else f"sm{arch}"])


_ELEMENTS = {"fp16": "fp16", "bf16": "bf16", "fp32": "float"}


def _features(problem: AttentionProblem) -> dict[str, bool]:
    shifted = problem.alibi or problem.bias != "none"  # such scores carry their scale with them, of whatever sign
    return {
        "Vector": problem.vector,
        "Intervals": problem.intervals,
        "Mask": problem.mask,
        "Softcap": problem.softcap,
        "PositiveScale": problem.positive_scale or shifted,
        "Varlen": problem.varlen,
        "Alibi": problem.alibi,
        "Bias": problem.bias != "none",
        "Dropout": problem.dropout,
    }


def reachable_configs(arch: str) -> Iterator[KernelConfig]:
    """Every configuration that a call on ``arch`` can select, each once."""
    seen: set[str] = set()
    for problem in tiles.reachable_problems(arch):
        if tiles.choose(problem, arch) is None:
            continue  # refused
        config = select(problem, arch)
        if config.name not in seen:
            seen.add(config.name)
            yield config
