"""What the benchmark shows and keeps, and the whole of it on a tiny shape through the CPU's kernels."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import cli
from hf_flash_cupy.bench import command, plots, record, report, shapes
from hf_flash_cupy.bench.claims import best_peer, claims
from hf_flash_cupy.bench.measure import Row
from hf_flash_cupy.bench.shapes import PRESETS, Shape
from hf_flash_cupy.errors import MissingDependency

ROOT = Path(__file__).parents[2]
TINY = Shape(1, 64, 4, 2, 32, True, "float32")
runner = CliRunner()


def sample_record() -> record.Record:
    """Made-up figures, to see how they are shown."""
    environment = {
        "date": "2026-01-01",
        "command": "c",
        "card": "NVIDIA H200",
        "num_sms": 132,
        "versions": {"torch": "2"},
    }
    few, many = Shape(1, 4096, 8, 8, 64, False), Shape(8, 8192, 16, 16, 64, True)
    forward = Row(few, "forward", {"cupy_fa1": 8.0, "cupy_fa2": 2.0, "eager": 20.0, "cublas": 1.0})
    forward.tflops = {"cupy_fa1": 100.0, "cupy_fa2": 400.0, "eager": 40.0, "cublas": 700.0}
    forward.failed = {"fa3": "fa3-fwd is not installed (x)"}
    backward = Row(many, "backward", {"cupy_fa1": 4.0, "cupy_fa2": 2.0, "flash": 3.0})
    backward.tflops = {"cupy_fa1": 200.0, "cupy_fa2": 395.76, "flash": 260.0}
    backward.peak_bytes = {"cupy_fa1": 2 << 20, "cupy_fa2": 1 << 20, "flash": 1 << 20, "eager": 40 << 20}
    backward.extra_bytes = {"cupy_fa1": 1 << 20, "cupy_fa2": 0, "flash": 0, "eager": 39 << 20}
    backward.failed = {
        "eager": "out of memory (3.0 GiB held by inputs and the others' graphs)",
        "fa3": "fa3-fwd has no backward",
    }
    return record.Record(environment, [forward, backward], ["B1 S1 H1 D64 float16 both"])


class TestReport:
    def test_markdown_holds_every_figure_and_every_reason(self) -> None:
        text = report.markdown(sample_record())
        assert "| 64 | 1 | 8 | 4,096 | no | 100 | 400 | 40 | – | 700 | 0.10 (eager) |" in text
        assert "| 64 | 8 | 16 | 8,192 | yes | 200 | 396 | OOM | 260 | – | 0.67 (SDPA flash) |" in text
        assert "| 64 | 8 | 16 | 8,192 | yes | 2 (1) | 1 (0) | 40 (39) | 1 (0) | – |" in text
        assert "fa3-fwd is not installed" in text
        assert "out of memory (3.0 GiB" in text
        assert "B1 S1 H1 D64 float16 both" in text

    def test_claims_are_ratios_of_the_rows(self) -> None:
        found = [each.found for each in claims(sample_record())]
        assert found == [
            "forward 2.5× (1 rows)",
            "backward 20.0× (1 rows)",
            "forward 4.0× (1 rows), backward 2.0× (1 rows)",
            "forward 4.0× (1 rows), backward 2.0× (1 rows)",
            "cupy_fa1: forward 10 % (1 rows), backward 20 % (1 rows) of 989 TFLOP/s; "
            "cupy_fa2: forward 40 % (1 rows), backward 40 % (1 rows) of 989 TFLOP/s",
        ]

    def test_best_peer_is_neither_ours_nor_cublas(self) -> None:
        forward, backward = sample_record().rows
        assert best_peer(forward) == ("eager", 0.1)
        assert best_peer(backward) == ("flash", 2 / 3)
        assert best_peer(Row(TINY, "forward", {"cupy_fa2": 1.0, "cublas": 1.0})) is None

    def test_a_record_survives_the_disk(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "record.json"
        original = sample_record()
        original.rows.append(Row(Shape(1, 40, 4, 2, 16, True, packed=(17, 1, 22)), "forward", {"cupy_fa2": 1.0}))
        original.write(path)
        again = record.read(path)
        assert again == original
        assert again.find("backward", seqlen=8192, causal=True) == original.rows[1]
        assert again.find("backward", seqlen=512) is None

    def test_records_of_the_first_version_are_read(self) -> None:
        old = record.read(ROOT / "benchmarks" / "2026-11-30-h200-forward.json")
        row = old.find("forward", head_dim=64, seqlen=1024, causal=False)
        assert row is not None
        assert round(row.tflops["cupy_fa2"]) == 294
        assert row.extra_bytes == {"cupy_fa2": 0}

    def test_drawings_are_of_one_kind_each_and_know_what_varies(self) -> None:
        panels = dict(plots.panels(sample_record()))
        assert list(panels) == ["backward-d64-causal-bfloat16", "forward-d64-full-bfloat16"]
        rows = [Row(Shape(1, 4096, heads, heads, 64, False), "forward") for heads in (1, 8)]
        assert plots.axis_of(rows) == ("batch × heads", [1, 8])
        rows = [Row(Shape(1, length, 8, 8, 64, False), "forward") for length in (512, 1024)]
        assert plots.axis_of(rows) == ("sequence length", [512, 1024])

    def test_drawings_are_files(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        paths = plots.draw(sample_record(), tmp_path)
        assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 2

    def test_without_matplotlib_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(MissingDependency, match=r"hf-flash-cupy\[plots\]"):
            plots.pyplot()


class TestCommand:
    @pytest.fixture
    def smoke(self, tmp_path: Path) -> record.Record:
        path = tmp_path / "record.json"
        answer = runner.invoke(
            cli.app, ["bench", "--smoke", "--out", str(path), "--markdown", str(tmp_path / "table.md")]
        )
        assert answer.exit_code == 0, answer.output
        assert "its times mean nothing" in answer.output
        assert "its times mean nothing" in (tmp_path / "table.md").read_text()
        return record.read(path)

    @pytest.mark.slow
    def test_the_smoke_run_measures_our_kernels_and_says_that_it_means_nothing(self, smoke: record.Record) -> None:
        assert smoke.smoke
        assert smoke.environment["card"] == "CPU"
        assert smoke.environment["versions"]["torch"] == torch.__version__
        assert [(row.shape.seqlen, row.direction) for row in smoke.rows] == [
            (s, d) for s in (64, 48) for d in ("forward", "backward", "both")
        ]
        assert smoke.not_run == []
        for row in smoke.rows:
            assert row.failed == {}
            assert set(row.milliseconds) == {"cupy_fa1", "cupy_fa2", "eager", "math"}

    def test_a_spent_budget_leaves_rows_out_by_name(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        options = ["bench", "--smoke", "--seconds", "0.000001", "--out", str(path), "--peers", "eager"]
        assert runner.invoke(cli.app, options).exit_code == 0
        left = json.loads(path.read_text())["not_run"]
        assert left == [f"{s.label} {d}" for s in PRESETS["smoke"].shapes for d in shapes.DIRECTIONS]

    def test_the_budget_shortens_rounds(self) -> None:
        def settings(seconds: float) -> command.Settings:
            return command.Settings((TINY,) * 4, ("forward",), ("eager",) * 5, 6, 40.0, seconds, "cuda")

        assert settings(0).affordable_ms() == 40.0
        assert settings(1000).affordable_ms() == 40.0
        assert settings(2.88).affordable_ms() == pytest.approx(2.88 / 2 / (4 * 6 * 6) * 1e3)
        assert settings(0.1).affordable_ms() == 4.0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--preset", "nothing"], "--preset nothing"),
            (["--peers", "eager,none"], "--peers none"),
            (["--directions", "up"], "--directions up"),
            (["--dims", "x"], "--dims x"),
            (["--dims", "64", "--causal", "perhaps"], "--causal perhaps"),
            (["--dims", "64", "--dtype", "int8"], "--dtype int8"),
            (["--kv-heads", "3"], "--kv-heads 3"),
            (["--kv-heads", "-2"], "Invalid value for '--kv-heads'"),
        ],
    )
    def test_wrong_options_are_named(self, options: list[str], message: str) -> None:
        answer = runner.invoke(cli.app, ["bench", *options])  # told before a missing GPU is
        assert answer.exit_code == cli.WRONG_USE
        assert message in " ".join(answer.output.replace("│", " ").split())

    @pytest.mark.parametrize("option", [["--dims", "64"], ["--lengths", "64"]])
    def test_a_smoke_run_takes_no_shapes(self, option: list[str]) -> None:
        answer = runner.invoke(cli.app, ["bench", "--smoke", "--seconds", "0.000001", *option])
        assert answer.exit_code == cli.WRONG_USE
        assert f"--smoke, {option[0]}:" in answer.output

    def test_titles_name_the_unit(self) -> None:
        found = sample_record()
        for smoke in (False, True):
            titles = [grid.title for grid in report.grids(replace(found, smoke=smoke))]
            assert titles[0].startswith("Forward, TFLOP/s of useful work")
            assert ("mean nothing" in titles[0]) == smoke

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_the_smoke_run_is_named(self) -> None:
        answer = runner.invoke(cli.app, ["bench"])
        assert isinstance(answer.exception, MissingDependency)
        assert "--smoke" in str(answer.exception)


def test_the_committed_records_name_commands_that_exist() -> None:
    """A record's command can be repeated: its options are still understood."""
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        words = shlex.split(json.loads(path.read_text()).get("command", ""))
        if any(word.endswith("benchmark.py") for word in words):
            assert (ROOT / "scripts" / "benchmark.py").exists()
            known = {"--out", "--preset", "--dims", "--lengths", "--causal", "--tokens", "--hidden", "--kv-heads"}
            known |= {
                "--dtype",
                "--directions",
                "--peers",
                "--rounds",
                "--round-ms",
                "--seconds",
                "--markdown",
                "--plot",
                "--rows",
            }
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, path.name
