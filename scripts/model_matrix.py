#!/usr/bin/env python3
"""Runs every row of tests/integrations/matrix and keeps the outcome in benchmarks/models.json.

    python scripts/model_matrix.py [--device cuda --dtype bfloat16 --jobs 16]

scripts/refresh_docs.py then writes the tables of docs/models.md anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "models.json"
sys.path.insert(0, str(ROOT))


def run(
    device: str = "cpu",
    dtype: str = "float32",
    jobs: int = 2,
    only: Annotated[str, typer.Option(help="Names, comma-separated; default: all.")] = "",
    out: Annotated[Path, typer.Option(help="The record to put this run into.")] = RECORD,
) -> None:
    """Run the rows and put them, in place of an earlier run of this version, device and dtype, into the record."""
    os.environ.setdefault("HF_FLASH_CUPY_CPU", "kernels")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from tests.integrations.matrix.registry import ROWS

    names = [name for name in ROWS if not only or name in only.split(",")]
    # Spawned: a forked process cannot use CUDA.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start) as pool:
        rows = list(pool.map(_run_row, names, [device] * len(names), [dtype] * len(names)))
    key = {"transformers": transformers.__version__, "device": device, "dtype": dtype}
    runs = json.loads(out.read_text())["runs"] if out.exists() else []
    same = [each for each in runs if {name: each[name] for name in key} == key]
    if only and same:
        found = {row["name"]: row for row in rows}
        found = {row["name"]: row for row in same[0]["rows"]} | found
        rows = [found[name] for name in ROWS if name in found]
    runs = [each for each in runs if each not in same] + [{**key, "rows": rows}]
    runs.sort(key=lambda each: (each["device"], each["dtype"], each["transformers"]))
    out.write_text(_as_text(runs))
    for row in rows:
        if not row["equal"]:
            typer.echo(f"{row['name']}: { {mode: text for mode, text in row['modes'].items() if text != 'ok'} }")
    typer.echo(f"{len(rows)} rows, {sum(row['equal'] for row in rows)} equal to eager in every mode, "
               f"{sum(row['accelerated'] for row in rows)} accelerated -> {out}")  # fmt: skip


def _as_text(runs: list[dict[str, Any]]) -> str:
    """JSON with a line for each row."""
    texts = []
    for each in runs:
        rows = ",\n".join(json.dumps(row) for row in each["rows"])
        facts = json.dumps({key: value for key, value in each.items() if key != "rows"})
        texts.append(f'{facts[:-1]}, "rows": [\n{rows}\n]}}')
    return '{"runs": [\n' + ",\n".join(texts) + "\n]}\n"


def _start() -> None:
    warnings.simplefilter("ignore")
    import torch
    from transformers import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()


def _run_row(name: str, device: str, dtype: str) -> dict[str, Any]:
    import torch

    from tests.integrations.matrix.registry import ROWS, as_record, failed_record
    from tests.integrations.matrix.runner import Runner

    try:
        return as_record(Runner(ROWS[name], device, getattr(torch, dtype)).run())
    except Exception as error:  # a model that cannot even be built: the finding of this row
        return failed_record(name, error)


if __name__ == "__main__":
    typer.run(run)
