"""Means with bootstrap intervals, and which points nobody beats."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95
RESAMPLES = 4000

SAME_SIZE = 1.02
"""Sizes within this factor count as equal."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval.

    Attributes
    ----------
    mean : float
    low, high : float or None
        Percentile bootstrap, 95 %. None where it says nothing: one sample, or samples that are all equal (the bootstrap
        of 8 right answers of 8 is the interval [1, 1], which is no claim anyone should make).
    n : int
        Samples.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float], strata: Sequence[Hashable]) -> Estimate | None:
    """Mean over strata of each stratum's mean, with its bootstrap interval.

    Samples are drawn with replacement within their stratum; strata of one sample are drawn together, as there is
    nothing to draw from within them. With a single stratum this is the ordinary bootstrap of a mean, and of
    differences between a method and the full cache on the same samples it is the paired one
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, sections 8.3 and 13.3).

    Parameters
    ----------
    values : sequence of float
        One a sample.
    strata : sequence of hashable
        The stratum of each, such as (task, tokens).

    Returns
    -------
    Estimate or None
        None without values.
    """
    if not len(values):
        return None
    groups: dict[Hashable, list[float]] = {}
    for value, stratum in zip(values, strata, strict=True):
        groups.setdefault(stratum, []).append(value)
    mean = sum(sum(group) / len(group) for group in groups.values()) / len(groups)
    single = [group[0] for group in groups.values() if len(group) == 1]
    pools = [(1 / len(groups), group) for group in groups.values() if len(group) > 1]
    if single:
        pools.append((len(single) / len(groups), single))
    if not math.isfinite(mean) or all(min(pool) == max(pool) for _, pool in pools):
        return Estimate(mean, None, None, len(values))
    means = sum(
        weight * (_resamples(len(pool), stream) @ np.asarray(pool, np.float64))
        for stream, (weight, pool) in enumerate(pools)
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), len(values))


@lru_cache(maxsize=32)
def _resamples(n: int, stream: int) -> np.ndarray:
    """(RESAMPLES, n): how often each of n samples is drawn, over n. The same draws for every method: they are paired."""
    rng = np.random.default_rng([n, stream])
    return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (bytes, loss) that no other beats, by growing bytes; smaller is better in both.

    A point is beaten by one of less loss at no more bytes, where `SAME_SIZE` more count as no more (budgets are met to
    within a page, and a hair of bytes is no merit); and by one of the same loss at fewer bytes. Of equals the first stays.
    """

    def beaten(index: int) -> bool:
        size, loss = points[index]
        return any(
            (other_size <= size * SAME_SIZE and other_loss < loss)
            or (other_loss == loss and (other_size, other) < (size, index))
            for other, (other_size, other_loss) in enumerate(points)
        )

    return sorted((i for i in range(len(points)) if not beaten(i)), key=lambda i: points[i])
