"""docs/models.md shows the record of the model matrix, and the record is of the rows that there are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RUNS = json.loads((ROOT / "benchmarks" / "models.json").read_text())["runs"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_the_records_rendering(language: str) -> None:
    text = (ROOT / "docs" / ("models.md" if language == "en" else "models.zh.md")).read_text()
    begin, end = f"<!-- table: models {language} -->\n", "\n<!-- end of table -->"
    shown = text.partition(begin)[2].partition(end)[0]
    assert shown == load("model_table").model_table(language), "run scripts/refresh_docs.py"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['transformers']} {run['device']} {run['dtype']}")
def test_nine_of_ten_types_are_accelerated_and_all_are_right_or_explained(run: dict) -> None:
    rows = run["rows"]
    assert len(rows) >= 120
    assert [row["name"] for row in rows if not row["equal"] and not row["note"]] == []
    assert sum(row["accelerated"] for row in rows) >= 0.9 * len(rows)
    if run["device"] == "cpu":
        assert all(row["equal"] for row in rows)
        assert [row["name"] for row in rows if not row["accelerated"] and not row["note"]] == []


def test_both_versions_of_transformers_were_run() -> None:
    versions = {".".join(run["transformers"].split(".")[:2]) for run in RUNS}
    assert {"5.17", "5.24"} <= versions


def test_the_record_is_of_the_rows_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.integrations.matrix.registry import ROWS

    for run in RUNS:
        assert [row["name"] for row in run["rows"]] == list(ROWS), "run scripts/model_matrix.py"
