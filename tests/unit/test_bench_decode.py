"""The benchmark of decoding: from options to record and table, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import cli
from hf_flash_cupy.bench import decode, peers, record, report
from hf_flash_cupy.bench.decode import DecodeRow

runner = CliRunner()


def sample(**changes: dict[str, float]) -> DecodeRow:
    times = {"cupy_fa2": 10.0, "cudnn": 12.5, "flash": 20.0}
    return DecodeRow(1, 4096, **{"microseconds": times, "cleared": {"cupy_fa2": 15.0}, **changes})  # type: ignore[arg-type]


def test_the_rows_are_those_of_the_targets() -> None:
    assert {DecodeRow(*size).label for size in decode.ROWS} == {
        f"B{batch} KV{keys} H32/8 D128 bfloat16" for batch, keys in ((1, 4096), (1, 65536), (16, 4096), (64, 8192))
    }
    assert DecodeRow(1, 65536).cache_bytes == 2 * 65536 * 8 * 128 * 2


def test_a_row_shows_both_times_and_the_best_peer() -> None:
    head, lines = decode.table([sample()])
    assert head[1:] == ["cupy_fa2", "SDPA cuDNN", "SDPA flash", "time of cupy_fa2 / best peer"]
    assert next(lines)[1:] == ["10.0 (15.0)", "12.5", "20.0", "0.800"]
    _, lines = decode.table([sample(microseconds={"cupy_fa2": 10.0})])
    assert next(lines)[-1] == "–"


def test_whoever_fails_is_named_and_the_rest_race(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"cudnn": lambda shape, device: lambda q, k, v: torch.zeros_like(q)}
    monkeypatch.setattr(peers, "IMPLEMENTATIONS", peers.IMPLEMENTATIONS | wrong)
    row = DecodeRow(1, 64)
    decode.measure(row, ("flash", "cudnn", "flash_attn"), 1, 1.0, "cpu")
    assert "differs from torch" in row.failed["cudnn"]
    assert "not installed" in row.failed["flash_attn"]
    assert set(row.microseconds) == {"flash"}


@pytest.mark.slow
def test_the_smoke_run_goes_from_options_to_record(tmp_path: Path) -> None:
    path, table = tmp_path / "record.json", tmp_path / "table.md"
    options = ["--smoke", "--peers", "cupy_fa2,flash", "--out", str(path), "--markdown", str(table)]
    answer = runner.invoke(cli.app, ["bench", "--preset", "decode", *options], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    (row,) = record.read(path).decode
    assert row.failed == {}
    assert set(row.microseconds) == {"cupy_fa2", "flash"}
    assert next(report.grids(record.read(path))).title.startswith("Decoding, µs (smoke run on a CPU")
    assert row.label in table.read_text()


def test_options_of_other_presets_are_refused() -> None:
    answer = runner.invoke(cli.app, ["bench", "--preset", "decode", "--smoke", "--dims", "64"])
    assert answer.exit_code != 0
    assert "its own shapes" in answer.output
