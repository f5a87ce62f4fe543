"""What the two papers claim, read from a record's rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.peers import CUBLAS
from hf_flash_cupy.bench.record import Record
from hf_flash_cupy.cards import find_card


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper, and what this record's rows say of it (``found``, empty where nothing was measured)."""

    claim: str
    source: str
    found: str


def claims(record: Record) -> list[Claim]:
    """Every claim that the benchmark can speak to."""
    paper1, paper2 = "Dao 2022", "Dao 2023"
    card = find_card(str(record.environment.get("card", "")))
    peak = f" of {card.matrix_tflops:.0f} TFLOP/s" if card else ""
    return [
        Claim(
            "FlashAttention-1 is 2-4 times as fast as standard attention",
            f"{paper2}, section 1",
            _span(record, lambda row: _speedup(row, "cupy_fa1", "eager") if row.shape.seqlen >= 2048 else None),
        ),
        Claim(
            "its memory is linear in the length, standard attention's quadratic (10-20 times less)",
            f"{paper1}, theorem 1 and section 4.3; {paper2}, section 1",
            _span(record, lambda row: _memory_ratio(row) if row.shape.seqlen >= 2048 else None),
        ),
        Claim(
            "FlashAttention-2 is about twice as fast as FlashAttention-1 (1.7-3.0 times)",
            f"{paper2}, section 4",
            _span(record, lambda row: _speedup(row, "cupy_fa2", "cupy_fa1")),
        ),
        Claim(
            "more so where batch × heads is below the number of SMs",
            f"{paper2}, section 3.2",
            _span(record, lambda row: _few_heads(row, int(record.environment.get("num_sms", 0) or 0))),
        ),
        Claim(
            "utilisation on an A100: FlashAttention-1 25-40 %, FlashAttention-2 50-73 % of the peak",
            f"{paper2}, abstract; forward 30-50 %, backward 25-35 % of the first in section 1",
            "; ".join(
                f"{name}: {text}{peak}" for name in ("cupy_fa1", "cupy_fa2") if (text := _utilisation(record, name))
            ),
        ),
    ]


def best_peer(row: Row) -> tuple[str, float] | None:
    """The fastest implementation that is neither ours nor cuBLAS, and our FlashAttention-2's time over its."""
    others = {name: time for name, time in row.milliseconds.items() if name not in ("cupy_fa1", "cupy_fa2", CUBLAS)}
    if not others or "cupy_fa2" not in row.milliseconds:
        return None
    name = min(others, key=others.__getitem__)
    return name, row.milliseconds["cupy_fa2"] / others[name]


def _speedup(row: Row, name: str, than: str) -> float | None:
    times = row.milliseconds
    return times[than] / times[name] if name in times and than in times else None


def _few_heads(row: Row, num_sms: int) -> float | None:
    few = row.shape.batch * row.shape.heads < num_sms
    return _speedup(row, "cupy_fa2", "cupy_fa1") if few else None


def _memory_ratio(row: Row) -> float | None:
    peak = row.peak_bytes
    return peak["eager"] / peak["cupy_fa1"] if {"eager", "cupy_fa1"} <= peak.keys() and peak["cupy_fa1"] else None


def _utilisation(record: Record, name: str) -> str:
    card = find_card(str(record.environment.get("card", "")))
    if card is None:
        return ""
    return _span(
        record,
        lambda row: row.tflops[name] / card.matrix_tflops if _counts(row, name) else None,
        show=lambda value: f"{100 * value:.0f} %",
    )


def _counts(row: Row, name: str) -> bool:
    """Utilisation is of 16-bit matrix instructions, where there is enough work to fill the card."""
    return name in row.tflops and row.shape.dtype != "float32" and row.shape.seqlen >= 2048


def _span(
    record: Record, value: Callable[[Row], float | None], show: Callable[[float], str] = lambda x: f"{x:.1f}×"
) -> str:
    """The least and the most of ``value`` in each direction."""
    parts = []
    for direction in dict.fromkeys(row.direction for row in record.rows):
        values = list(_present(value(row) for row in record.rows if row.direction == direction))
        if values:
            low, high = show(min(values)), show(max(values))
            parts.append(f"{direction} {low if low == high else f'{low} to {high}'} ({len(values)} rows)")
    return ", ".join(parts)


def _present(values: Iterator[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None)
