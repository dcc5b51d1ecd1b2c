"""The best entries of a setting at each size, and the smallest that is good."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvfold.evaluate.report.settings import Entry, Setting, comparable
from kvfold.evaluate.report.statistics import SAME_SIZE

RETAINED = 0.95
"""Share of the full cache's score that the summary asks for."""


@dataclass(frozen=True)
class Level:
    """The best that is to be had at a size.

    Attributes
    ----------
    ratio : float
        At most this share of the full cache's bytes.
    by_score, by_kl : Entry or None
    """

    ratio: float
    by_score: Entry | None
    by_kl: Entry | None


def levels(setting: Setting) -> list[Level]:
    """For each size that a budget asks for, falling, the best entries of at most that size."""
    able = [e for e in setting.entries if comparable(e, "score") or comparable(e, "kl")]
    budgets: dict[str, float] = {}
    for entry in able:
        if entry.budget:
            budgets[entry.budget] = max(budgets.get(entry.budget, 0.0), entry.ratio or 0.0)
    sizes: list[float] = []
    for size in sorted(budgets.values() or [e.ratio or 0.0 for e in able], reverse=True):
        if not sizes or size < 0.95 * sizes[-1]:
            sizes.append(size)
    result = []
    for size in sizes:
        within = [e for e in able if (e.ratio or 0.0) <= size]
        result.append(
            Level(size, _best(within, "score", setting.higher_is_better), _best(within, "kl", False))
        )
    return result


def _best(entries: list[Entry], figure: str, higher_is_better: bool) -> Entry | None:
    able = [entry for entry in entries if comparable(entry, figure)]
    sign = -1 if higher_is_better else 1
    # Of equals, the one that changed the model's output least.
    return min(
        able,
        key=lambda e: (sign * getattr(e, figure).mean, e.kl.mean if e.kl else math.inf, e.ratio),
        default=None,
    )


def smallest_good(setting: Setting) -> Entry | None:
    """The smallest complete entry that keeps at least `RETAINED` of the full cache's score; of equal sizes the best."""
    full = setting.full
    if full is None or full.score is None or not full.score.mean > 0:
        return None
    good = [
        entry
        for entry in setting.entries
        if comparable(entry, "score")
        and entry.score is not None
        and (retained(entry.score.mean, full.score.mean, setting.higher_is_better) >= RETAINED)
    ]
    least = min((entry.ratio or 0.0 for entry in good), default=0.0) * SAME_SIZE
    return _best(
        [entry for entry in good if (entry.ratio or 0.0) <= least], "score", setting.higher_is_better
    )


def retained(score: float, full: float, higher_is_better: bool) -> float:
    """Share of the full cache's score that is left; for perplexity, the full cache's over the method's."""
    top, bottom = (score, full) if higher_is_better else (full, score)
    return top / bottom if bottom else math.nan
