"""The facts of a shape as a table: one column an algorithm, one row a fact. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_flash_cupy.anatomy import work
from hf_flash_cupy.anatomy.kernels import Kernel
from hf_flash_cupy.anatomy.profiler import Counted
from hf_flash_cupy.anatomy.work import Blocks, Traffic, Work
from hf_flash_cupy.bench.shapes import Shape
from hf_flash_cupy.cards import Card

ALGORITHMS = {"standard": "standard attention", "fa1": "FlashAttention-1", "fa2": "FlashAttention-2"}
IMPLEMENTATIONS = {"standard": "eager", "fa1": "cupy_fa1", "fa2": "cupy_fa2"}  # as the benchmark names them
_WORK: dict[tuple[str, str], Callable[[Shape, Blocks], Work]] = {
    ("fa1", "forward"): work.fa1_forward,
    ("fa2", "forward"): work.fa2_forward,
    ("fa1", "backward"): work.fa1_backward,
    ("fa2", "backward"): work.fa2_backward,
}
LOOPS = {
    ("standard", "forward"): "no loop of its own: S = Q Kᵀ, P = softmax(S), O = P V, one kernel or more each",
    ("fa1", "forward"): "for each key block j (outer): for each row block i (inner)",
    ("fa2", "forward"): "row blocks i over thread blocks; in each: for each key block j",
    ("standard", "backward"): "no loop of its own: dV, dP, dS, dQ, dK, one kernel or more each",
    ("fa1", "backward"): "for each key block j (outer): for each row block i (inner)",
    ("fa2", "backward"): "key blocks j over thread blocks; in each: for each row block i",
}
OWNERS = {
    ("standard", "forward"): "S and P lie in device memory; every kernel reads what the last one wrote",
    (
        "fa1",
        "forward",
    ): "split-K: the warps share the keys of a block ({keys} each) and add up max, sum and P V through "
    "shared memory; O, l, m lie in device memory",
    ("fa2", "forward"): "split-Q: each warp owns {rows} rows, their O, l, m stay in its registers; no exchange",
    ("standard", "backward"): "P from the forward, dP and dS lie in device memory",
    ("fa1", "backward"): "K_j, V_j, dK_j, dV_j stay on chip for the inner loop; dQ lies in device memory, read and "
    "rewritten at every visit by the one thread block of its head",
    ("fa2", "backward"): "K_j, V_j, dK_j, dV_j stay on chip for the loop; dQ is summed by atomics in device memory, "
    "since every thread block of its head adds to it",
}


@dataclass
class Facts:
    """All that is known of one algorithm and direction."""

    algorithm: str
    direction: str
    work: Work | None
    kernel: Kernel | None
    measured: dict[str, str] = field(default_factory=dict)


def gather(shape: Shape, algorithm: str, direction: str, kernel: Kernel | None) -> Facts:
    """Counts the work, of "fa1" and "fa2" with the tile numbers of ``kernel``."""
    if kernel is None:
        return Facts(algorithm, direction, work.standard(shape, direction), None)
    blocks = Blocks(kernel.block_m, kernel.block_n, kernel.num_warps, kernel.chunks)
    return Facts(algorithm, direction, _WORK[algorithm, direction](shape, blocks), kernel)


def rows(facts: Facts, shape: Shape, card: Card | None, num_sms: int) -> dict[str, str]:
    """Name of each fact → its text."""
    table = {"loops": LOOPS[facts.algorithm, facts.direction], **_launch(facts, num_sms)}
    if facts.work is None:  # refused: there is no kernel, hence no tile to count with
        return {**table, **facts.measured}
    return {**table, **_operations(facts.work, shape, facts.direction, card), **_memory(facts.work), **facts.measured}


def _launch(facts: Facts, num_sms: int) -> dict[str, str]:
    owner = OWNERS[facts.algorithm, facts.direction]
    kernel = facts.kernel
    if kernel is None:
        grid = "chosen by cuBLAS and PyTorch" if facts.algorithm == "standard" else "no kernel"
        return {"ownership": owner, "grid": grid}
    busy = min(kernel.num_blocks, num_sms)
    at_once = kernel.blocks_per_sm * num_sms
    registers = f"{kernel.registers} a thread" if kernel.registers else f"not known: {kernel.why_unknown}"
    if kernel.registers and kernel.spill_bytes:
        registers += f", {kernel.spill_bytes} bytes spilled"
    return {
        "kernel": kernel.config.name,
        "tile": f"{kernel.block_m} rows (B_r) × {kernel.block_n} keys (B_c), {kernel.num_warps} warps",
        "ownership": owner.format(keys=kernel.block_n // kernel.num_warps, rows=kernel.block_m // kernel.num_warps),
        "grid": f"{kernel.num_blocks:,} thread blocks of {kernel.config.num_threads} threads",
        "SMs with work": f"{busy} of {num_sms} ({100 * busy / num_sms:.0f} %)",
        "at once": f"{kernel.blocks_per_sm} thread blocks an SM, so {kernel.num_blocks / max(at_once, 1):.2f} waves",
        "shared memory": f"{kernel.config.shared_bytes / 1024:.1f} KiB a thread block",
        "registers": registers,
    }


def _operations(found: Work, shape: Shape, direction: str, card: Card | None) -> dict[str, str]:
    useful = shape.flops(direction)
    itemised = "; ".join(f"{name}: {count(value)}" for name, value in found.other.items())
    table = {
        "matrix FLOPs": f"{count(found.matrix)} (useful: {count(useful)})",
        "other FLOPs": f"{count(found.other_total)}, {100 * found.other_total / found.matrix:.1f} % of matrix FLOPs",
        "of these": itemised,
    }
    if card is not None and shape.dtype != "float32":
        matrix, other = found.matrix / card.matrix_tflops / 1e6, found.other_total / card.fp32_tflops / 1e6
        memory = (found.moved.read + found.moved.written) / card.gigabytes_per_second / 1e3
        least = (found.least.read + found.least.written) / card.gigabytes_per_second / 1e3
        table[f"least µs, {card.name}"] = (
            f"matrix {matrix:,.0f}, other {other:,.0f}, memory {least:,.0f} (nothing cached: {memory:,.0f})"
        )
    return table


def _memory(found: Work) -> dict[str, str]:
    notes = {"note": "; ".join(found.notes)} if found.notes else {}
    return {
        "bytes (computed)": f"{_traffic(found.moved)} by thread blocks; each tensor once: {_traffic(found.least)}",
        "extra memory (computed)": f"{size(found.extra_bytes)} beyond inputs and results",
        **notes,
    }


def _traffic(traffic: Traffic) -> str:
    return f"{size(traffic.read)} read, {size(traffic.written)} written"


def counted(found: Counted) -> str:
    """What ncu's counters say."""
    moved = f"{size(found.read)} read, {size(found.written)} written"
    return f"{moved} by {found.kernels} kernel(s); {size(found.cache)} through the L2 cache"


def count(number: float) -> str:
    """1.5e9 → "1.5 G"."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
