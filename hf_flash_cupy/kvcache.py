"""Attention with a key-value cache: new keys and values are appended in place, then the rows attend to what is there.

Lengths, pages and entries stay on the device: nothing here waits for the GPU, and the calls can be captured in a CUDA
graph that is replayed while the lengths grow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import checks, decode, execute
from .call import Call, geometry_of, is_vector, plan_key, problem_of
from .errors import UnsupportedProblem
from .launch import device_arch
from .plans import Geometry, attention_params
from .problem import MAX_HEAD_DIM, KernelConfig

PAGE_UNIT = 16  # kPageUnit of cuda_src/fa2/cache.cuh: page sizes are its multiples

_LENGTHS = ("cache_seqlens", "cache_batch_idx", "cache_leftpad")


class Prepared(NamedTuple):
    """All that the calls of one key share."""

    plan: decode.DecodePlan | None  # None: nothing to append, and no rows or no keys
    attends: bool  # whether the plan writes out and lse


def forward(call: Call, num_splits: int | None, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out`` and ``lse``; k and v of the call are the caches, its extras those of :func:`check` that are given."""
    q, k, v, extras, _ = call
    if q.is_cuda and torch._C._cuda_getDevice() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(call, num_splits, need_lse)
    news = [extras[name] for name in ("k_new", "v_new") if name in extras]
    key = ("kvcache", plan_key(call), num_splits, need_lse, any(x.data_ptr() % 16 for x in news))
    plan, attends = execute.prepared_for(key, _prepare, call, num_splits)
    batch, rows, heads, _ = q.shape
    out = torch.empty((batch, rows, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device) if need_lse else None
    if not attends:
        execute.fill_without_keys(out, lse, extras.get("sinks"))
    if plan is not None:
        plan(q=q, k=k, v=v, out=out, **(extras if lse is None else extras | {"lse": lse}))
    for x in (k, v) if news else ():
        if not x.is_inference():
            increment_version(x)  # a graph that saved the cache must not be differentiated with its new content
    return out, lse


def _prepare(call: Call, num_splits: int | None) -> Prepared:
    """Checks the call and builds its kernels: appending, attention, and the combination of splits."""
    q, k, v, extras, options = call
    check(q, k, v, extras, num_splits)
    geometry = _geometry(call)
    problem = problem_of(q, k, v, extras, options, geometry.softmax_scale)
    news = [extras[name] for name in ("k_new", "v_new") if name in extras]
    problem = replace(problem, vector=problem.vector and is_vector(*news), paged="block_table" in extras)
    params = attention_params(geometry, problem)
    kernels: list[tuple[KernelConfig, int]] = []
    if news:
        config = decode.append_config(problem, device_arch(q.device))
        keys = geometry.batch * news[0].shape[1] * geometry.num_heads_k
        kernels.append((config, -(-keys * 32 // config.num_threads)))  # a warp each
    attends = geometry.batch * geometry.seqlen_q * geometry.num_heads * geometry.seqlen_k > 0
    memory = (0, 0)
    if attends:
        kernel, memory = decode.decode_kernel(problem, geometry, params, q.device, num_splits)
        kernels.append(kernel)
    _fill(params, k, extras)
    kernels = [(config, blocks) for config, blocks in kernels if blocks]
    return Prepared(decode.DecodePlan(kernels, params, q.device, memory) if kernels else None, attends)


def _geometry(call: Call) -> Geometry:
    q, k, v, extras, options = call
    batch, table = q.shape[0], extras.get("block_table")
    seqlen_k = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    strides = ((q.stride(0), q.stride(1), q.stride(2)), _cache_strides(k, extras), _cache_strides(v, extras))
    return geometry_of(q, v, seqlen_k, strides, extras, options, batch, batch)


def _cache_strides(x: Tensor, extras: dict[str, Tensor]) -> tuple[int, int, int]:
    """(entry or page, row, head); a cache of one entry serves all rows of the batch."""
    shared = x.shape[0] == 1 and "block_table" not in extras
    return (0 if shared else x.stride(0), x.stride(1), x.stride(2))


def _fill(params: np.ndarray[Any, Any], k: Tensor, extras: dict[str, Tensor]) -> None:
    """The numbers of the struct that only calls with a cache have."""
    params["cache_batch"] = k.shape[0]
    if "block_table" in extras:
        params["page_size"] = k.shape[1]
        params["block_table_stride"] = extras["block_table"].stride(0)
    if "k_new" in extras:
        params["seqlen_new"] = extras["k_new"].shape[1]
    for name in ("k_new", "v_new"):
        if name in extras:
            for field, stride in zip(("batch", "row", "head"), extras[name].stride()[:3], strict=True):
                params[name][f"{field}_stride"] = stride


def check_tensors(given: dict[str, Any]) -> None:
    """Of q, k_cache, v_cache and, if appended, k and v: kinds, dimensions, dtypes, no gradient."""
    checks.are_tensors(given)
    for name, x in given.items():
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, seqlen, heads, head_dim) is needed.")
    refuse_gradients(given)
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    checks.device(q)
    checks.dtypes(*(given.get(name, q) for name in ("q", "k", "v")))
    checks.dtypes(q, k_cache, v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}: they must be equal.")
    for name in ("k_cache", "v_cache"):
        if given[name].stride(-1) != 1:
            raise ValueError(f"{name}: its last dimension must be contiguous, for it is read and written in place.")
        if not torch.compiler.is_compiling() and given[name].is_neg():
            raise ValueError(f"{name} is the negative of its memory (torch's lazy minus): call .resolve_neg() once.")
    if "k" in given and k_cache is v_cache:
        raise ValueError("k_cache and v_cache are one tensor: what is appended to one would overwrite the other.")


def refuse_gradients(given: dict[str, Any]) -> None:
    """By name, whatever wants one."""
    for name, x in given.items():
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedProblem(
                f"{name} requires a gradient: attention with a key-value cache has none. Call it under "
                "torch.no_grad(), or flash_attention on keys and values that are not written in place."
            )


def same_length(length: int, q: Tensor, k_cache: Tensor, k: Tensor | None, block_table: Tensor | None) -> Tensor:
    """``cache_seqlens`` of entries that all have ``length`` keys, once it is clear that what is appended fits."""
    if block_table is not None and block_table.dim() != 2:
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; ({q.shape[0]}, pages) is needed.")
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    new = 0 if k is None else k.shape[1]
    if not 0 <= length <= capacity - new:
        raise ValueError(f"cache_seqlens={length}: the cache holds {capacity} keys, and {new} are to be appended.")
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor, extras: dict[str, Tensor], num_splits: int | None) -> None:
    """Shapes, dtypes, devices. ``extras``: k_new, v_new, block_table, cache_seqlens, cache_batch_idx, cache_leftpad."""
    if num_splits is not None and (not isinstance(num_splits, int) or not 1 <= num_splits <= decode.MAX_SPLITS):
        raise ValueError(f"num_splits={num_splits!r}: None (chosen for you) or 1 to {decode.MAX_SPLITS} is needed.")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), *extras.items()):
        if x.device != q.device:
            raise ValueError(f"{_argument(name)} is on {x.device}, q on {q.device}: move them to one device.")
    _check_sizes(q, k_cache, v_cache, "block_table" in extras, "cache_batch_idx" in extras, "k_new" in extras)
    batch = q.shape[0]
    for name in _LENGTHS:
        if name in extras:
            _int32(name, extras[name], (batch,), f"({batch},)")
    if "block_table" in extras:
        table = extras["block_table"]
        columns = table.shape[1] if table.dim() == 2 else 0
        _int32("block_table", table, (batch, columns), f"({batch}, pages)")
        if k_cache.shape[1] % PAGE_UNIT or k_cache.shape[1] == 0:
            raise UnsupportedProblem(
                f"k_cache has pages of {k_cache.shape[1]} keys: multiples of {PAGE_UNIT} are supported."
            )
        for name in ("cache_batch_idx", "cache_leftpad"):
            if name in extras:
                raise UnsupportedProblem(
                    f"{name} with block_table is not supported: choose rows of block_table instead."
                )
    if "k_new" in extras:
        _check_new(k_cache, v_cache, extras["k_new"], extras["v_new"], batch)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, paged: bool, chosen: bool, appends: bool) -> None:
    for name, x in (("q", q), ("k_cache", k), ("v_cache", v)):
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise UnsupportedProblem(f"{name} has head_dim {x.shape[3]}; 1 to {MAX_HEAD_DIM} are supported.")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k_cache {tuple(k.shape)}, v_cache {tuple(v.shape)}: the caches must agree "
            "in all but head_dim, q and k_cache in head_dim."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k_cache {k.shape[2]}: the first must be a multiple of the second.")
    if not (paged or chosen or k.shape[0] == q.shape[0] or (k.shape[0] == 1 and not appends)):
        raise ValueError(
            f"q has batch size {q.shape[0]}, k_cache {k.shape[0]}: they must be equal"
            + (" where keys are appended." if k.shape[0] == 1 else " (1 broadcasts).")
        )
    if (paged or chosen) and k.shape[0] == 0:
        raise ValueError("k_cache has no entries: at least one is needed.")


def _check_new(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: int) -> None:
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (batch, k.shape[1], cache.shape[2], cache.shape[3])
        if x.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; (batch, seqlen_new, heads, head_dim) {expected} is needed."
            )
        if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(
                f"{name}_cache is expanded: entries of it share memory, and appended keys would overwrite each other. "
                "Give each its own, for instance by .contiguous()."
            )


def _int32(name: str, x: Tensor, shape: tuple[int, ...], text: str) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; int32 is needed.")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {text} is needed.")


def _argument(name: str) -> str:
    return name.removesuffix("_new")
