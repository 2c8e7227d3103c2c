"""Confidence interval of a speed-up measured in pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES = 2000
_MIN_PAIRS = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio over all pairs, its interval at `level`, and the spread of single pairs (median, p25, p75).

    low, high: None below five pairs, where no interval can be honest.
    """

    value: float
    low: float | None
    high: float | None
    level: float
    pairs: int
    median: float
    p25: float
    p75: float


def ratio_interval(
    pairs: Sequence[tuple[float, float, float, float]], *, level: float = 0.95, seed: int = 0
) -> Estimate | None:
    """Ratio of rates (Σa/Σb) / (Σc/Σd) over pairs (a tokens, b seconds | c tokens, d seconds).

    Interval: percentile bootstrap that resamples whole pairs, on the logarithm of the ratio, with its percentiles
    widened for few pairs (expanded percentile interval, Hesterberg 2015, arXiv 1411.5279, section 'expanded').
    Deterministic for a seed. None when a sum is zero.
    """
    data = np.asarray(pairs, dtype=np.float64).reshape(-1, 4)
    data = data[(data > 0).all(axis=1)]
    count = len(data)
    if not count:
        return None
    single = data[:, 0] * data[:, 3] / (data[:, 1] * data[:, 2])
    p25, median, p75 = (float(q) for q in np.quantile(single, (0.25, 0.5, 0.75)))
    low = high = None
    if count >= _MIN_PAIRS:
        rng = np.random.default_rng(seed)
        # Multinomial weights are the resampled pairs' multiplicities: [resamples, pairs] @ [pairs, 4].
        sums = rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES) @ data
        logs = np.log(sums[:, 0] * sums[:, 3] / (sums[:, 1] * sums[:, 2]))
        tail = _expanded_tail((1 - level) / 2, count)
        low, high = (float(math.exp(q)) for q in np.quantile(logs, (tail, 1 - tail)))
    return Estimate(_ratio(data.sum(axis=0)), low, high, level, count, median, p25, p75)


def _ratio(sums: np.ndarray) -> float:
    return float(sums[0] * sums[3] / (sums[1] * sums[2]))


def _expanded_tail(tail: float, count: int) -> float:
    """The percentile that makes a bootstrap interval as wide as a t interval with count − 1 degrees of freedom."""
    normal = NormalDist()
    z, freedom = normal.inv_cdf(1 - tail), count - 1
    # Student's t quantile by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-math.sqrt(count / freedom) * t)
