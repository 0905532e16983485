"""Means with their intervals, and two rules compared on the same samples.

Everything is of strata: the tasks of a benchmark, each of which weighs the same however many samples it has.
A single task is one stratum. Samples are resampled within their strata.

Shape letters: R resamples, N samples of a stratum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inertiakv.models.extras import install

RESAMPLES = 10_000
CONFIDENCE = 0.95
SAME = 1e-9
"""Scores go from 0 to 1; what is closer than this is the same, up to rounding."""

Strata = Sequence[Sequence[float] | np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A mean of the strata's means, and its bootstrap interval."""

    mean: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Comparison:
    """One rule minus another, on the samples that both have answered."""

    difference: float
    low: float
    high: float
    pairs: int
    wins: int
    ties: int
    losses: int
    t: float
    """NaN, as `p` is, where there is no t-test: see `t_test`."""
    p: float


def estimate(strata: Strata, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean and its percentile interval. No stratum is without samples."""
    means_R = bootstrap(strata, resamples=resamples, seed=seed)
    mean = float(np.mean([np.mean(stratum) for stratum in strata]))
    tail = (1 - CONFIDENCE) / 2
    low, high = (round(float(end), 6) for end in np.quantile(means_R, (tail, 1 - tail)))  # float32 products
    return Estimate(mean, low, high, sum(map(len, strata)))


def compare(differences: Strata) -> Comparison:
    """What the differences of paired scores say. Pairs are resampled as pairs."""
    found, every = estimate(differences), np.concatenate(differences)
    wins, losses = int((every > SAME).sum()), int((every < -SAME).sum())
    counts = (found.samples, wins, found.samples - wins - losses, losses)
    return Comparison(found.mean, found.low, found.high, *counts, *t_test(differences))


def bootstrap(strata: Strata, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """means_R: the mean of the strata's means, in each of the resamples."""
    assert all(map(len, strata))
    total_R = np.zeros(resamples)
    for number, values_N in enumerate(strata):
        counts_RN = _counts(len(values_N), number, resamples, seed)
        total_R += counts_RN @ np.asarray(values_N, np.float32) / len(values_N)
    return total_R / len(strata)


def t_test(strata: Strata) -> tuple[float, float]:
    """t and the two-sided p of the hypothesis that the mean of the strata's means is 0.

    Of one stratum this is the paired t-test. Of several, variances are the strata's own and the degrees of
    freedom are Welch and Satterthwaite's. NaN for both where there is no such test: a stratum has a single
    pair, or all of a stratum's differences are equal in every stratum.
    """
    try:
        from scipy.special import stdtr
    except ImportError as error:
        raise ValueError(f"the paired t-test needs scipy: {install('eval')}") from error
    values = [np.asarray(stratum, np.float64) for stratum in strata]
    if min(map(len, values)) < 2:
        return math.nan, math.nan
    variance = np.array([0.0 if np.ptp(v) < SAME else v.var(ddof=1) / len(v) for v in values])
    if not variance.any():
        return math.nan, math.nan
    freedom = variance.sum() ** 2 / (variance**2 / [len(v) - 1 for v in values]).sum()
    t = sum(v.mean() for v in values) / math.sqrt(variance.sum())
    return float(t), float(2 * stdtr(freedom, -abs(t)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: the chance of any false finding among them stays below the adjusted p.

    A comparison without a p (NaN) has none afterwards, but counts as one that was made.
    """
    adjusted, worst = list(p_values), 0.0
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(known):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p))
        adjusted[i] = worst
    return adjusted


@functools.lru_cache(maxsize=16)
def _counts(samples: int, stratum: int, resamples: int, seed: int) -> np.ndarray:
    """counts_RN: how often each resample has each sample. The same for all means of so many samples, so that
    a mean of resamples is a product with it; another one for each stratum, since these are independent."""
    drawn_RN = np.random.default_rng([seed, stratum, samples]).integers(samples, size=(resamples, samples))
    drawn_RN += samples * np.arange(resamples)[:, None]
    counts = np.bincount(drawn_RN.ravel(), minlength=resamples * samples)
    return counts.reshape(resamples, samples).astype(np.float32)
