"""A record as tables for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.table import Table

from hf_flash_cupy.bench import decode, models
from hf_flash_cupy.bench.claims import best_peer, claims
from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.peers import CUBLAS, IMPLEMENTATIONS, label
from hf_flash_cupy.bench.record import Record

TITLES = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward"}
NONE = "–"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is drawn: cells are text."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        table = Table(*self.head, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, ["---"] * len(self.head), *self.rows)]
        return "\n".join((f"### {self.title}", "", *lines))


def grids(record: Record) -> Iterator[Grid]:
    """Speed and memory of each direction, who failed, and the papers' claims."""
    smoke = " (smoke run on a CPU: its times mean nothing)" if record.smoke else ""
    for direction in dict.fromkeys(row.direction for row in record.rows):
        rows = [row for row in record.rows if row.direction == direction]
        yield _speeds(f"{TITLES[direction]}, TFLOP/s of useful work{smoke}", rows)
        if any(row.peak_bytes for row in rows):
            yield _memory(f"{TITLES[direction]}: peak device memory, MiB (in brackets: beyond the results)", rows)
    if record.models:
        head, lines = models.table(record.models)
        yield Grid(f"Whole models, milliseconds (extra MiB){smoke}", head, list(lines))
    if record.decode:
        head, lines = decode.table(record.decode)
        unit = "µs" if record.smoke else "µs (alone, L2 cache cleared)"
        yield Grid(f"Decoding, {unit}{smoke}", head, list(lines))
    failures = [[row.shape.label, row.direction, label(name), why] for row, name, why in _failures(record)]
    failures += [[row.label, "model", name, why] for row in record.models for name, why in row.failed.items()]
    failures += [[row.label, "decode", name, why] for row in record.decode for name, why in row.failed.items()]
    if failures:
        yield Grid("Not measured", ["shape", "direction", "implementation", "reason"], failures)
    unchecked = [[row.shape.label, row.direction, row.unchecked] for row in record.rows if row.unchecked]
    if unchecked:
        yield Grid("Results not compared with torch's", ["shape", "direction", "reason"], unchecked)
    if record.not_run:
        yield Grid("Left out by the time budget", ["row"], [[text] for text in record.not_run])
    if record.rows and not record.smoke:
        found = [[each.claim, each.source, each.found or "not measured here"] for each in claims(record)]
        yield Grid("What the papers claim", ["claim", "source", "here"], found)


def markdown(record: Record) -> str:
    """The whole record for a README or an issue."""
    versions = ", ".join(f"{name} {version}" for name, version in record.environment["versions"].items())
    facts = [str(record.environment.get(name, "")) for name in ("card", "power_limit")]
    driver = record.environment.get("driver", "")
    head = [
        f"## {', '.join(filter(None, facts))}{f', driver {driver}' if driver else ''}",
        "",
        f"{record.environment['date']}, {versions}",
        "",
        f"`{record.environment['command']}`",
    ]
    return "\n\n".join(["\n".join(head), *(grid.markdown() for grid in grids(record))]) + "\n"


def names_of(rows: list[Row]) -> list[str]:
    """Every implementation that some row has or lacks, in the order of the tables."""
    present = {name for row in rows for name in (*row.milliseconds, *row.failed)}
    order = ("cupy_fa1", "cupy_fa2", "eager", *IMPLEMENTATIONS, CUBLAS)
    return [name for name in dict.fromkeys(order) if name in present]


def _shape_cells(row: Row) -> list[str]:
    shape = row.shape
    heads = str(shape.heads) if shape.heads == shape.heads_k else f"{shape.heads}/{shape.heads_k}"
    dims = str(shape.head_dim) if not shape.head_dim_v else f"{shape.head_dim}/{shape.head_dim_v}"
    dims += f" {shape.dtype}" * (shape.dtype != "bfloat16")
    mask = f"window {shape.window:,}" if shape.window >= 0 else "yes" if shape.causal else "no"
    length = f"{shape.seqlen:,}" + f" in {len(shape.packed)}" * bool(shape.packed)
    return [dims, str(shape.batch), heads, length, mask]


def _head(rows: list[Row]) -> list[str]:
    return ["D", "B", "H", "S", "causal", *map(label, names_of(rows))]


def _cells(rows: list[Row], cell: Callable[[Row, str], str]) -> Iterator[list[str]]:
    names = names_of(rows)
    for row in rows:
        yield [*_shape_cells(row), *(cell(row, name) for name in names)]


def _speeds(title: str, rows: list[Row]) -> Grid:
    def cell(row: Row, name: str) -> str:
        if name not in row.tflops:
            return "OOM" if "out of memory" in row.failed.get(name, "") else NONE
        return f"{row.tflops[name]:.0f}" if row.tflops[name] >= 10 else f"{row.tflops[name]:.2g}"

    cells = list(_cells(rows, cell))
    for row, line in zip(rows, cells, strict=True):
        best = best_peer(row)
        line.append(NONE if best is None else f"{best[1]:.2f} ({label(best[0])})")
    return Grid(title, [*_head(rows), "time of cupy_fa2 / best peer"], cells)


def _memory(title: str, rows: list[Row]) -> Grid:
    def cell(row: Row, name: str) -> str:
        if name not in row.peak_bytes:
            return NONE
        return f"{row.peak_bytes[name] / 2**20:,.0f} ({row.extra_bytes[name] / 2**20:,.0f})"

    return Grid(title, _head(rows), list(_cells(rows, cell)))


def _failures(record: Record) -> Iterator[tuple[Row, str, str]]:
    """A reason that holds for all rows of a direction is told once, for the first."""
    told: set[tuple[str, str, str]] = set()
    for row in record.rows:
        for name, why in row.failed.items():
            general = "not installed" in why or "has no backward" in why
            key = (name, why, "" if general else f"{row.shape.label} {row.direction}")
            if key not in told:
                told.add(key)
                yield row, name, why
