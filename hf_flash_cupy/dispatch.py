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
    return forward_config(problem, arch, tiles.choose(problem, arch))


def forward_config(problem: AttentionProblem, arch: str, tile: Tile) -> KernelConfig:
    """The FlashAttention-2 forward kernel for ``problem`` with the given tile numbers."""
    head_dim, head_dim_v = tiles.rounded_head_dims(problem.head_dim, problem.head_dim_v)
    element = {"fp16": "fp16", "bf16": "bf16", "fp32": "float"}[problem.dtype]
    shared = tiles.shared_bytes(tile, problem, arch)
    features = {
        "Vector": problem.vector,
        "Intervals": problem.intervals,
        "Mask": problem.mask,
        "Softcap": problem.softcap,
        "PositiveScale": problem.positive_scale,
        "Varlen": problem.varlen,
    }
    on = [name.lower() for name, value in features.items() if value and name != "PositiveScale"]
    on += [] if problem.positive_scale else ["anyscale"]
    product = "tf32" if problem.tf32 else problem.dtype
    sizes = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}_dv{head_dim_v}"
    numbers = f"m{tile.block_m}_n{tile.block_n}_w{tile.num_warps}_s{tile.stages}"
    return KernelConfig(
        kernel="fa2_forward",
        name="_".join(["fa2_forward", product, sizes, numbers, *on, "host" if arch == "host" else f"sm{arch}"]),
        include="fa2/forward.cuh",
        params="ForwardParams",
        arch=arch,
        constants=(
            ("using Element", element),
            ("using Multiply", "tf32" if problem.tf32 else element),
            ("int kBlockM", str(tile.block_m)),
            ("int kBlockN", str(tile.block_n)),
            ("int kHeadDim", str(head_dim)),
            ("int kHeadDimV", str(head_dim_v)),
            ("int kNumWarps", str(tile.num_warps)),
            ("int kStages", str(tile.stages)),
            *((f"bool k{name}", "true" if value else "false") for name, value in features.items()),
            ("int kSharedBytes", str(shared)),
        ),
        num_threads=tile.num_warps * 32,
        min_blocks=tile.min_blocks,
        shared_bytes=shared,
        tile=tile,
    )


def reachable_configs(arch: str) -> Iterator[KernelConfig]:
    """Every configuration that a call on ``arch`` can select, each once."""
    seen: set[str] = set()
    for problem in tiles.reachable_problems(arch):
        config = select(problem, arch)
        if config.name not in seen:
            seen.add(config.name)
            yield config
