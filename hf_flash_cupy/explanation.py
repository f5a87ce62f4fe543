"""Why this kernel: a text about the launch that a call would make."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from . import checks, dispatch, functional
from .launch import device_arch


def explanation(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Kernel, tile, grid, shared memory and device-memory traffic of ``flash_attention(q, k, v, **options)``."""
    call = inspect.signature(functional.flash_attention).bind(q, k, v, **options)  # refuses unknown names
    call.apply_defaults()
    given = call.arguments
    checks.refuse_options(*(given[name] for name in ("alibi_slopes", "sinks", "bias", "dropout_p", "algorithm")))
    names = ("causal", "window_size", "softmax_scale", "softcap", "mask", "key_intervals")
    q, k, v = functional.prepare(q, k, v, 4)
    problem, geometry = functional.describe(q, k, v, *(given[name] for name in names), tf32=functional.uses_tf32(q))
    arch = device_arch(q.device)
    config = dispatch.select(problem, arch)
    tile = config.tile
    assert tile is not None
    blocks = -(-geometry.seqlen_q // tile.block_m)
    size = q.element_size()
    rows = geometry.batch * geometry.num_heads * geometry.seqlen_q
    keys = geometry.batch * geometry.num_heads_k * geometry.seqlen_k
    traffic = (rows + keys) * (geometry.head_dim + geometry.head_dim_v) * size
    return "\n".join(
        (
            f"kernel         {config.name}",
            f"problem        {problem}",
            f"tile           {tile.block_m} rows × {tile.block_n} keys, {tile.num_warps} warps of "
            f"{tile.block_m // tile.num_warps} rows, {tile.stages} stage(s)",
            f"grid           {blocks} row blocks × {geometry.num_heads} heads × {geometry.batch} = "
            f"{blocks * geometry.num_heads * geometry.batch} thread blocks of {config.num_threads} threads",
            f"shared memory  {config.shared_bytes} bytes a thread block",
            f"device memory  at least {traffic} bytes: q, k, v read once, out written once",
            f"why            the preferred tile for {problem.dtype} at this head size that fits sm_{arch}",
        )
    )
