"""Tolerances, verdicts and gates: when two implementations count as the same, and what makes a run fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flash_cupy.evaluation.schema import Comparison, Gate, Result, Section

# Mean KL between two correct bf16 paths (eager and sdpa) of the demo model on a CPU, for when no floor was
# measured.
_BF16_FLOOR = 1.45e-3
_FLOOR_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an implementation may be from the baseline: |d ln ppl| and mean KL in nats, top-1 agreement as
    a fraction.
    """

    dlnppl: float
    kl_mean: float
    top1: float


# bf16: the measured floor. fp16 has 8 times finer steps, so an eighth of the top-1 changes and 1/64 of the
# KL; rounded up.
_TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-6, 0.999),
    "float16": Tolerance(1e-3, 1e-4, 0.99),
    "bfloat16": Tolerance(5e-3, _FLOOR_FACTOR * _BF16_FLOOR, 0.95),
}
# Default relative tolerance of --expect-ppl, which compares with another machine's figure.
_EXPECT_RTOL = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 1e-2}


def tolerance(dtype: str, floor: Comparison | None = None) -> Tolerance:
    """The tolerance for ``dtype``; in 16 bits the mean KL may be three times the measured noise ``floor``."""
    limits = _TOLERANCES[dtype]
    if dtype == "float32" or floor is None or not floor.kl_mean:
        return limits
    return Tolerance(limits.dlnppl, _FLOOR_FACTOR * floor.kl_mean, limits.top1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The gates a user asked for; None = not asked."""

    max_ppl: float | None = None
    max_ppl_ratio: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None
    expect_ppl: float | None = None
    rtol: float | None = None
    min_speedup: float | None = None


def verdict(comparison: Comparison, limits: Tolerance) -> str:
    """``identical`` (every logit equal), ``within tolerance`` or ``different``."""
    if comparison.max_abs_dlogit == 0:
        return "identical"
    within = all(gate.ok for gate in _tolerance_gates(comparison, limits))
    return "within tolerance" if within else "different"


def gates(section: Section, dtype: str, limits: Limits, label: str = "") -> list[Gate]:
    """Every gate of one section: the tolerance of each comparison, and what ``limits`` asks. ``label`` ends
    each name.
    """
    found = list(_result_gates(section.results, dtype, limits))
    for comparison in section.comparisons:
        found += _comparison_gates(comparison, tolerance(dtype, section.noise_floor), limits)
    if limits.min_speedup is not None and section.results:
        found += _speed_gates(section.results, limits.min_speedup)
    return [Gate(name=f"{gate.name}{label}", value=gate.value, limit=gate.limit, ok=gate.ok) for gate in found]


def _at_most(name: str, value: float | None, limit: float) -> Gate:
    return Gate(name=name, value=value, limit=limit, ok=value is not None and value <= limit)


def _at_least(name: str, value: float | None, limit: float) -> Gate:
    return Gate(name=name, value=value, limit=limit, ok=value is not None and value >= limit)


def _result_gates(results: Sequence[Result], dtype: str, limits: Limits) -> Iterator[Gate]:
    for result in results:
        if limits.max_ppl is not None:
            yield _at_most(f"ppl {result.attn}", result.ppl, limits.max_ppl)
        if limits.expect_ppl is not None:
            off = None if result.nll_mean is None else abs(result.nll_mean - math.log(limits.expect_ppl))
            yield _at_most(f"|ln ppl - ln expected| {result.attn}", off, limits.rtol or _EXPECT_RTOL[dtype])


def _tolerance_gates(comparison: Comparison, allowed: Tolerance) -> list[Gate]:
    name = comparison.attn
    return [
        _at_most(f"|d ln ppl| {name}", abs(comparison.dlnppl), allowed.dlnppl),
        _at_most(f"KL mean {name}", comparison.kl_mean, allowed.kl_mean),
        _at_least(f"top-1 {name}", comparison.top1, allowed.top1),
    ]


def _comparison_gates(comparison: Comparison, allowed: Tolerance, limits: Limits) -> Iterator[Gate]:
    asked = Tolerance(
        allowed.dlnppl,
        allowed.kl_mean if limits.max_kl is None else limits.max_kl,
        allowed.top1 if limits.min_top1 is None else limits.min_top1,
    )
    yield from _tolerance_gates(comparison, asked)
    if limits.max_ppl_ratio is not None:
        yield _at_most(f"ppl ratio {comparison.attn}", comparison.ppl_ratio, limits.max_ppl_ratio)


def _speed_gates(results: Sequence[Result], limit: float) -> Iterator[Gate]:
    baseline = results[0].tokens_per_s
    for result in results[1:]:
        speedup = result.tokens_per_s / baseline if baseline and result.tokens_per_s else None
        yield _at_least(f"speedup {result.attn}", speedup, limit)
