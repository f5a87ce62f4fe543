"""Why this kernel: a text about the launch that a call would make."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from . import dispatch, fa1, functional
from .call import Call, Options, describe, extras, uses_tf32
from .errors import MissingDependency
from .jit import host_compiler
from .launch import device_arch
from .plans import Geometry
from .problem import AttentionProblem


def explanation(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Kernel, tile, grid, shared memory and device-memory traffic of ``flash_attention(q, k, v, **options)``."""
    call = inspect.signature(functional.flash_attention).bind(q, k, v, **options)  # refuses unknown names
    call.apply_defaults()
    given = call.arguments
    q, k, v = functional.prepare(q, k, v, 4)
    names = ("causal", "window_size", "softmax_scale", "softcap", "dropout_p", "algorithm")
    asked = Options(**{name: given[name] for name in names}, tf32=uses_tf32(q))
    beside = extras(q, **{name: given[name] for name in ("mask", "key_intervals", "bias", "alibi_slopes", "sinks")})
    problem, geometry = describe(Call(q, k, v, beside, asked))
    return "\n".join(_lines(problem, geometry, device_arch(q.device)))


def _lines(problem: AttentionProblem, geometry: Geometry, arch: str) -> Iterator[str]:
    whole_head = problem.algorithm == "fa1"  # a thread block walks a head; with "fa2" the rows of one block
    config = fa1.forward_config(problem, arch) if whole_head else dispatch.select(problem, arch)
    tile = config.tile
    assert tile is not None
    blocks = 1 if whole_head else -(-geometry.seqlen_q // tile.block_m)
    share = f"{tile.block_n // tile.num_warps} keys" if whole_head else f"{tile.block_m // tile.num_warps} rows"
    rows = geometry.batch * geometry.num_heads * geometry.seqlen_q
    keys = geometry.batch * geometry.num_heads_k * geometry.seqlen_k
    traffic = (rows + keys) * (geometry.head_dim + geometry.head_dim_v) * (4 if problem.dtype == "fp32" else 2)
    yield f"kernel         {config.name}"
    if arch == "host" and (missing := _missing_compiler()):
        yield f"               not runnable here, plain PyTorch operations serve the call: {missing}"
    yield f"problem        {problem}"
    yield (
        f"tile           {tile.block_m} rows × {tile.block_n} keys, {tile.num_warps} warps of {share}, "
        f"{tile.stages} stage(s)"
    )
    grid = f"{geometry.num_heads} heads × {geometry.batch}"
    if not whole_head:
        grid = f"{blocks} row blocks × {grid}"
    total = blocks * geometry.num_heads * geometry.batch
    yield f"grid           {grid} = {total} thread blocks of {config.num_threads} threads"
    yield f"shared memory  {config.shared_bytes} bytes a thread block"
    yield f"device memory  at least {traffic} bytes: q, k, v read once, out written once"
    if whole_head:
        visit = 8 * rows * (geometry.head_dim_v + 2)
        yield f"               and {visit} bytes for each block of keys: O, l, m read and written"
    yield f"why            the preferred tile for {problem.dtype} at this head size that fits sm_{arch}"


def _missing_compiler() -> str:
    """Why the host's kernels cannot be built, and what mends it; "" where they can."""
    try:
        host_compiler.find_compiler()
    except MissingDependency as error:
        return str(error)
    return ""
