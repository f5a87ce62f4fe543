"""The table of docs/models.md: the record that scripts/model_matrix.py keeps, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "benchmarks" / "models.json"

Run = dict[str, Any]


def model_table() -> str:
    """A summary of every run, then one table a kind of model."""
    runs: list[Run] = json.loads(RECORD.read_text())["runs"]
    parts = ["| run | model types | equal to eager in every mode | accelerated |\n|---|---|---|---|"]
    parts[0] += "".join(f"\n{_summary(run)}" for run in runs)
    names: dict[str, list[str]] = {}
    for row in runs[0]["rows"]:
        names.setdefault(row["group"], []).append(row["name"])
    for group, members in names.items():
        head = ["model", *map(_title, runs), "head size", "masks", "features", "notes"]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [_line(name, runs) for name in sorted(members)]
        parts.append(f"### {group[0].upper()}{group[1:]}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _title(run: Run) -> str:
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[run["dtype"]]
    version = ".".join(run["transformers"].split(".")[:2])
    return f"{version} {'CPU' if run['device'] == 'cpu' else 'CUDA'} {dtype}"


def _summary(run: Run) -> str:
    rows = run["rows"]
    equal, ours = (sum(row[key] for row in rows) for key in ("equal", "accelerated"))
    both = sum(row["equal"] and row["accelerated"] for row in rows)
    share = f"{ours} ({100 * both / len(rows):.1f} % accelerated and equal)"
    return f"| Transformers {_title(run)} | {len(rows)} | {equal} | {share} |"


def _line(name: str, runs: list[Run]) -> str:
    found = [row for run in runs for row in run["rows"] if row["name"] == name]
    first = found[0]
    cells = [_state(next((row for row in run["rows"] if row["name"] == name), None)) for run in runs]

    def union(key: str) -> str:
        return ", ".join(dict.fromkeys(value for row in found for value in row[key]))

    return f"| {' | '.join([name, *cells, union('heads'), union('masks'), union('features'), _notes(first, found)])} |"


def _state(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return ("✓" if row["accelerated"] else "own") if row["equal"] else "✗"


def _notes(first: dict[str, Any], found: list[dict[str, Any]]) -> str:
    notes = [first["note"]]
    own = sorted({name for row in found for name in row["own"]})
    if own and not first["note"]:
        notes.append(f"{', '.join(own)}: attention of its own")
    if first["pools"]:
        notes.append(f"its pooling head ({', '.join(first['pools'])}) is not routed")
    failing = {mode for row in found for mode, text in row["modes"].items() if text.startswith("eager:")}
    notes += [f"{', '.join(sorted(failing))}: eager fails, too"] if failing else []
    wrong = {
        f"{mode}: {text}" for row in found for mode, text in row["modes"].items() if not row["equal"] and _bad(text)
    }
    return "; ".join(filter(None, [*notes, *sorted(wrong)])).replace("|", "/")


def _bad(text: str) -> bool:
    return text != "ok" and not text.startswith(("eager:", "discrete:"))
