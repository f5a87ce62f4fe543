"""The command ``bench models``: whole models, one row of the record after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_flash_cupy.bench import models, report
from hf_flash_cupy.bench import record as records
from hf_flash_cupy.bench.measure import require_gpu

_DEFAULT = tuple(name for name in models.IMPLEMENTATIONS if name != "cupy_fa1")


def bench_models(
    rows: Annotated[str, typer.Option(help=f"of {', '.join(models.WORKLOADS)}; default: all")] = "",
    peers: Annotated[
        str,
        typer.Option(help=f"of {', '.join(models.IMPLEMENTATIONS)}; default: those that finish in bearable time"),
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="made whole so that all orders come equally often")] = 6,
    round_ms: Annotated[float, typer.Option(min=1.0, help="milliseconds of one implementation in one round")] = 40.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="no row begins after these; 0 = all do")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="JSON record, written after every row; one that is there goes on")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="table as Markdown")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="tiny models on the CPU, to see that this works")] = False,
) -> None:
    """Measures whole models of Transformers by each attention implementation, interleaved."""
    workloads = models.SMOKE if smoke else models.WORKLOADS
    names = _listed("--rows", rows, tuple(workloads))
    chosen = _listed("--peers", peers, models.IMPLEMENTATIONS) if peers else _DEFAULT
    require_gpu(smoke)
    device = "cpu" if smoke else "cuda"
    if smoke:
        os.environ["HF_FLASH_CUPY_CPU"] = "kernels"  # SDPA under our name would show nothing
    record = _begun(out, records.Record(records.environment(device), smoke=smoke))
    errors = Console(stderr=True)
    deadline = time.monotonic() + seconds if seconds else None
    start = time.monotonic()
    with errors.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not errors.is_terminal:  # a log shows no status line
                errors.print(f"{time.monotonic() - start:6.1f} s  {text}", highlight=False)

        for name in names:
            if deadline is not None and time.monotonic() >= deadline:
                record.not_run.append(workloads[name].label)
                continue
            row = models.measure(
                name,
                workloads[name],
                models.chosen(workloads[name], chosen, bool(peers)),
                rounds=1 if smoke else rounds,
                round_ms=1.0 if smoke else round_ms,
                device=device,
                progress=say,
            )
            record.models = [each for each in record.models if each.name != name] + [row]
            if out is not None:
                record.write(out)
    if out is not None:
        record.write(out)
    console = Console(width=None if Console().is_terminal else 180)
    for grid in report.grids(record):
        console.print(grid.rich())
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(report.markdown(record))


def _begun(out: Path | None, record: records.Record) -> records.Record:
    """``record``, with the rows that another run of the same machine and versions has put into ``out`` before."""
    if out is None or not out.exists():
        return record
    before = records.read(out)
    here, there = record.environment, before.environment
    if record.smoke != before.smoke or any(here[name] != there[name] for name in ("card", "driver", "versions")):
        raise typer.BadParameter(f"--out {out}: is of another machine, or of other versions; name another file")
    record.models = before.models
    record.environment["command"] = f"{there['command']}; {here['command']}"
    return record


def _listed(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip()) or allowed
    if unknown := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{option} {', '.join(unknown)}: supported are {', '.join(allowed)}")
    return names
