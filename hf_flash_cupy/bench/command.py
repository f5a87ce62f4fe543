"""The command ``bench``: options in, tables, record, Markdown and drawings out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_flash_cupy.bench import decode, peers, plots, report
from hf_flash_cupy.bench import record as records
from hf_flash_cupy.bench.calls import call_costs
from hf_flash_cupy.bench.measure import Measurement, Row, release, require_gpu, why
from hf_flash_cupy.bench.models_command import bench_models
from hf_flash_cupy.bench.race import whole_rounds
from hf_flash_cupy.bench.shapes import DIRECTIONS, DTYPES, PRESETS, Shape, papers_shapes, with_heads_k

_LEAST_ROUND_MS = 4.0


@dataclass(frozen=True, slots=True)
class Settings:
    """A run, fully decided."""

    shapes: tuple[Shape, ...]
    directions: tuple[str, ...]
    names: tuple[str, ...]
    rounds: int
    round_ms: float
    seconds: float  # 0: as long as it takes
    device: str

    def affordable_ms(self) -> float:
        """What a round may take so that every row fits half the budget; warming and compiling take the rest."""
        if not self.seconds:
            return self.round_ms
        participants = len(self.names) + 1
        rows = len(self.shapes) * len(self.directions)
        share = self.seconds / 2 / (rows * participants * whole_rounds(self.rounds, participants)) * 1e3
        return max(min(self.round_ms, share), _LEAST_ROUND_MS)


def bench(
    ctx: typer.Context,
    preset: Annotated[str, typer.Option(help="; ".join(f"{k}: {v.about}" for k, v in PRESETS.items()))] = "cells",
    dims: Annotated[str, typer.Option(help="head sizes, in place of the preset's shapes")] = "",
    lengths: Annotated[str, typer.Option(help="sequence lengths, in place of the preset's shapes")] = "",
    causal: Annotated[str, typer.Option(help="no, yes or both, with --dims or --lengths")] = "both",
    tokens: Annotated[int, typer.Option(min=1, help="tokens of a batch, with --dims or --lengths")] = 16384,
    hidden: Annotated[int, typer.Option(min=1, help="heads × head size, with --dims or --lengths")] = 2048,
    kv_heads: Annotated[int, typer.Option(min=0, help="heads of k and v, 0 = those of the shape")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}, with --dims or --lengths")] = "bfloat16",
    directions: Annotated[str, typer.Option(help=f"of {', '.join(DIRECTIONS)}; default: the preset's")] = "",
    peers_: Annotated[
        str, typer.Option("--peers", help=f"of {', '.join(peers.IMPLEMENTATIONS)}; default: the preset's or all")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="made whole so that all orders come equally often")] = 6,
    round_ms: Annotated[float, typer.Option(min=1.0, help="milliseconds of one implementation in one round")] = 40.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="time budget: shorter rounds, then fewer rows; 0 = none")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON record, written after every row")] = None,
    markdown: Annotated[Path | None, typer.Option(help="tables as Markdown")] = None,
    plot: Annotated[Path | None, typer.Option(help="folder for drawings; needs the plots extra")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="a tiny shape on the CPU, to see that this works")] = False,
) -> None:
    """Measures attention forward, backward and both, ours and every peer that is there, interleaved."""
    if ctx.invoked_subcommand is not None:
        return
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset}: supported are {', '.join(PRESETS)}")
    device = "cpu" if smoke else "cuda"
    if preset == "decode":
        if dims or lengths or kv_heads or directions:
            raise typer.BadParameter("--preset decode: has its own shapes and one direction")
        names = _chosen("--peers", peers_, decode.IMPLEMENTATIONS, decode.IMPLEMENTATIONS)
        _check_machine(smoke, plot)
        _show(run_decode(names, 1 if smoke else rounds, 1.0 if smoke else round_ms, seconds, device, out), markdown)
        return
    if smoke and (dims or lengths):
        given = "--dims" if dims else "--lengths"
        raise typer.BadParameter(f"--smoke, {given}: a smoke run has its own tiny shapes; give one of the two")
    chosen = PRESETS["smoke" if smoke else preset]
    shapes = list(chosen.shapes)
    if dims or lengths:
        shapes = _shapes(dims or "64,128", lengths or "1024,4096,16384", causal, tokens, hidden, dtype)
    try:
        shapes = with_heads_k(shapes, kv_heads) if kv_heads else shapes
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    names = _chosen("--peers", peers_, chosen.implementations or tuple(peers.IMPLEMENTATIONS), peers.IMPLEMENTATIONS)
    if "cupy_fa2" not in names:
        names = ("cupy_fa2", *names)
    settings = Settings(
        shapes=tuple(shapes),
        directions=_chosen("--directions", directions, chosen.directions, DIRECTIONS),
        names=names,
        rounds=1 if smoke else rounds,
        round_ms=1.0 if smoke else round_ms,
        seconds=seconds,
        device=device,
    )
    _check_machine(smoke, plot)
    record = run(settings, out, Console(stderr=True))
    _show(record, markdown)
    if plot is not None:
        plots.draw(record, plot)


def _check_machine(smoke: bool, plot: Path | None) -> None:
    """Raises MissingDependency for what is missing before the measurements rather than after them."""
    if plot is not None:
        plots.pyplot()
    require_gpu(smoke)


def _show(record: records.Record, markdown: Path | None) -> None:
    console = Console(width=None if Console().is_terminal else 180)
    for grid in report.grids(record):
        console.print(grid.rich())
    if record.call_microseconds:
        console.print("CPU time of one call, µs:", {k: round(v, 1) for k, v in record.call_microseconds.items()})
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(report.markdown(record))


def run_decode(
    names: tuple[str, ...], rounds: int, round_ms: float, seconds: float, device: str, out: Path | None
) -> records.Record:
    """The preset "decode"; ``out`` holds what there is after each row."""
    record = records.Record(records.environment(device), smoke=device == "cpu")
    deadline = time.monotonic() + seconds if seconds else None
    for batch, seqlen_k in decode.SMOKE if device == "cpu" else decode.ROWS:
        row = decode.DecodeRow(batch, seqlen_k)
        if deadline is not None and time.monotonic() >= deadline:
            record.not_run.append(row.label)
            continue
        decode.measure(row, names, rounds, round_ms, device)
        record.decode.append(row)
        if out is not None:
            record.write(out)
    if out is not None:
        record.write(out)
    return record


def run(settings: Settings, out: Path | None, console: Console) -> records.Record:
    """Every row that the budget allows; ``out`` holds what there is after each, so that a crash loses one row."""
    record = records.Record(records.environment(settings.device), smoke=settings.device == "cpu")
    deadline = time.monotonic() + settings.seconds if settings.seconds else None
    with console.status("") as status:

        def keep(row: Row) -> None:
            record.rows.append(row)
            if out is not None:
                record.write(out)

        for shape in settings.shapes:
            missed = settings.directions
            if deadline is None or time.monotonic() < deadline:
                missed = _measure_shape(shape, settings, deadline, keep, status.update)
            record.not_run += [f"{shape.label} {direction}" for direction in missed]
    if settings.device != "cpu":
        record.call_microseconds = call_costs()
    if out is not None:
        record.write(out)
    return record


def _measure_shape(
    shape: Shape,
    settings: Settings,
    deadline: float | None,
    keep: Callable[[Row], None],
    progress: Callable[[str], None],
) -> tuple[str, ...]:
    """Hands each direction's row to ``keep``; returns the directions for which no time was left."""
    try:
        measurement = Measurement(shape, settings.device, settings.rounds, settings.affordable_ms())
    except torch.OutOfMemoryError as error:  # the inputs themselves
        reason = why(error)
        for direction in settings.directions:
            keep(Row(shape, direction, failed=dict.fromkeys(settings.names, reason)))
        release()
        return ()
    for index, direction in enumerate(settings.directions):
        if deadline is not None and time.monotonic() >= deadline:
            return settings.directions[index:]
        keep(measurement.row(direction, settings.names, progress))
    return ()


def _shapes(dims: str, lengths: str, causal: str, tokens: int, hidden: int, dtype: str) -> list[Shape]:
    flags = {"no": [False], "yes": [True], "both": [False, True]}.get(causal)
    if flags is None:
        raise typer.BadParameter(f"--causal {causal}: supported are no, yes, both")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}: supported are {', '.join(DTYPES)}")
    sizes, rows = _numbers("--dims", dims), _numbers("--lengths", lengths)
    return [replace(shape, dtype=dtype) for shape in papers_shapes(sizes, rows, flags, tokens=tokens, hidden=hidden)]


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{option} {text}: must be whole numbers above 0, separated by commas")
    return numbers


def _chosen(option: str, text: str, default: Sequence[str], allowed: Collection[str]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip()) or tuple(default)
    if unknown := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{option} {', '.join(unknown)}: supported are {', '.join(allowed)}")
    return names


app = typer.Typer(add_completion=False)
app.callback(invoke_without_command=True)(bench)
app.command("models")(bench_models)
