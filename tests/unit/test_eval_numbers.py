"""nll, divergence and standard errors against plain float64 formulas (cases P01, P12)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_flash_cupy.evaluation import scoring, statistics

ROWS, VOCAB = 37, 101


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (5 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.fixture(params=[1 << 22, 3 * VOCAB, 1], ids=["one chunk", "three rows", "a row"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk_size")
class TestScoring:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_nll_is_that_of_a_float64_log_softmax(self, dtype: torch.dtype) -> None:
        x, targets = logits(dtype=dtype), torch.arange(ROWS)
        expected = -x.double().log_softmax(-1)[torch.arange(ROWS), targets]
        torch.testing.assert_close(scoring.token_nll(x, targets), expected, rtol=0, atol=1e-14)

    def test_divergence_is_the_kl_sum(self) -> None:
        p, q = logits(0), logits(1)
        found = scoring.divergence(p, q)
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        torch.testing.assert_close(found.kl, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-12, atol=1e-14)
        assert torch.equal(found.same_top1, p.argmax(-1) == q.argmax(-1))
        assert found.max_abs_dlogit == pytest.approx(float((p - q).abs().max()), rel=1e-6)

    def test_equal_logits_differ_by_nothing_even_where_they_are_masked(self) -> None:
        p = logits()
        p[:, 7] = -math.inf
        found = scoring.divergence(p, p.clone())
        assert found.max_abs_dlogit == 0
        assert found.kl.abs().max() == 0
        assert found.same_top1.all()

    def test_a_nan_in_any_chunk_shows(self) -> None:
        q = logits()
        q[ROWS // 2, 3] = math.nan
        found = scoring.divergence(logits(), q)
        assert math.isnan(found.max_abs_dlogit)
        assert found.kl.isnan().nonzero().flatten().tolist() == [ROWS // 2]
        assert scoring.divergence(q, q).kl.isnan().nonzero().flatten().tolist() == [ROWS // 2]
        nll = scoring.token_nll(q, torch.zeros(ROWS, dtype=torch.long))
        assert nll.isnan().nonzero().flatten().tolist() == [ROWS // 2]


class TestStatistics:
    VALUES = np.array([1.0, 2.0, 4.0, 8.0, 3.0, 9.0, 1.0])
    WINDOWS = np.array([0, 0, 0, 1, 1, 2, 2])

    def test_a_short_last_window_counts_by_its_tokens(self) -> None:
        """P01: the mean of window means would weigh the last window's single token like the other seven."""
        nll, windows = np.array([1.0] * 7 + [8.0]), np.array([0] * 7 + [1])
        of_means = np.mean([nll[windows == w].mean() for w in (0, 1)])
        assert of_means == 4.5
        assert statistics.mean(nll, np.ones(8)) == 15 / 8

    def test_the_naive_error_is_the_standard_error_of_the_mean(self) -> None:
        expected = self.VALUES.std(ddof=1) / math.sqrt(len(self.VALUES))
        assert statistics.naive_error(self.VALUES, np.ones(7)) == pytest.approx(expected, rel=1e-14)
        assert statistics.naive_error(self.VALUES[:1], np.ones(1)) is None

    def test_the_cluster_error_adds_the_deviations_of_a_window_before_squaring(self) -> None:
        deviations = self.VALUES - self.VALUES.mean()
        sums = [deviations[w == self.WINDOWS].sum() for w in range(3)]
        expected = math.sqrt(3 / 2 * sum(s * s for s in sums)) / 7
        assert statistics.cluster_error(self.VALUES, np.ones(7), self.WINDOWS) == pytest.approx(expected, rel=1e-14)
        assert statistics.cluster_error(self.VALUES, np.ones(7), np.zeros(7, int)) is None

    def test_the_cluster_error_covers_the_truth_where_the_naive_one_does_not(self) -> None:
        """Windows with a common shift: over many draws the mean's real spread is the cluster error's."""
        rng = np.random.default_rng(0)
        windows, weights = np.repeat(np.arange(20), 30), np.ones(600)
        means, naive, cluster = [], [], []
        for _ in range(400):
            x = rng.normal(size=20)[windows] + rng.normal(size=600)
            means.append(statistics.mean(x, weights))
            naive.append(statistics.naive_error(x, weights))
            cluster.append(statistics.cluster_error(x, weights, windows))
        assert np.mean(cluster) == pytest.approx(np.std(means), rel=0.1)
        assert np.mean(naive) < 0.5 * np.std(means)

    @given(values=st.lists(st.floats(0, 20), min_size=4, max_size=30), data=st.data())
    def test_weights_count_like_repetitions_in_the_mean(self, values: list[float], data: st.DataObject) -> None:
        weights = data.draw(st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values)))
        repeated = np.repeat(values, weights)
        found = statistics.mean(np.array(values), np.array(weights, float))
        assert found == pytest.approx(repeated.mean(), rel=1e-12, abs=1e-12)

    def test_the_running_value_is_the_final_one(self) -> None:
        running = statistics.RunningPerplexity()
        for window in range(3):
            nll = self.VALUES[window == self.WINDOWS]
            running.add(nll, len(nll))
        value = math.exp(self.VALUES.mean())
        error = statistics.cluster_error(self.VALUES, np.ones(7), self.WINDOWS)
        assert error is not None
        assert str(running) == f"ppl {value:.3f} ± {value * error:.3f}"

    def test_a_perplexity_beyond_a_float_is_none(self) -> None:
        assert statistics.perplexity(710.0) is None
        assert statistics.perplexity(math.inf) is None
        assert statistics.perplexity(math.nan) is None
        assert statistics.perplexity(1.0) == math.e
