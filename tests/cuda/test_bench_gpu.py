"""The benchmark and ``explain`` on a GPU: who takes part, what memory is counted, and who runs out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_flash_cupy import cli
from hf_flash_cupy.bench import peers, record
from hf_flash_cupy.bench.measure import Measurement
from hf_flash_cupy.bench.shapes import DIRECTIONS, Shape

SHAPE = Shape(2, 1024, 4, 2, 64, True, "float16")
ROWS = SHAPE.batch * SHAPE.heads * SHAPE.seqlen
runner = CliRunner()


@pytest.fixture(scope="module")
def rows() -> dict[str, record.Row]:
    measurement = Measurement(SHAPE, "cuda", rounds=1, round_ms=1.0)
    names = ["cupy_fa1", "cupy_fa2", "flash", "eager", "math"]
    return {direction: measurement.row(direction, names) for direction in DIRECTIONS}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_our_kernels_and_torchs_take_part_beside_cublas(rows: dict[str, record.Row], direction: str) -> None:
    row = rows[direction]
    assert row.failed == {}
    assert row.unchecked == ""
    assert {"cupy_fa1", "cupy_fa2", "flash", "eager", "math", peers.CUBLAS} == set(row.milliseconds)
    assert all(time > 0 for time in row.milliseconds.values())
    assert set(row.peak_bytes) == set(row.milliseconds) - {peers.CUBLAS}


def test_memory_is_that_of_the_algorithms(rows: dict[str, record.Row]) -> None:
    """FlashAttention-2 takes nothing beyond out, -1 its fp32 O, l and m (and lse), standard attention the scores."""
    extra = rows["forward"].extra_bytes
    assert extra["cupy_fa2"] == 0
    assert ROWS * 64 * 4 <= extra["cupy_fa1"] <= ROWS * (64 * 4 + 16)
    assert extra["eager"] >= ROWS * SHAPE.seqlen * 2
    for direction in ("backward", "both"):  # fp32 dq, delta, and forward's lse; nothing quadratic
        assert 0 <= rows[direction].extra_bytes["cupy_fa2"] <= ROWS * (64 * 4 + 64 * 2 + 16)


def test_whoever_runs_out_of_memory_is_named_and_the_memory_is_there_again() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    heads = 64
    seqlen = 1 << (int((total / heads / 2) ** 0.5).bit_length())  # its scores do not fit, its inputs easily do
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    measurement = Measurement(Shape(1, seqlen, heads, heads, 16, False, "float16"), "cuda", 1, 1.0)
    row = measurement.row("forward", ["cupy_fa2", "eager"])
    assert set(row.milliseconds) == {"cupy_fa2", peers.CUBLAS}
    assert row.failed["eager"].startswith("out of memory beside ")
    del measurement
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**28


def test_the_command_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    options = ["--dims", "64", "--lengths", "512", "--tokens", "1024", "--hidden", "128", "--causal", "yes"]
    options += ["--peers", "cupy_fa1,flash,fa3", "--directions", "forward,backward", "--rounds", "1", "--round-ms", "1"]
    answer = runner.invoke(cli.app, ["bench", *options, "--out", str(path)])
    assert answer.exit_code == 0, answer.output
    found = record.read(path)
    assert not found.smoke
    assert found.environment["card"] in torch.cuda.get_device_name()
    assert found.environment["num_sms"] == torch.cuda.get_device_properties(0).multi_processor_count
    assert [row.direction for row in found.rows] == ["forward", "backward"]
    assert {"cupy_fa1", "cupy_fa2", "flash", peers.CUBLAS} <= set(found.rows[0].milliseconds)
    assert "has no backward" in found.rows[1].failed["fa3"]
    assert set(found.call_microseconds) == {"cupy_fa2", "sdpa", "elementwise"}


def test_explain_measures() -> None:
    answer = runner.invoke(cli.app, ["explain", "--seqlen", "512", "--heads", "4", "--dtype", "float16", "--json"])
    assert answer.exit_code == 0, answer.output
    content = json.loads(answer.output)
    for direction in ("forward", "backward"):
        for algorithm in ("standard", "fa1", "fa2"):
            found = content[direction][algorithm]
            assert found["time"].endswith(" µs")
            assert "TFLOP/s of useful work" in found["speed"]
            assert "bytes (measured)" in found
