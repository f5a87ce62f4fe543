"""Counting through the real loop, with a model whose logits are a table (cases P01, P03, P07)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from eval_fixture import TableModel, random_ids, random_table, table_nll

from hf_flash_cupy.evaluation import meters
from hf_flash_cupy.evaluation.outcome import NumericalFailure
from hf_flash_cupy.evaluation.protocols import PROTOCOLS, Window, make_windows
from hf_flash_cupy.evaluation.runner import Plan, Runner
from hf_flash_cupy.jit import module

TABLE = random_table()
IDS = random_ids(50)
PREFIX = 4


def plan(
    name: str = "strided",
    context: int = 16,
    stride: int = 8,
    batch_size: int = 1,
    documents: list[int] | None = None,
) -> Plan:
    prefix = (PREFIX,) if PROTOCOLS[name].needs_prefix else ()
    windows = make_windows(PROTOCOLS[name], documents or [len(IDS)], context, stride, len(prefix))
    return Plan(IDS, windows, context, prefix, batch_size)


def run(model: TableModel, plan: Plan, attns: tuple[str, ...] = ("eager",)) -> Runner:
    runner = Runner(model, plan, attns)
    runner.run()
    return runner


class TestCounting:
    @pytest.mark.parametrize("name", PROTOCOLS)
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_each_scored_token_has_the_nll_of_the_table(self, name: str, batch_size: int) -> None:
        cut = plan(name, batch_size=batch_size)
        tally = run(TableModel(TABLE), cut).tallies["eager"]
        expected = table_nll(TABLE, [PREFIX, *IDS])  # the first is only scored behind a prefix
        for window, nll in zip(cut.windows, tally.nll, strict=True):
            assert nll is not None
            np.testing.assert_allclose(nll, expected[window.scored_from : window.end], rtol=0, atol=1e-12)

    def test_the_perplexity_is_that_of_all_tokens_not_the_mean_of_windows(self) -> None:
        cut = plan("disjoint")
        nll = [values for values in run(TableModel(TABLE), cut).tallies["eager"].nll if values is not None]
        flat = np.concatenate(nll)
        expected = np.delete(table_nll(TABLE, IDS), [15, 31, 47])
        assert math.exp(flat.mean()) == pytest.approx(math.exp(expected.mean()), rel=1e-12)
        assert abs(np.mean([values.mean() for values in nll]) - expected.mean()) > 1e-3

    def test_the_model_is_never_fed_more_than_the_context(self) -> None:
        for name in PROTOCOLS:
            model = TableModel(TABLE)
            run(model, plan(name))
            assert max(length for _, length in model.fed) == 16

    def test_models_without_logits_to_keep_give_the_same(self) -> None:
        class Plain(TableModel):
            def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> Any:  # type: ignore[override]
                return super().forward(input_ids, use_cache)

        kept, plain = (run(cls(TABLE), plan()).tallies["eager"].nll for cls in (TableModel, Plain))
        for a, b in zip(kept, plain, strict=True):
            np.testing.assert_array_equal(a, b)


class TestBatches:
    """P07: documents of 5 to 60 tokens, any batch size: nothing is padded, so nothing can depend on it."""

    DOCUMENTS = (5, 8, 5, 8, 5, 5, 14)

    @pytest.mark.parametrize("batch_size", [1, 4, 16])
    def test_no_row_is_padded(self, batch_size: int) -> None:
        cut = plan(batch_size=batch_size, documents=list(self.DOCUMENTS))
        model = TableModel(TABLE)
        tally = run(model, cut).tallies["eager"]
        assert sum(rows * length for rows, length in model.fed) == sum(w.end - w.begin for w in cut.windows)
        assert max(rows for rows, _ in model.fed) <= batch_size
        for window, nll in zip(cut.windows, tally.nll, strict=True):
            expected = table_nll(TABLE, IDS[window.begin : window.end])
            np.testing.assert_allclose(nll, expected[window.scored_from - window.begin - 1 :], atol=1e-12)

    def test_every_window_is_in_exactly_one_batch(self) -> None:
        cut = plan(batch_size=4, documents=list(self.DOCUMENTS))
        assert sorted(index for batch in cut.batches() for index in batch) == list(range(len(cut.windows)))


class TestComparison:
    def test_an_implementation_is_compared_with_the_first_on_the_same_tokens(self) -> None:
        other = random_table(seed=1)
        model = TableModel(TABLE, {"other": lambda _logits, ids: other[ids]})
        runner = run(model, plan("disjoint"), ("eager", "other"))
        log_p, log_q = TABLE.double().log_softmax(-1), other.double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
        tally, scored = (
            runner.tallies["other"],
            np.concatenate([np.arange(w.begin, w.end - 1) for w in runner.plan.windows]),
        )
        np.testing.assert_allclose(np.concatenate(tally.kl), kl[IDS[scored]], rtol=1e-9)
        same = (TABLE.argmax(-1) == other.argmax(-1)).numpy()
        assert tally.same_top1 == same[IDS[scored]].sum()
        assert tally.max_abs_dlogit == pytest.approx(float((TABLE - other).abs()[IDS[scored]].max()))

    def test_the_speed_counts_the_fed_tokens_without_the_warm_up(self) -> None:
        cut = plan("disjoint")
        runner = Runner(TableModel(TABLE), cut, ["eager"])
        runner.warm_up(2)
        assert runner.tallies["eager"].cost.tokens == 0
        runner.run()
        assert runner.tallies["eager"].cost.tokens == len(IDS)
        assert runner.tallies["eager"].cost.seconds > 0


class TestCost:
    def test_the_peak_is_that_of_the_pass_without_what_was_held(self) -> None:
        cpu, held = torch.device("cpu"), torch.ones(8 << 20)  # 32 MiB
        cost, less = meters.Cost(), meters.Cost()
        for each, kept in ((cost, None), (less, held)):
            with meters.measure(each, cpu, tokens=3, held=kept):
                torch.ones(64 << 20)  # 256 MiB
        if cost.peak_bytes is None or less.peak_bytes is None:
            pytest.skip("this system has no high-water mark that can be reset")
        assert cost.peak_bytes > 256 << 20
        assert (cost.peak_bytes - less.peak_bytes) / 2**20 == pytest.approx(32, abs=8)
        with meters.measure(cost, cpu, tokens=3):
            pass
        assert cost.tokens == 6

    def test_compilation_is_not_counted_as_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = iter([module.Stats(0, 0, 0.0), module.Stats(1, 2, 1000.0)])
        monkeypatch.setattr(module, "stats", lambda: next(counters))
        cost = meters.Cost()
        with meters.measure(cost, torch.device("cpu"), tokens=1):
            pass
        assert (cost.compile_seconds, cost.cache_hits, cost.seconds) == (1000.0, 2, 0.0)


class TestFailure:
    def test_a_nan_names_the_window_and_the_token(self) -> None:
        def spoil(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            hit = ids[0].tolist() == IDS[16:32].tolist()  # the third window of stride 8
            return logits.index_fill(1, torch.tensor([11]), math.nan) if hit else logits

        model = TableModel(TABLE, {"bad": spoil})
        runner = Runner(model, plan(), ["eager", "bad"])
        with pytest.raises(NumericalFailure, match="bad: the nll of token 28 in window 2 is nan") as caught:
            runner.run()
        assert (caught.value.window, caught.value.token) == (2, 28)
        assert [nll is not None for nll in runner.tallies["bad"].nll[:3]] == [True, True, False]

    def test_the_windows_before_an_interruption_are_kept(self) -> None:
        def interrupt(_plan: Plan, batch: Any, _tallies: Any) -> None:
            if batch == [1]:
                raise KeyboardInterrupt

        runner = Runner(TableModel(TABLE), plan(), ["eager"])
        with pytest.raises(KeyboardInterrupt):
            runner.run(interrupt)
        assert [nll is not None for nll in runner.tallies["eager"].nll[:3]] == [True, True, False]


def test_a_single_window_is_fed_whole() -> None:
    model = TableModel(TABLE)
    run(model, Plan(IDS, [Window(0, 50, 1)], context=64))
    assert model.fed == [(1, 50)]
