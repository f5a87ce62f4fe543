"""A record as drawings: speed and memory over the sequence length. Needs the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.peers import CUBLAS, label
from hf_flash_cupy.bench.record import Record
from hf_flash_cupy.bench.report import TITLES, names_of
from hf_flash_cupy.errors import MissingDependency


def draw(record: Record, folder: Path) -> list[Path]:
    """One PNG for each direction, head size and mask; x is the length, or batch × heads where that is what varies."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in panels(record):
        memory = any(row.peak_bytes for row in rows)
        figure, axes = plt.subplots(
            1, 1 + memory, figsize=(5.5 * (1 + memory), 4.2), layout="constrained", squeeze=False
        )
        _lines(axes[0, 0], rows, lambda row, peer: row.tflops.get(peer), "TFLOP/s of useful work")
        axes[0, 0].set_ylim(bottom=0)
        axes[0, 0].legend(fontsize="small")
        if memory:
            _lines(axes[0, 1], rows, lambda row, peer: row.peak_bytes.get(peer, 0) / 2**20 or None, "peak memory, MiB")
            axes[0, 1].set_yscale("log")
        shape = rows[0].shape
        mask = "causal" if shape.causal else "not causal"
        smoke = " (smoke run on a CPU)" if record.smoke else ""
        card = record.environment.get("card", "")
        figure.suptitle(f"{TITLES[rows[0].direction]}, D {shape.head_dim}, {mask}, {shape.dtype}, {card}{smoke}")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def panels(record: Record) -> Iterator[tuple[str, list[Row]]]:
    """(file name, rows that share direction, head size, mask and dtype)."""

    def key(row: Row) -> tuple[str, int, bool, str]:
        return row.direction, row.shape.head_dim, row.shape.causal, row.shape.dtype

    for (direction, head_dim, causal, dtype), rows in groupby(sorted(record.rows, key=key), key):
        yield f"{direction}-d{head_dim}-{'causal' if causal else 'full'}-{dtype}", list(rows)


def axis_of(rows: list[Row]) -> tuple[str, list[int]]:
    """What varies over ``rows``: its name and its values."""
    heads = [row.shape.batch * row.shape.heads for row in rows]
    lengths = [row.shape.seqlen for row in rows]
    if len(set(lengths)) == 1 and len(set(heads)) > 1:
        return "batch × heads", heads
    return "sequence length", lengths


def _lines(axes: Any, rows: list[Row], value: Any, title: str) -> None:
    axis, positions = axis_of(rows)
    order = sorted(range(len(rows)), key=positions.__getitem__)
    for peer in names_of(rows):
        if peer == CUBLAS:
            continue
        points = [(positions[i], y) for i in order if (y := value(rows[i], peer)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label(peer))
    axes.set_xscale("log", base=2)
    axes.set_xlabel(axis)
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)


def pyplot() -> Any:
    """matplotlib's, drawing to files. Raises :class:`MissingDependency` without it."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("Drawing needs matplotlib.", "pip install 'hf-flash-cupy[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
