"""``bench models``: rows, figures as they are shown and kept, and the whole of it on tiny models on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_flash_cupy import cli
from hf_flash_cupy.bench import models, models_command, record, report
from hf_flash_cupy.bench.models import ModelRow, Workload

runner = CliRunner()


def sample_row() -> ModelRow:
    row = ModelRow("gemma2-8k", models.WORKLOADS["gemma2-8k"].label)
    row.milliseconds = {"cupy_fa2": 36.0, "flex_attention": 48.0, "eager": 1040.0, "cublas": 1.4}
    row.extra_bytes = {"cupy_fa2": 584 << 20, "flex_attention": 584 << 20, "eager": 5620 << 20}
    row.failed = {"sdpa": "out of memory beside 3.0 GiB"}
    return row


class TestReport:
    def test_a_row_shows_time_memory_and_the_best_peer(self) -> None:
        whole = record.Record({"date": "2026-01-01", "command": "c", "versions": {}}, models=[sample_row()])
        text = report.markdown(whole)
        assert "| workload | cupy_fa2 | eager | flex_attention | sdpa | cublas | time of cupy_fa2 / best peer |" in text
        label = "Gemma-2-2B (8 layers): prefill, 1 × 8,192"
        figures = "36.0 (584) | 1,040 (5,620) | 48.0 (584) | OOM | 1.4 | 0.75 (flex_attention)"
        assert f"| {label} | {figures} |" in text
        assert f"| {label} | model | sdpa | out of memory beside 3.0 GiB |" in text
        assert "What the papers claim" not in text

    def test_a_record_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        whole = record.Record({"date": "2026-01-01", "command": "c", "versions": {}}, models=[sample_row()])
        whole.write(tmp_path / "record.json")
        assert record.read(tmp_path / "record.json").models == [sample_row()]

    def test_without_ours_or_without_others_there_is_no_best_peer(self) -> None:
        assert models.best_peer(ModelRow("a", "a", {"sdpa": 1.0})) is None
        assert models.best_peer(ModelRow("a", "a", {"cupy_fa2": 1.0, "cupy_fa1": 2.0, "cublas": 1.0})) is None


class TestWorkloads:
    def test_the_rows_are_those_of_the_table(self) -> None:
        labels = [workload.label for workload in models.WORKLOADS.values()]
        assert len(set(labels)) == len(labels)
        assert "Llama-3.2-1B: forward and backward, 16 × 1,024, packed" in labels
        assert "Llama-3.2-1B: generate 64, static cache, compiled, 1 × 512" in labels

    @pytest.mark.parametrize("name", models.MODELS)
    def test_models_exist_in_this_transformers(self, name: str) -> None:
        config = models.MODELS[name]()
        assert config.eos_token_id is None
        assert config.num_attention_heads % config.num_key_value_heads == 0

    def test_seldom_ones_take_part_when_asked_for(self) -> None:
        workload = models.WORKLOADS["train"]
        assert models.chosen(workload, models.IMPLEMENTATIONS, asked=True) == models.IMPLEMENTATIONS
        assert "eager" not in models.chosen(workload, models.IMPLEMENTATIONS, asked=False)

    def test_inputs_are_laid_out_as_named(self) -> None:
        padded = models.inputs(Workload("tiny Llama", "prefill", 4, 32, "left-padded"), 96, "cpu")
        assert padded["attention_mask"].sum(1).tolist() == [32, 28, 24, 20]
        assert (padded["attention_mask"].diff(dim=1) >= 0).all()
        packed = models.inputs(Workload("tiny Llama", "prefill", 3, 8, "packed"), 96, "cpu")
        assert packed["input_ids"].shape == (1, 24)
        assert packed["position_ids"].tolist() == [[*range(8)] * 3]


def measure(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], kind: Any = "prefill") -> ModelRow:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
    workload = Workload("tiny Llama", kind, 2, 12, "left-padded", "float32")
    return models.measure("tiny", workload, names, rounds=1, round_ms=0.1, device="cpu")


class TestMeasure:
    def test_whoever_fails_is_named_and_the_rest_race(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = models._named

        def named(model: Any, name: str, run: Any) -> Any:
            if name == "eager":
                raise RuntimeError("no eager today")
            return real(model, name, run)

        monkeypatch.setattr(models, "_named", named)
        row = measure(monkeypatch, ("sdpa", "eager", "cupy_fa2"))
        assert row.milliseconds.keys() == {"sdpa", "cupy_fa2"}
        assert row.failed == {"eager": "RuntimeError: no eager today"}

    def test_other_numbers_than_the_first_ones_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = models._named

        def named(model: Any, name: str, run: Any) -> Any:
            ours = real(model, name, run)
            return (lambda: ours() * 1.5) if name == "cupy_fa2" else ours

        monkeypatch.setattr(models, "_named", named)
        row = measure(monkeypatch, ("sdpa", "cupy_fa2"))
        assert row.failed["cupy_fa2"].startswith("its hidden states differ from the first implementation's by 0.5")

    def test_each_run_has_its_own_implementation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        from transformers import AttentionInterface

        for name in ("sdpa", "cupy_fa2"):
            function = AttentionInterface._global_mapping[name]
            spied = lambda *args, function=function, name=name, **kw: (asked.append(name), function(*args, **kw))[1]  # noqa: E731
            monkeypatch.setitem(AttentionInterface._global_mapping, name, spied)
        measure(monkeypatch, ("sdpa", "cupy_fa2"), "train")
        assert asked[:4] == ["sdpa", "sdpa", "cupy_fa2", "cupy_fa2"]
        assert asked[4:].count("sdpa") == asked[4:].count("cupy_fa2") > 0


@pytest.mark.slow
def test_the_smoke_run_goes_from_options_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "kernels")  # which the run sets, to be taken back after it
    path = tmp_path / "record.json"
    options = ["bench", "models", "--smoke", "--out", str(path), "--markdown", str(tmp_path / "table.md")]
    answer = runner.invoke(cli.app, options, catch_exceptions=False)
    assert answer.exit_code == 0
    found = record.read(path)
    assert [row.name for row in found.models] == list(models.SMOKE)
    for row in found.models:
        assert row.failed == {}
        assert set(row.milliseconds) == {"sdpa", "eager", "cupy_fa2"}
    assert "its times mean nothing" in (tmp_path / "table.md").read_text()


def test_a_spent_budget_leaves_rows_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FLASH_CUPY_CPU", "kernels")
    path = tmp_path / "record.json"
    answer = runner.invoke(cli.app, ["bench", "models", "--smoke", "--seconds", "0.000001", "--out", str(path)])
    assert answer.exit_code == 0
    assert record.read(path).not_run == [workload.label for workload in models.SMOKE.values()]


class TestAnotherRunGoesOn:
    """With a record that is there: a table may be measured in parts."""

    def begin(self, path: Path, **facts: Any) -> record.Record:
        environment = {
            "date": "2026-01-01",
            "command": "first",
            "card": "H200",
            "driver": "1",
            "versions": {"torch": "2"},
        }
        whole = record.Record(environment | facts, models=[sample_row()])
        whole.write(path)
        return whole

    def test_rows_and_commands_add_up(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        first = self.begin(path)
        second = record.Record(first.environment | {"command": "second", "date": "2026-01-02"})
        begun = models_command._begun(path, second)
        assert begun.models == [sample_row()]
        assert (begun.environment["command"], begun.environment["date"]) == ("first; second", "2026-01-02")
        assert models_command._begun(tmp_path / "none.json", second) is second

    def test_another_machine_is_refused_by_name(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        first = self.begin(path)
        for other in ({"card": "H100"}, {"driver": "2"}, {"versions": {"torch": "3"}}):
            with pytest.raises(typer.BadParameter, match="another machine, or of other versions"):
                models_command._begun(path, record.Record(first.environment | other))
        with pytest.raises(typer.BadParameter):
            models_command._begun(path, record.Record(first.environment, smoke=True))


@pytest.mark.parametrize(
    ("options", "message"), [(["--rows", "nothing"], "--rows nothing"), (["--peers", "flash"], "--peers flash")]
)
def test_wrong_options_are_named(options: list[str], message: str) -> None:
    answer = runner.invoke(cli.app, ["bench", "models", *options])  # told before a missing GPU is
    assert answer.exit_code == cli.WRONG_USE
    assert message in " ".join(answer.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_smoke_run_is_named() -> None:
    answer = runner.invoke(cli.app, ["bench", "models"])
    assert "--smoke" in str(answer.exception)
