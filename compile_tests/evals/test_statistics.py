"""Intervals and tests against scipy's, and against what is known of simulated data."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from inertiakv.evals.statistics import bootstrap, compare, estimate, holm, t_test

scipy_stats = pytest.importorskip("scipy.stats")

GRADES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def grades(seed: int, samples: int, chances: tuple[float, ...] = (0.3, 0.1, 0.2, 0.1, 0.3)) -> np.ndarray:
    return np.random.default_rng(seed).choice(GRADES, size=samples, p=chances)


@pytest.mark.parametrize("samples", [5, 40, 200])
def test_interval_of_a_mean_is_scipys(samples: int) -> None:
    values = grades(samples, samples)
    ours = estimate([values], seed=1)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    # Both are quantiles of 10,000 draws: apart by no more than a few of the distribution's steps.
    near = 0.18 * values.std() / math.sqrt(samples)
    assert ours.mean == pytest.approx(values.mean())
    assert ours.samples == samples
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=near)


def test_interval_of_paired_differences_is_scipys() -> None:
    a, b = grades(1, 60), grades(2, 60)
    ours = compare([a - b])
    theirs = scipy_stats.bootstrap(
        (a, b), lambda x, y, axis: np.mean(x - y, axis), paired=True, method="percentile", n_resamples=10_000
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_interval_is_seeded_and_of_equals_has_no_width() -> None:
    values = grades(3, 30)
    assert estimate([values]) == estimate([values])
    assert (bootstrap([values], seed=1) != bootstrap([values], seed=2)).any()
    one, same = estimate([[0.25]]), estimate([[0.3] * 20])
    assert (one.mean, one.low, one.high, one.samples) == (0.25, 0.25, 0.25, 1)
    assert (same.low, same.high) == pytest.approx((0.3, 0.3))


def test_tasks_weigh_the_same_and_are_resampled_apart() -> None:
    few, many = grades(4, 10), grades(5, 400)
    both = estimate([few, many])
    assert both.mean == pytest.approx((few.mean() + many.mean()) / 2)
    assert both.samples == 410
    # The variance of a mean of independent means.
    spread = bootstrap([few, many]).std()
    assert spread == pytest.approx(math.sqrt(few.var() / 10 + many.var() / 400) / 2, rel=0.05)
    # Tasks of as many samples are resampled apart, too: the same resamples would double the variance.
    twice = bootstrap([many, many]).std()
    assert twice == pytest.approx(math.sqrt(many.var() / 400 / 2), rel=0.05)


def test_intervals_cover_the_truth() -> None:
    """Of 400 simulated benchmarks of two tasks, about 95 % of the intervals hold the true mean."""
    chances = ((0.3, 0.1, 0.2, 0.1, 0.3), (0.1, 0.1, 0.2, 0.1, 0.5))
    truth = sum(float(GRADES @ c) for c in chances) / 2
    held = 0
    for trial in range(400):
        strata = [grades(2 * trial + i, 40, c) for i, c in enumerate(chances)]
        found = estimate(strata, resamples=1000)
        held += found.low <= truth <= found.high
    assert 0.91 < held / 400 < 0.98


def test_t_test_of_one_task_is_scipys_paired_one() -> None:
    a, b = grades(6, 30), grades(7, 30)
    theirs = scipy_stats.ttest_rel(a, b)
    assert t_test([a - b]) == pytest.approx((theirs.statistic, theirs.pvalue))


def test_t_test_of_two_tasks_is_welchs() -> None:
    """Of x and y, whether mean(x) + mean(y) is 0: whether x and -y have the same mean."""
    x, y = grades(8, 12) - 0.4, 2 * grades(9, 50) - 1
    theirs = scipy_stats.ttest_ind(x, -y, equal_var=False)
    assert t_test([x, y]) == pytest.approx((theirs.statistic, theirs.pvalue))


def test_p_is_that_of_permutations() -> None:
    differences = np.random.default_rng(10).normal(0.2, 0.6, 40)
    theirs = scipy_stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(0)
    )
    assert compare([differences]).p == pytest.approx(theirs.pvalue, abs=0.02)


def test_p_is_uniform_where_there_is_no_difference() -> None:
    p = [t_test([grades(2 * i, 25) - grades(2 * i + 1, 25)])[1] for i in range(400)]
    assert 0.02 < np.mean(np.array(p) < 0.05) < 0.09
    assert 0.4 < np.mean(p) < 0.6


def test_wins_ties_and_losses() -> None:
    found = compare([[0.5, -0.25, 0.0], [0.0, 0.1 + 0.2 - 0.3]])
    assert (found.wins, found.ties, found.losses, found.pairs) == (1, 3, 1, 5)
    assert found.difference == pytest.approx((0.25 / 3 + 0) / 2)


@pytest.mark.parametrize(
    "strata",
    [[[0.5]], [[0.0] * 8], [[-1.0] * 8], [[0.1 + 0.2, 0.3]], [[0.1, 0.3, 0.7], [0.5]]],
    ids=["one pair", "all ties", "all alike", "alike up to rounding", "a task of one pair"],
)
def test_there_is_no_t_test(strata: list[list[float]]) -> None:
    found = compare(strata)
    assert math.isnan(found.t)
    assert math.isnan(found.p)
    assert not math.isnan(found.difference + found.low + found.high)


def test_a_task_of_equal_differences_beside_another() -> None:
    """Adds certainty, not nothing."""
    varied = [0.5, 0.0, 0.25, 0.75]
    t, p = t_test([varied, [0.0, 0.0, 0.0]])
    assert (t, p) == pytest.approx(tuple(scipy_stats.ttest_1samp(varied, 0)))


def test_no_samples() -> None:
    with pytest.raises(AssertionError):
        estimate([[1.0], []])


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ValueError, match=r"needs scipy: pip install 'inertiakv\[eval\]'"):
        t_test([[0.0, 1.0]])


def test_holm() -> None:
    """The example of Holm's paper's kind: 0.01, 0.02, 0.03, 0.04 by 4, 3, 2, 1, never falling."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.001, 0.6, 0.7]) == pytest.approx([0.003, 1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
    first, second = holm([0.01, math.nan])
    assert first == pytest.approx(0.02)  # a comparison without a p was made all the same
    assert math.isnan(second)


def test_holm_keeps_false_findings_rare() -> None:
    """Of 500 families of ten true hypotheses, about 5 % have any finding."""
    p = np.random.default_rng(0).uniform(size=(500, 10))
    found = np.mean([min(holm(list(family))) < 0.05 for family in p])
    assert 0.03 < found < 0.07
