"""Decoding: one query row an entry against a long cache, as a cache of Transformers lies.

Calls run from CUDA graphs, so that the CPU's time does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_flash_cupy.bench import peers
from hf_flash_cupy.bench.measure import disagreement, release, why
from hf_flash_cupy.bench.race import Run, Stopped, race, whole_rounds
from hf_flash_cupy.bench.shapes import Shape

IMPLEMENTATIONS = ("cupy_fa2", "cudnn", "flash", "flash_attn", "fa3")
_HEADS, _HEADS_K, _HEAD_DIM = 32, 8, 128  # Llama-3-8B's
ROWS = ((1, 4096), (1, 65536), (16, 4096), (64, 8192))  # batch and keys
SMOKE = ((2, 640),)
_CACHES_BYTES = 320 << 20  # caches that take turns, so that none is still in the L2 cache when it is read again
_CLEAR_BYTES = 256 << 20
_CALLS = 16  # of a graph, at least, where a call takes microseconds
_AGREEMENT = 0.05  # largest difference from torch's result, of the largest |out|


@dataclass
class DecodeRow:
    """What one size gave, by implementation. Who is in ``failed`` is nowhere else."""

    batch: int
    seqlen_k: int
    heads: int = _HEADS
    heads_k: int = _HEADS_K
    head_dim: int = _HEAD_DIM
    microseconds: dict[str, float] = field(default_factory=dict)  # of a call, one after the other; median of the rounds
    cleared: dict[str, float] = field(default_factory=dict)  # of a call alone, after the L2 cache was overwritten
    failed: dict[str, str] = field(default_factory=dict)  # the reason

    @property
    def label(self) -> str:
        return f"B{self.batch} KV{self.seqlen_k} H{self.heads}/{self.heads_k} D{self.head_dim} bfloat16"

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return 4 * self.batch * self.seqlen_k * self.heads_k * self.head_dim


def measure(row: DecodeRow, names: Sequence[str], rounds: int, round_ms: float, device: str) -> None:
    """Fills the row; whoever fails is named with the reason, the rest race on."""
    shape = Shape(row.batch, 1, row.heads, row.heads_k, row.head_dim, causal=False)
    q = torch.randn(row.batch, 1, row.heads, row.head_dim, device=device, dtype=torch.bfloat16)
    caches = [_cache(row, device) for _ in range(max(2, min(_CALLS, _CACHES_BYTES // row.cache_bytes)))]
    expected = peers.torch_attention(shape, q, *caches[0])
    runs: dict[str, Run] = {}
    alone: dict[str, Run] = {}
    calls = 1 if device == "cpu" else max(len(caches), _CALLS if row.cache_bytes < _CACHES_BYTES else 2)
    for name in names:
        try:
            attend = peers.make(name, shape, "forward", device)
            difference = disagreement(expected, attend(q, *caches[0]))
            if not difference <= _AGREEMENT:
                raise ValueError(f"differs from torch by {difference:.2g} of the largest output")
            runs[name] = _captured(attend, q, [caches[i % len(caches)] for i in range(calls)], device)
            alone[name] = _captured(attend, q, caches[:1], device)
        except Exception as error:  # whatever a peer raises is its finding
            row.failed[name] = why(error)
            runs.pop(name, None)
    while runs:
        try:
            found = race(runs, rounds, round_ms, device)
        except Stopped as stopped:
            row.failed[stopped.name] = why(stopped.error)
            del runs[stopped.name]
            continue
        row.microseconds = {name: 1e3 * time / calls for name, time in found.items()}
        break
    if device != "cpu":
        row.cleared = _after_clearing({name: alone[name] for name in runs}, rounds)
    del runs, alone, caches
    release()


def _cache(row: DecodeRow, device: str) -> tuple[Tensor, Tensor]:
    """k and v, (batch, seqlen_k, heads_k, head_dim), heads outside in memory."""
    shape = (row.batch, row.heads_k, row.seqlen_k, row.head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    return k, v


def _captured(attend: peers.Attend, q: Tensor, caches: list[tuple[Tensor, Tensor]], device: str) -> Run:
    """All calls as one, that the GPU repeats by itself."""

    def run() -> None:
        for k, v in caches:
            attend(q, k, v)

    if device == "cpu":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _after_clearing(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median microseconds of each alone, every one in turn."""
    waste = torch.empty(_CLEAR_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(4 * whole_rounds(rounds, max(len(runs), 1))):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            waste.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(float(start.elapsed_time(end)) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def table(rows: Sequence[DecodeRow]) -> tuple[list[str], Iterator[list[str]]]:
    """Head and rows: microseconds of a call one after the other, in brackets alone after the L2 cache was cleared."""
    names = [name for name in IMPLEMENTATIONS if any(name in row.microseconds for row in rows)]

    def ratio(row: DecodeRow) -> str:
        others = [time for name, time in row.microseconds.items() if name != "cupy_fa2"]
        return f"{row.microseconds['cupy_fa2'] / min(others):.3f}" if others and "cupy_fa2" in row.microseconds else "–"

    head = ["size", *map(peers.label, names), "time of cupy_fa2 / best peer"]
    return head, ([row.label, *(_shown(row, name) for name in names), ratio(row)] for row in rows)


def _shown(row: DecodeRow, name: str) -> str:
    if name not in row.microseconds:
        return "–"
    cleared = f" ({row.cleared[name]:.1f})" if name in row.cleared else ""
    return f"{row.microseconds[name]:.1f}{cleared}"
