"""From tallies to the report's objects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_flash_cupy.evaluation import gates, statistics
from hf_flash_cupy.evaluation.data import TokenStream
from hf_flash_cupy.evaluation.probes import LayerCalls
from hf_flash_cupy.evaluation.runner import Plan, Tally
from hf_flash_cupy.evaluation.schema import Comparison, ProtocolInfo, Result, Section, WindowInfo
from hf_flash_cupy.evaluation.statistics import Floats

_FLOOR_PAIR = {"eager", "sdpa"}  # both torch's own, so their difference is rounding and nothing else


class _Done:
    """The windows that every implementation has finished, as flat arrays over their scored tokens."""

    def __init__(self, plan: Plan, tallies: Sequence[Tally]) -> None:
        self.indices = [i for i in range(len(plan.windows)) if all(tally.nll[i] is not None for tally in tallies)]
        self.windows = [plan.windows[i] for i in self.indices]
        counts = [window.scored for window in self.windows]
        self.cluster = np.repeat(np.arange(len(counts)), counts)
        self.weights: Floats = np.repeat([window.weight / window.scored for window in self.windows], counts)
        spans = [np.arange(window.scored_from, window.end) for window in self.windows]
        self.tokens = np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def flat(self, per_window: Sequence[Floats | None]) -> Floats:
        return np.concatenate([values for i in self.indices if (values := per_window[i]) is not None])


def section(
    plan: Plan,
    tallies: Sequence[Tally],
    layers: dict[str, LayerCalls],
    stream: TokenStream,
    protocol: ProtocolInfo,
    dtype: str,
) -> Section:
    """What the finished windows show, nothing if there is none. The first tally is the baseline."""
    done = _Done(plan, tallies)
    if not done.indices or not math.fsum(done.weights):
        return Section(protocol=protocol, results=[], comparisons=[], noise_floor=None, windows=[])
    baseline = done.flat(tallies[0].nll)
    results = [_result(tally, layers[tally.attn], done, stream) for tally in tallies]
    pairs = [_comparison(tally, tallies[0].attn, baseline, done) for tally in tallies[1:]]
    floor = next((pair for pair in pairs if {pair.attn, pair.baseline} == _FLOOR_PAIR), None)
    limits = gates.tolerance(dtype, floor)
    pairs = [pair.model_copy(update={"verdict": gates.verdict(pair, limits)}) for pair in pairs]
    return Section(
        protocol=protocol.model_copy(update={"windows": len(done.indices), "scored": len(done.tokens)}),
        results=results,
        comparisons=pairs,
        noise_floor=next((pair for pair in pairs if {pair.attn, pair.baseline} == _FLOOR_PAIR), None),
        windows=_window_infos(done, tallies),
    )


def _result(tally: Tally, layers: LayerCalls, done: _Done, stream: TokenStream) -> Result:
    nll = done.flat(tally.nll)
    nll_sum = math.fsum(nll * done.weights)
    nll_mean = statistics.mean(nll, done.weights)
    reasons: dict[str, str] = {}
    per_unit: dict[str, float | None] = {}
    for unit, counts in (("byte", stream.utf8_bytes), ("word", stream.words)):
        total = math.fsum(counts[done.tokens] * done.weights) if counts is not None else 0
        per_unit[unit] = nll_sum / total if total else None
        if not total:
            reasons[f"{unit}_ppl"] = (
                "the tokenizer cannot map tokens to the text" if counts is None else "no whole unit scored"
            )
    values = {
        "ppl": statistics.perplexity(nll_mean),
        "word_ppl": None if per_unit["word"] is None else statistics.perplexity(per_unit["word"]),
        "byte_ppl": None if per_unit["byte"] is None else statistics.perplexity(per_unit["byte"]),
        "se_naive": statistics.naive_error(nll, done.weights),
        "se_window": statistics.cluster_error(nll, done.weights, done.cluster),
    }
    for name, value in values.items():
        if value is None:
            reasons.setdefault(name, "fewer than two windows" if name.startswith("se_") else "too large for a float")
    if tally.cost.peak_bytes is None:
        reasons["peak_bytes"] = "this system has no resettable high-water mark"
    return Result(
        attn=tally.attn,
        backend=layers.backend,
        calls_per_layer=layers.calls,
        launches_per_layer=layers.launches,
        nll_sum=nll_sum,
        nll_mean=nll_mean,
        bits_per_byte=None if per_unit["byte"] is None else per_unit["byte"] / math.log(2),
        tokens_per_s=tally.cost.tokens_per_second,
        seconds=tally.cost.seconds,
        peak_bytes=tally.cost.peak_bytes,
        compile_s=tally.cost.compile_seconds,
        cache_hits=tally.cost.cache_hits,
        null_reasons=reasons,
        **values,
    )


def _comparison(tally: Tally, baseline_name: str, baseline: Floats, done: _Done) -> Comparison:
    difference = done.flat(tally.nll) - baseline
    kl = done.flat(tally.kl)
    dlnppl = statistics.mean(difference, done.weights)
    extremes: dict[str, float] = {
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99, method="inverted_cdf")),
        "kl_max": float(kl.max()),
        "max_abs_dlogit": tally.max_abs_dlogit,
    }
    infinite = {name for name, value in extremes.items() if not math.isfinite(value)}
    return Comparison(
        attn=tally.attn,
        baseline=baseline_name,
        dlnppl=dlnppl,
        se_paired=statistics.naive_error(difference, done.weights),
        ppl_ratio=statistics.perplexity(dlnppl),
        top1=tally.same_top1 / sum(len(values) for values in tally.kl if values is not None),
        verdict="different",
        null_reasons=dict.fromkeys(sorted(infinite), "a logit is infinite in one of the two only"),
        **{name: None if name in infinite else value for name, value in extremes.items()},
    )


def _window_infos(done: _Done, tallies: Sequence[Tally]) -> list[WindowInfo]:
    def sums(index: int) -> dict[str, float]:
        return {tally.attn: math.fsum(values) for tally in tallies if (values := tally.nll[index]) is not None}

    return [
        WindowInfo(
            index=index,
            begin=window.begin,
            end=window.end,
            scored_from=window.scored_from,
            scored=window.scored,
            nll_sum=sums(index),
        )
        for index, window in zip(done.indices, done.windows, strict=True)
    ]
