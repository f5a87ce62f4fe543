"""Why this kernel: a text about the launch that a call would make."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from . import decode, dispatch, fa1, functional, sm90
from .call import Call, Options, describe, extras, uses_tf32
from .errors import MissingDependency
from .jit import host_compiler
from .launch import device_arch
from .plans import Geometry
from .problem import AttentionProblem, KernelConfig


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
    arch = device_arch(q.device)
    if decode.serves(problem, geometry, arch):
        return "\n".join(_decode_lines(problem, geometry, arch, decode.multiprocessors(q.device)))
    lines = list(_lines(problem, geometry, arch))
    if problem.algorithm == "fa2" and sm90.serves(q.device):
        if (config := sm90.select_on(q.device, problem, geometry)) is not None:
            lines = list(_hopper_lines(problem, geometry, config))
        else:
            lines.append(f"not sm_90a     {sm90.refusal(problem, geometry)}")
    return "\n".join(lines)


def _lines(problem: AttentionProblem, geometry: Geometry, arch: str) -> Iterator[str]:
    whole_head = problem.algorithm == "fa1"  # a thread block walks a head; with "fa2" the rows of one block
    config = fa1.forward_config(problem, arch) if whole_head else dispatch.select(problem, arch)
    tile = config.tile
    assert tile is not None
    blocks = 1 if whole_head else -(-geometry.seqlen_q // tile.block_m)
    groups = int(dict(config.constants).get("int kGroups", "1"))  # of warps, each with row blocks of its own
    warps = tile.num_warps // groups
    share = f"{tile.block_n // warps} keys" if whole_head else f"{tile.block_m // warps} rows"
    split = f"{groups} groups of {warps} warps" if groups > 1 else f"{warps} warps"
    rows = geometry.batch * geometry.num_heads * geometry.seqlen_q
    yield from _kernel_lines(problem, arch, config)
    yield f"tile           {tile.block_m} rows × {tile.block_n} keys, {split} of {share}, {tile.stages} stage(s)"
    grid = f"{geometry.num_heads} heads × {geometry.batch}"
    if not whole_head:
        grid = f"{blocks} row blocks × {grid}"
    total = blocks * geometry.num_heads * geometry.batch
    yield f"grid           {grid} = {total} thread blocks of {config.num_threads} threads"
    yield f"shared memory  {config.shared_bytes} bytes a thread block"
    yield f"device memory  at least {_traffic(problem, geometry)} bytes: q, k, v read once, out written once"
    if whole_head:
        visit = 8 * rows * (geometry.head_dim_v + 2)
        yield f"               and {visit} bytes for each block of keys: O, l, m read and written"
    yield f"why            the preferred tile for {problem.dtype} at this head size that fits sm_{arch}"


def _hopper_lines(problem: AttentionProblem, geometry: Geometry, config: KernelConfig) -> Iterator[str]:
    """The same for the kernel of compute capability 9.0."""
    tile = config.tile
    assert tile is not None
    of_head, total = sm90.num_tiles(problem, geometry, tile)
    rows = sm90.UNIT_ROWS
    yield from _kernel_lines(problem, config.arch, config)
    yield (
        f"tile           {tile.block_m} rows × {tile.block_n} keys, {tile.block_m // rows} warpgroups of {rows} rows "
        f"and one that loads, {tile.stages} stages"
    )
    heads = f"{geometry.num_heads} heads"
    if sm90.packs_heads(problem, geometry):
        heads = f"{geometry.num_heads_k} groups of {geometry.num_heads // geometry.num_heads_k} heads"
    yield f"tiles          {of_head} × {heads} × {geometry.batch} = {total}, dealt while they run"
    yield f"grid           one thread block of {config.num_threads} threads a multiprocessor, at most one a tile"
    yield f"shared memory  {config.shared_bytes} bytes a thread block"
    yield f"device memory  at least {_traffic(problem, geometry)} bytes: q, k, v read once, out written once"
    yield "why            compute capability 9.0, and nothing asked for that only the mma.sync kernel does"


def _traffic(problem: AttentionProblem, geometry: Geometry, seqlen_k: int | None = None) -> int:
    """Bytes of q, k, v and out; of k and v ``seqlen_k`` rows a head, None = all."""
    rows = geometry.batch * geometry.num_heads * geometry.seqlen_q
    keys = geometry.batch * geometry.num_heads_k * (geometry.seqlen_k if seqlen_k is None else seqlen_k)
    return (rows + keys) * (geometry.head_dim + geometry.head_dim_v) * (4 if problem.dtype == "fp32" else 2)


def _decode_lines(problem: AttentionProblem, geometry: Geometry, arch: str, multiprocessors: int) -> Iterator[str]:
    """The same for few rows against many keys."""
    config, splits = decode.chosen(problem, geometry, arch, multiprocessors, None)
    tile = config.tile
    assert tile is not None
    yield from _kernel_lines(problem, arch, config)
    yield (
        f"tile           {tile.block_m} rows (query rows × heads of a group) × {tile.block_n} keys, {tile.num_warps} "
        f"warps of {tile.block_n // tile.num_warps} keys, {tile.stages} stages"
    )
    yield (
        f"grid           {splits.row_blocks} row blocks × {geometry.num_heads_k} heads of keys × {geometry.batch} × "
        f"{splits.num_splits} splits = {splits.thread_blocks} thread blocks of {config.num_threads} threads"
    )
    yield f"shared memory  {config.shared_bytes} bytes a thread block"
    reachable = decode.reachable_keys(geometry.seqlen_q, geometry.seqlen_k, geometry.window)
    traffic = _traffic(problem, geometry, reachable)
    yield f"device memory  at least {traffic} bytes: k and v read once for all heads of a group"
    if splits.num_splits > 1:
        parts = splits.thread_blocks * decode.part_floats(config, geometry)
        yield f"               and {8 * parts} bytes of the splits' parts, written, and read by a tile's last block"
    yield (
        f"why            {decode.packed_rows(geometry)} packed rows, {geometry.seqlen_k} keys: the keys are split over "
        f"{multiprocessors} multiprocessors of {tile.min_blocks} thread block(s) each"
    )


def _kernel_lines(problem: AttentionProblem, arch: str, *configs: KernelConfig) -> Iterator[str]:
    """The kernels in the order they run, and the problem they serve."""
    for label, config in zip(("kernel", *[""] * len(configs)), configs, strict=False):
        yield f"{label:15}{config.name}"
    if arch == "host" and (missing := _missing_compiler()):
        yield f"               not runnable here, plain PyTorch operations serve the call: {missing}"
    yield f"problem        {problem}"


def _missing_compiler() -> str:
    """Why the host's kernels cannot be built, and what mends it; "" where they can."""
    try:
        host_compiler.find_compiler()
    except MissingDependency as error:
        return str(error)
    return ""
