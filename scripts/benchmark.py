"""Our kernels against their peers: every peer of a row in one process, in rotating order, medians.

    python scripts/benchmark.py --out benchmarks/NAME.json
    python scripts/benchmark.py --dims 64,128 --lengths 1024,4096,16384 --peers flash,cudnn

The card works at its power limit, so figures of different runs do not compare; ratios within a row do.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_flash_cupy import flash_attention

Run = Callable[[], object]
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HIDDEN = 2048  # heads = HIDDEN / head_dim
TOKENS = 16384  # of a batch


@dataclass(frozen=True)
class Shape:
    """One row: q (batch, seqlen, heads, head_dim), k and v with heads_k heads."""

    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def flops(self) -> float:
        """Useful work of the forward: two products, half of it under a causal mask."""
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim * (0.5 if self.causal else 1.0)


@dataclass
class Row:
    """Milliseconds of each implementation (median), and the ratio of our time to each peer's."""

    shape: Shape
    milliseconds: dict[str, float]
    tflops: dict[str, float]
    ratio: dict[str, float] = field(default_factory=dict)
    extra_bytes: int = 0  # peak memory of one of our calls beyond inputs and out


def implementations(shape: Shape, peers: list[str]) -> dict[str, Run]:
    dtype = getattr(torch, shape.dtype)
    q, k, v = (
        torch.randn(shape.batch, shape.seqlen, heads, shape.head_dim, device="cuda", dtype=dtype)
        for heads in (shape.heads, shape.heads_k, shape.heads_k)
    )
    runs: dict[str, Run] = {"cupy_fa2": lambda: flash_attention(q, k, v, causal=shape.causal)}
    views = [x.transpose(1, 2) for x in (q, k, v)]

    def peer(backend: SDPBackend) -> Run:
        def run() -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    *views, is_causal=shape.causal, enable_gqa=shape.heads != shape.heads_k
                )

        return run

    runs |= {name: peer(PEERS[name]) for name in peers}
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    runs["cublas"] = lambda: matrix @ matrix
    return runs


def milliseconds(run: Run, calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def race(runs: dict[str, Run], rounds: int, round_ms: float) -> dict[str, float]:
    """Median milliseconds of each, interleaved: position and temperature favour nobody."""
    names = list(runs)
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = max(2, int(round_ms / milliseconds(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in names}
    orders = balanced_orders(len(names))
    for index in range(-(-rounds // len(orders)) * len(orders)):
        for position in orders[index % len(orders)]:
            name = names[position]
            times[name].append(milliseconds(runs[name], calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def balanced_orders(count: int) -> list[list[int]]:
    """Orders in which each runs after each other one equally often (Williams 1949): what ran before sets the clock."""
    zigzag = [0]
    for step in range(1, count):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % count)
    orders = [[(position + shift) % count for position in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def extra_bytes(run: Run) -> int:
    """Peak device memory of one call beyond what was there before and the output that it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    assert isinstance(out, torch.Tensor)
    torch.cuda.synchronize()
    rounded = -(-out.numel() * out.element_size() // 512) * 512  # torch hands out memory in steps of 512 bytes
    return torch.cuda.max_memory_allocated() - before - rounded


def measure(shape: Shape, peers: list[str], rounds: int, round_ms: float) -> Row:
    runs = implementations(shape, peers)
    times = race(runs, rounds, round_ms)
    work = {name: 2 * 8192**3 if name == "cublas" else shape.flops for name in times}
    return Row(
        shape=shape,
        milliseconds=times,
        tflops={name: work[name] / times[name] / 1e9 for name in times},
        ratio={name: times["cupy_fa2"] / times[name] for name in peers},
        extra_bytes=extra_bytes(runs["cupy_fa2"]),
    )


def cpu_microseconds(run: Run, calls: int = 2000) -> float:
    """CPU time to enqueue one call, the device kept idle enough that its queue never fills."""
    for _ in range(50):
        run()
    samples = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 20):
            run()
        samples.append((time.perf_counter() - start) / (calls // 20) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def call_costs() -> dict[str, float]:
    """CPU time of one call for a tiny problem, ours and torch's."""
    q, k, v = (torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    views = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return {
            "cupy_fa2": cpu_microseconds(lambda: flash_attention(q, k, v)),
            "sdpa": cpu_microseconds(lambda: scaled_dot_product_attention(*views)),
            "elementwise": cpu_microseconds(lambda: q + q),
        }


def environment() -> dict[str, object]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    card, driver, power = (
        subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
    )
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    for name in ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "card": card,
        "driver": driver,
        "power_limit": power,
        "versions": versions,
    }


def main(
    dims: Annotated[str, typer.Option(help="head sizes")] = "64,128",
    lengths: Annotated[str, typer.Option(help="sequence lengths")] = "1024,4096,16384",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "both",
    peers: Annotated[str, typer.Option(help=f"of {', '.join(PEERS)}")] = "flash,cudnn",
    kv_heads: Annotated[int, typer.Option(help="heads of k and v, 0 = those of q")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    round_ms: Annotated[float, typer.Option(min=1.0, help="milliseconds of one implementation in one round")] = 40.0,
    out: Annotated[Path | None, typer.Option(help="JSON record")] = None,
) -> None:
    """Measures the forward pass against torch's own kernels."""
    names = [name for name in peers.split(",") if name]
    if unknown := set(names) - set(PEERS):
        raise typer.BadParameter(f"--peers {', '.join(unknown)}: supported are {', '.join(PEERS)}")
    flags = {"no": [False], "yes": [True], "both": [False, True]}[causal]
    rows = []
    table = Table("D", "S", "causal", *(f"{name} TFLOP/s" for name in ["cupy_fa2", *names, "cublas"]), "ours / flash")
    for head_dim in map(int, dims.split(",")):
        for seqlen in map(int, lengths.split(",")):
            for flag in flags:
                heads = HIDDEN // head_dim
                shape = Shape(max(TOKENS // seqlen, 1), seqlen, heads, kv_heads or heads, head_dim, flag, dtype)
                row = measure(shape, names, rounds, round_ms)
                rows.append(row)
                speeds = [f"{row.tflops[name]:.0f}" for name in ["cupy_fa2", *names, "cublas"]]
                ratio = f"{row.ratio['flash']:.3f}" if "flash" in row.ratio else "-"
                table.add_row(str(head_dim), str(seqlen), "yes" if flag else "no", *speeds, ratio)
    Console(width=120).print(table)
    costs = call_costs()
    print("CPU time of one call, µs:", {name: round(value, 1) for name, value in costs.items()})
    record = {**environment(), "rows": [asdict(row) for row in rows], "call_microseconds": costs}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
