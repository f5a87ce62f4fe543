"""Sums and standard errors, in float64.

Every estimate is a weighted mean of per-token values (weight 1 in every protocol but hf-doc), so that one
formula serves all: mean = sum(w x) / sum(w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mean(values: Floats, weights: Floats) -> float:
    return math.fsum(values * weights) / math.fsum(weights)


def naive_error(values: Floats, weights: Floats) -> float | None:
    """Standard error of ``mean`` with tokens as independent draws; None for fewer than two."""
    if len(values) < 2:
        return None
    deviations = weights * (values - mean(values, weights))
    return math.sqrt(len(values) / (len(values) - 1) * math.fsum(deviations**2)) / math.fsum(weights)


def cluster_error(values: Floats, weights: Floats, windows: NDArray[np.int64]) -> float | None:
    """Standard error of ``mean`` with windows as clusters; None for fewer than two.

    Tokens of one window share their text, so they are not independent and the naive error is too small. The
    estimator is the usual linearised one of a ratio of sums, with the factor W / (W - 1) for W windows.
    """
    count = len(np.unique(windows))
    if count < 2:
        return None
    deviations = np.bincount(windows, weights * (values - mean(values, weights)))
    return math.sqrt(count / (count - 1) * math.fsum(deviations**2)) / math.fsum(weights)


def perplexity(mean_nll: float) -> float | None:
    """exp of the mean nll; None where that is not a finite float."""
    try:
        value = math.exp(mean_nll)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


@dataclass(slots=True)
class RunningPerplexity:
    """The perplexity and its cluster error so far, in constant memory, for the progress bar."""

    windows: int = 0
    weight: float = 0.0
    total: float = 0.0
    _total_squared: float = 0.0
    _cross: float = 0.0
    _weight_squared: float = 0.0

    def add(self, nll: Floats, weight: float) -> None:
        """Add one window: the nll of its scored tokens and the weight of its mean."""
        total = float(np.mean(nll)) * weight
        self.windows += 1
        self.weight += weight
        self.total += total
        self._total_squared += total * total
        self._cross += total * weight
        self._weight_squared += weight * weight

    def __str__(self) -> str:
        if not self.weight:
            return ""
        average = self.total / self.weight
        value = perplexity(average)
        if value is None or self.windows < 2:
            return f"ppl {value:.3f}" if value else f"nll {average:.2f}"
        squares = self._total_squared - 2 * average * self._cross + average * average * self._weight_squared
        error = math.sqrt(max(squares, 0.0) * self.windows / (self.windows - 1)) / self.weight
        return f"ppl {value:.3f} ± {value * error:.3f}"
