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
    ("fa2", "forward"): "split-Q: each {part} owns {rows} rows, their O, l, m stay in its registers; no exchange",
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
    blocks = Blocks(kernel.block_m, kernel.block_n, kernel.parts, kernel.chunks, kernel.group, kernel.row_bytes)
    of_kernel = work.fa2_forward_sm90 if kernel.stays else _WORK[algorithm, direction]
    return Facts(algorithm, direction, of_kernel(shape, blocks), kernel)


def rows(facts: Facts, shape: Shape, card: Card | None, num_sms: int) -> dict[str, str]:
    """Name of each fact → its text."""
    table = {"loops": LOOPS[facts.algorithm, facts.direction], **_launch(facts, num_sms)}
    if facts.work is None:  # refused: there is no kernel, hence no tile to count with
        return {**table, **facts.measured}
    notes = [*facts.work.notes, *([facts.kernel.note] if facts.kernel and facts.kernel.note else [])]
    table |= {**_operations(facts.work, shape, facts.direction, card), **_memory(facts.work)}
    return {**table, **({"note": "; ".join(notes)} if notes else {}), **facts.measured}


def _launch(facts: Facts, num_sms: int) -> dict[str, str]:
    kernel = facts.kernel
    if kernel is None:
        if facts.algorithm == "standard":
            return {"ownership": OWNERS[facts.algorithm, facts.direction], "grid": "chosen by cuBLAS and PyTorch"}
        return {"grid": "no kernel"}
    threads = kernel.config.num_threads
    busy = min(kernel.num_blocks, num_sms)
    tile = f"{kernel.block_m} rows (B_r) × {kernel.block_n} keys (B_c)"
    if kernel.has_warpgroups:
        tile += f", {kernel.parts} warpgroups of 4 warps that compute, 1 that loads"
    else:
        groups = f"{kernel.row_groups} groups of " if kernel.row_groups > 1 else ""
        tile += f", {groups}{kernel.parts} warps"
    if kernel.stays:
        grid = f"{busy:,} thread blocks of {threads} threads that stay and take {kernel.num_blocks:,} tiles in turn"
        together = f"1 thread block an SM, {kernel.num_blocks / max(busy, 1):.2f} tiles each"
    else:
        grid = f"{kernel.num_blocks:,} thread blocks of {threads} threads"
        waves = kernel.num_blocks / max(kernel.blocks_per_sm * num_sms, 1)
        together = f"{kernel.blocks_per_sm} thread blocks an SM, so {waves:.2f} waves"
    return {
        "kernel": kernel.config.name,
        "tile": tile,
        "ownership": _ownership(facts.algorithm, facts.direction, kernel),
        "grid": grid,
        "SMs with work": f"{busy} of {num_sms} ({100 * busy / num_sms:.0f} %)",
        "at once": together,
        "shared memory": f"{kernel.config.shared_bytes / 1024:.1f} KiB a thread block",
        "registers": _registers(kernel),
    }


def _ownership(algorithm: str, direction: str, kernel: Kernel) -> str:
    text = OWNERS[algorithm, direction].format(
        part="warpgroup" if kernel.has_warpgroups else "warp",
        keys=kernel.block_n // kernel.parts,
        rows=kernel.block_m // kernel.parts,
    )
    if kernel.has_warpgroups:
        loaded = "Q, K and V by TMA" if direction == "forward" else "K, V, Q and dO by TMA, and adds dQ by it"
        text += f"; one more warpgroup loads {loaded}"
    if kernel.row_groups > 1:
        text += f"; {kernel.row_groups} groups of {kernel.parts} warps do so, each with row blocks of its own"
    if kernel.group > 1:
        text += f"; rows of the {kernel.group} query heads of a key head share a tile"
    return text


def _registers(kernel: Kernel) -> str:
    if not kernel.registers:
        return f"not known: {kernel.why_unknown}"
    text = f"{kernel.registers} a thread"
    if kernel.has_warpgroups:  # setmaxnreg
        constants = dict(kernel.config.constants)
        loading, computing = constants["int kLoadRegisters"], constants["int kComputeRegisters"]
        text += f" at the start, then {loading} of one that loads and {computing} of one that computes"
    return text + (f", {kernel.spill_bytes} bytes spilled" if kernel.spill_bytes else "")


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
    return {
        "bytes (computed)": f"{_traffic(found.moved)} by thread blocks; each tensor once: {_traffic(found.least)}",
        "extra memory (computed)": f"{size(found.extra_bytes)} beyond inputs and results",
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
