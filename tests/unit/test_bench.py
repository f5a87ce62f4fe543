"""The benchmark's orders, race, shapes and measurements, with small implementations on the CPU."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hf_flash_cupy.bench import measure, peers, race, record, report, shapes
from hf_flash_cupy.bench.measure import Measurement, Row
from hf_flash_cupy.bench.shapes import PRESETS, Shape

ROOT = Path(__file__).parents[2]


class TestOrders:
    @pytest.mark.parametrize("count", range(1, 13))
    def test_each_follows_each_other_equally_often(self, count: int) -> None:
        orders = race.balanced_orders(count)
        assert all(sorted(order) == list(range(count)) for order in orders)
        followers = [pair for order in orders for pair in pairwise(order)]
        expected = (1 if count % 2 == 0 else 2) if count > 1 else 0
        for first in range(count):
            for second in range(count):
                assert followers.count((first, second)) == (expected if first != second else 0)

    @pytest.mark.parametrize(("rounds", "count", "whole"), [(6, 4, 8), (6, 3, 6), (1, 5, 10), (12, 6, 12), (13, 6, 18)])
    def test_rounds_are_made_whole(self, rounds: int, count: int, whole: int) -> None:
        assert race.whole_rounds(rounds, count) == whole


class TestRace:
    def test_every_participant_runs_the_same_rounds_and_the_median_counts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []
        times = {"fast": 1.0, "slow": 4.0}

        def clock(run: race.Run, calls: int, device: str) -> float:
            name = str(run())
            ran.append(name)
            return times[name] * (100 if len(ran) == 5 else 1)  # one outlier

        monkeypatch.setattr(race, "milliseconds", clock)
        medians = race.race({"fast": lambda: "fast", "slow": lambda: "slow"}, rounds=6, round_ms=1.0, device="cpu")
        assert medians == times
        assert ran.count("fast") == ran.count("slow") == 7  # one to count the calls

    def test_a_failing_participant_is_named(self) -> None:
        def fail() -> None:
            raise RuntimeError("no kernel")

        with pytest.raises(race.Stopped) as stop:
            race.race({"good": lambda: None, "bad": fail}, rounds=1, round_ms=0.01, device="cpu")
        assert stop.value.name == "bad"
        assert str(stop.value.error) == "no kernel"


class TestShapes:
    def test_work_is_counted_as_in_the_papers(self) -> None:
        shape = Shape(2, 1024, 16, 16, 128, False)
        assert shape.flops("forward") == 4 * 2 * 16 * 1024**2 * 128
        assert Shape(2, 1024, 16, 4, 128, True).flops("forward") == shape.flops("forward") / 2
        assert shape.flops("backward") == 2.5 * shape.flops("forward")
        assert shape.flops("both") == shape.flops("forward") + shape.flops("backward")

    @pytest.mark.parametrize("window", [0, 5, 40])
    def test_a_window_counts_the_pairs_it_leaves(self, window: int) -> None:
        shape = Shape(1, 30, 2, 1, 16, True, head_dim_v=8, window=window)
        mask = peers.dense_mask(shape, "cpu")
        assert mask is not None
        assert shape.pairs == mask.sum()
        assert shape.flops("forward") == 2 * 2 * shape.pairs * (16 + 8)

    def test_the_papers_table_is_whole(self) -> None:
        preset = PRESETS["papers"]
        assert {(s.head_dim, s.seqlen, s.causal) for s in preset.shapes} == {
            (d, s, c) for d in (64, 128, 256) for s in (512, 1024, 2048, 4096, 8192, 16384) for c in (False, True)
        }
        assert {s.batch * s.seqlen for s in preset.shapes} == {16384}
        assert {s.heads * s.head_dim for s in preset.shapes} == {2048}
        assert preset.directions == ("forward", "backward", "both")

    def test_the_first_papers_table_has_128_heads(self) -> None:
        assert {(s.batch * s.heads, s.head_dim) for s in PRESETS["fa1"].shapes} == {(128, 64)}
        assert {"cupy_fa1", "cupy_fa2", "eager"} <= set(PRESETS["fa1"].implementations)

    def test_few_heads_lie_on_both_sides_of_the_number_of_sms(self) -> None:
        products = {s.batch * s.heads for s in PRESETS["few-heads"].shapes}
        assert {1, 8, 16} <= products
        assert min(products) < 108 < max(products)

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_name_what_exists(self, name: str) -> None:
        preset = PRESETS[name]
        assert set(preset.implementations) <= set(peers.IMPLEMENTATIONS)
        assert set(preset.directions) <= set(shapes.DIRECTIONS)
        assert all(s.heads % s.heads_k == 0 and s.dtype in shapes.DTYPES for s in preset.shapes)

    def test_key_heads_must_divide(self) -> None:
        assert [s.heads_k for s in shapes.with_heads_k(PRESETS["quick"].shapes, 8)] == [8] * 4
        with pytest.raises(ValueError, match="must divide the 16 heads"):
            shapes.with_heads_k([Shape(1, 512, 16, 16, 64, False)], 5)


TINY = Shape(1, 64, 4, 2, 32, True, "float32")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation for each way to fail, among two that work."""

    def make(error: BaseException | None, factor: float = 1.0) -> object:
        def builder(shape: Shape, device: str) -> peers.Attend:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                if error is not None:
                    raise error
                return factor * peers.torch_attention(shape, q, k, v)

            return attend

        return builder

    made = {
        "eager": peers.IMPLEMENTATIONS["eager"],
        "hungry": make(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")),
        "picky": make(RuntimeError("\n  No available kernel.  Aborting execution.\nmore")),
        "wrong": make(None, 1.5),
        "absent": peers.IMPLEMENTATIONS["fa3"],
        "right": make(None),
    }
    monkeypatch.setattr(peers, "IMPLEMENTATIONS", made)


class TestMeasurement:
    @pytest.mark.parametrize("direction", ["forward", "backward", "both"])
    def test_whoever_fails_is_named_with_the_reason_and_the_rest_race(self, broken: None, direction: str) -> None:
        row = Measurement(TINY, "cpu", rounds=1, round_ms=0.01).row(direction, list(peers.IMPLEMENTATIONS))
        assert set(row.milliseconds) == {"eager", "right"}
        assert all(time > 0 for time in row.milliseconds.values())
        assert row.tflops["eager"] == TINY.flops(direction) / row.milliseconds["eager"] / 1e9
        assert set(row.failed) == {"hungry", "picky", "wrong", "absent"}
        assert row.failed["hungry"] == "out of memory beside 0.0 GiB of inputs and the others' graphs"
        assert row.failed["picky"] == "RuntimeError: No available kernel.  Aborting execution."
        assert re.fullmatch(r"its (out|dq|dk|dv) differs from torch's by 0.5 of the largest value", row.failed["wrong"])
        assert "fa3-fwd is not installed" in row.failed["absent"]

    def test_who_fails_inside_the_race_is_taken_out_and_the_others_start_anew(self, broken: None) -> None:
        calls = 0

        def tiring(shape: Shape, device: str) -> peers.Attend:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls > 4:
                    raise torch.OutOfMemoryError("later")
                return peers.torch_attention(shape, q, k, v)

            return attend

        peers.IMPLEMENTATIONS["tiring"] = tiring
        row = Measurement(TINY, "cpu", rounds=2, round_ms=0.01).row("forward", ["tiring", "eager", "right"])
        assert set(row.milliseconds) == {"eager", "right"}
        assert "out of memory" in row.failed["tiring"]

    def test_windows_and_unequal_head_sizes_agree_with_torch(self) -> None:
        shape = Shape(2, 40, 4, 2, 16, True, "float32", head_dim_v=8, window=5)
        row = Measurement(shape, "cpu", 1, 1.0).row("forward", ["cupy_fa2", "eager", "flash"])
        assert set(row.milliseconds) == {"cupy_fa2", "eager"}
        assert not row.unchecked
        assert "window" in row.failed["flash"]

    @pytest.mark.parametrize("causal", [False, True])
    def test_packed_sequences_see_only_themselves(self, causal: bool) -> None:
        shape = Shape(1, 40, 4, 2, 16, causal, "float32", packed=(17, 1, 22))
        mask = peers.dense_mask(shape, "cpu")
        assert mask is not None
        assert mask.sum() == sum(n * (n + 1) // 2 if causal else n * n for n in shape.packed)
        assert shape.pairs == (17**2 + 1 + 22**2) * (0.5 if causal else 1)
        row = Measurement(shape, "cpu", 1, 1.0).row("forward", ["cupy_fa2", "eager", "cudnn", "flex"])
        assert set(row.milliseconds) == {"cupy_fa2", "eager"}
        assert not row.unchecked
        assert all("packed" in reason for reason in row.failed.values())

    def test_the_backward_gives_the_gradients_of_the_three_inputs(self) -> None:
        tensors = measure.Tensors.of(TINY, "cpu")
        attend = peers.IMPLEMENTATIONS["eager"](TINY, "cpu")
        run = measure.prepare(attend, "backward", tensors)
        again = measure.prepare(attend, "both", tensors)
        for first, second, third in zip(run(), run(), again(), strict=True):
            assert torch.equal(first, second)
            assert torch.equal(first, third)
        expected = torch.autograd.grad(peers.torch_attention(TINY, *tensors.leaves), tensors.leaves, tensors.dout)
        for found, wanted in zip(run(), expected, strict=True):
            assert (found - wanted).abs().max() < 1e-5

    @pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
    def test_a_wrong_gradient_is_named(self, wrong: str) -> None:
        measurement = Measurement(TINY, "cpu", rounds=1, round_ms=0.01)
        attend = peers.IMPLEMENTATIONS["eager"](TINY, "cpu")
        good = measure.prepare(attend, "both", measurement.tensors)()
        row = Row(TINY, "both")
        measurement._check(good, True, row)
        bad = tuple(x + (name == wrong) * x.abs().max() for name, x in zip(("dq", "dk", "dv"), good, strict=True))
        with pytest.raises(peers.Unavailable, match=f"its {wrong} differs from torch's by 1 "):
            measurement._check(bad, True, row)
        assert row.unchecked == ""

    def test_where_torch_fails_the_others_are_measured_and_that_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("all gone")

        monkeypatch.setattr(peers, "torch_attention", fail)
        measurement = Measurement(TINY, "cpu", rounds=1, round_ms=0.01)
        for direction in ("forward", "backward"):
            row = measurement.row(direction, ["eager"])
            assert set(row.milliseconds) == {"eager"}
            assert row.unchecked == "out of memory"
            assert "| out of memory |" in report.markdown(record.Record(record.environment("cpu", ["x"]), [row]))

    def test_nan_agrees_with_nothing(self) -> None:
        assert measure.disagreement(torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])) == float("inf")
        assert measure.disagreement(torch.zeros(3), torch.zeros(3)) == 0.0

    def test_results_are_counted_in_the_steps_of_the_allocator(self) -> None:
        tensors = measure.Tensors.of(Shape(1, 3, 2, 1, 32, False, "float32"), "cpu")
        assert measure.result_bytes("forward", tensors) == 1024  # 768 bytes of out
        assert measure.result_bytes("backward", tensors) == 1024 + 512 + 512
        assert measure.result_bytes("both", tensors) == 3072

    def test_extra_memory_is_what_a_call_takes_beyond_its_results(self) -> None:
        measurement = Measurement(TINY, "cpu", rounds=1, round_ms=0.01)
        out = 64 * 4 * 32 * 4
        row = Row(TINY, "forward", {"eager": 2.0}, peak_bytes={"eager": 5 * out, "gone": 1}, failed={"gone": "x"})
        measurement._complete(row)
        assert row.peak_bytes == {"eager": 5 * out}
        assert row.extra_bytes == {"eager": 4 * out}
        assert row.tflops == {"eager": TINY.flops("forward") / 2e9}

    def test_fa3_takes_no_part_in_the_backward(self) -> None:
        with pytest.raises(peers.Unavailable, match="no backward"):
            peers.make("fa3", TINY, "backward", "cpu")

    def test_a_compilers_error_is_one_line_without_folders_of_the_machine(self) -> None:
        error = RuntimeError(f"g++ -O2 {ROOT}/x.cu\n{ROOT}/cuda_src/a.cuh:9:1: error: no such type\nmore")
        assert measure.why(error) == "RuntimeError: cuda_src/a.cuh:9:1: error: no such type"
