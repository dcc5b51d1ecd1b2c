"""Intervals against the exact bootstrap and scipy's; the frontier against its definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvfold.evaluate.report.statistics import SAME_SIZE, estimate, frontier

scores = st.floats(0, 1).map(lambda x: round(x, 3))


def exact_means(values: list[float]) -> np.ndarray:
    """Mean of every resample there is, all equally likely."""
    return np.array([np.mean(drawn) for drawn in product(values, repeat=len(values))])


def covers(means: np.ndarray, end: float, share: float) -> bool:
    """Whether `end` is the exact quantile, give or take what 4,000 draws may miss it by (five sigma)."""
    slack = 5 * np.sqrt(share * (1 - share) / 4000)
    gap = 1e-9
    return np.mean(means <= end + gap) >= share - slack and np.mean(means >= end - gap) >= 1 - share - slack


@settings(max_examples=30, deadline=None)
@given(st.lists(scores, min_size=2, max_size=5))
def test_interval_is_that_of_every_resample(values):
    found = estimate(values, ["a"] * len(values))
    assert found.mean == pytest.approx(np.mean(values))
    if len(set(values)) == 1:
        assert found.low is found.high is None
        return
    means = exact_means(values)
    assert covers(means, found.low, 0.025)
    assert covers(means, found.high, 0.975)


def test_strata_are_resampled_each_by_itself_and_count_the_same():
    one, two = [0.0, 1.0, 1.0], [0.2, 0.4]
    found = estimate([*one, *two], ["one"] * 3 + ["two"] * 2)
    assert found.mean == pytest.approx((2 / 3 + 0.3) / 2)
    means = (exact_means(one)[:, None] + exact_means(two)[None, :]).ravel() / 2
    assert covers(means, found.low, 0.025)
    assert covers(means, found.high, 0.975)


def test_strata_of_one_sample_are_resampled_together():
    lone = [0.1, 0.9, 0.5]
    found = estimate([*lone, 1.0, 0.0], ["a", "b", "c", "d", "d"])
    assert found.mean == pytest.approx((0.1 + 0.9 + 0.5 + 0.5) / 4)
    means = (3 * exact_means(lone)[:, None] + exact_means([1.0, 0.0])[None, :]).ravel() / 4
    assert covers(means, found.low, 0.025)
    assert covers(means, found.high, 0.975)


def test_differences_are_paired_as_scipy_pairs_them():
    rng = np.random.default_rng(0)
    full = rng.random(40)
    folded = full - 0.1 * rng.random(40)
    paired = estimate(list(folded - full), ["a"] * 40)
    asked = stats.bootstrap(
        (folded, full),
        lambda x, y, axis: np.mean(x - y, axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert paired.low == pytest.approx(asked.low, abs=2e-3)
    assert paired.high == pytest.approx(asked.high, abs=2e-3)
    alone = estimate(list(folded), ["a"] * 40)
    assert paired.high - paired.low < (alone.high - alone.low) / 4


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    trials = [estimate(list(rng.normal(3.0, 1.0, 60)), ["a"] * 60) for _ in range(200)]
    # A percentile interval of 60 samples is a little narrow: about 94 %.
    assert 0.90 <= np.mean([trial.low <= 3.0 <= trial.high for trial in trials]) <= 0.98


@pytest.mark.parametrize("values", [[0.5], [1.0] * 8])
def test_no_interval_where_it_would_say_nothing(values):
    found = estimate(values, ["a"] * len(values))
    assert (found.mean, found.low, found.high, found.n) == (values[0], None, None, len(values))


def test_infinite_and_absent():
    assert estimate([], []) is None
    assert estimate([float("inf"), 1.0], ["a", "a"]).low is None


sizes = st.floats(0.01, 1).map(lambda x: round(x, 2))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(sizes, sizes), max_size=12))
def test_frontier_by_its_definition(points):
    kept = frontier(points)
    assert [points[i] for i in kept] == sorted(points[i] for i in kept)
    losses = [points[i][1] for i in kept]
    assert all(a > b for a, b in zip(losses, losses[1:])), "along the frontier more bytes must buy something"
    for index, (size, loss) in enumerate(points):
        better = [p for p in points if p[1] < loss and p[0] <= size * SAME_SIZE]
        same = [i for i, p in enumerate(points) if p[1] == loss and (p[0], i) < (size, index)]
        assert (index in kept) == (not better and not same)


def test_a_hair_of_bytes_is_no_merit():
    assert frontier([(0.0999, 0.5), (0.1, 0.01)]) == [1]
    assert frontier([(0.09, 0.5), (0.1, 0.01)]) == [0, 1]
