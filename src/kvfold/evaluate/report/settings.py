"""One entry a method and budget, in each setting where methods can be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvfold.evaluate.report.samples import FULL, Place, is_ours, score_of, scored_of, stratum_of, where_of
from kvfold.evaluate.report.statistics import Estimate, estimate, frontier
from kvfold.evaluate.results import Fidelity, Row

COVERAGE = 0.9
"""A method that measured less of a setting's samples is shown, but compared with nobody."""


@dataclass(frozen=True)
class Entry:
    """One method at one budget in one setting.

    Attributes
    ----------
    method, budget : str
    ours : bool
        One of kvfold's own methods, which charts bring forward.
    n, expected : int
        Samples measured, and samples that any method of the setting was asked for.
    errors : mapping of str to int
        Samples that failed, by reason.
    complete : bool
        Measured enough of the setting to be compared: every task and length, and 9 of 10 samples.
    unfolded : int
        Samples that passed through whole, for the reasons in their rows.
    ratio : float or None
        Mean of folded bytes over full bytes.
    score, difference : Estimate or None
        Mean score, and mean of (score - full cache's score) over the samples that both have.
    kl, top1, logit_error, perplexity : Estimate or None
        See `Fidelity`; perplexity is exp of the mean negative log-likelihood, with the interval's ends likewise.
    fold_seconds, decode_seconds : float or None
        Medians.
    on_score_frontier, on_kl_frontier : bool
        No complete entry is at least as good with at most as many bytes.
    """

    method: str
    budget: str
    ours: bool
    n: int
    expected: int
    errors: Mapping[str, int]
    complete: bool
    unfolded: int
    ratio: float | None
    score: Estimate | None
    difference: Estimate | None
    kl: Estimate | None
    top1: Estimate | None
    logit_error: Estimate | None
    perplexity: Estimate | None
    fold_seconds: float | None
    decode_seconds: float | None
    on_score_frontier: bool = False
    on_kl_frontier: bool = False

    @property
    def label(self) -> str:
        """Method and budget."""
        return f"{self.method} {self.budget}".strip()


@dataclass(frozen=True)
class Setting:
    """Measurements that can be compared with each other.

    Attributes
    ----------
    model, view, when, format : str
        See `Cell`.
    task : str
        "" for the mean over all tasks and lengths.
    tokens : int or None
        None for the mean over all.
    tasks : int
        How many (task, length) pairs the score is a mean of.
    metric : str
        "" without a score.
    higher_is_better : bool
    entries : tuple of Entry
        Full cache first, then by falling bytes.
    """

    model: str
    view: str
    when: str
    format: str
    task: str
    tokens: int | None
    tasks: int
    metric: str
    higher_is_better: bool
    entries: tuple[Entry, ...]

    @property
    def full(self) -> Entry | None:
        """The full cache's entry, if it was measured."""
        return next((entry for entry in self.entries if entry.method == FULL and entry.n), None)

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        return protocol_name(self.view, self.when, self.format)


def protocol_name(view: str, when: str, format: str) -> str:
    """A protocol in words, such as "question unseen, folded after prefill, plain prompt"."""
    moment = "folded after prefill" if when == "prefill" else "folded while generating"
    return f"question {view}, {moment}, {'chat template' if format == 'chat' else 'plain prompt'}"


def setting_of(
    place: Place,
    task: str,
    tokens: int | None,
    rows: list[Row],
    highlighted: frozenset[str],
) -> Setting:
    """All methods on one task and length, or on all of them where `task` is empty."""
    scored = scored_of(rows)
    directions = {row.higher_is_better for row in scored}
    # A mean over tasks takes only scores of the same kind: between 0 and 1, more being better.
    comparable = scored if task else [row for row in scored if row.higher_is_better]
    metrics = sorted({row.metric for row in comparable})
    countable = {row.cell for row in comparable}
    reference = {where_of(row): row.score for row in comparable if row.cell.method == FULL}
    expected = {where_of(row) for row in rows}
    methods: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        methods.setdefault((row.cell.method, row.cell.budget), []).append(row)
    entries = [
        _entry(method, budget, group, countable, reference, expected, is_ours(method, highlighted))
        for (method, budget), group in methods.items()
    ]
    higher = True if not task else directions != {False}
    entries = _mark_frontiers(entries, higher)
    entries.sort(key=lambda e: (e.method != FULL, -(e.ratio or 0), e.method, e.budget))
    return Setting(
        *place,
        task=task,
        tokens=tokens,
        tasks=len({(row.cell.task, row.cell.tokens) for row in comparable}),
        metric=" / ".join(metrics),
        higher_is_better=higher,
        entries=tuple(entries),
    )


def _entry(
    method: str,
    budget: str,
    rows: list[Row],
    countable: set[Any],
    reference: Mapping[Any, float | None],
    expected: set[Any],
    ours: bool,
) -> Entry:
    measured = [row for row in rows if row.error is None]
    scored = [row for row in measured if row.cell in countable]
    paired = [row for row in scored if where_of(row) in reference] if method != FULL else []
    faithful = [(row, row.fidelity) for row in measured if row.fidelity is not None]

    def over(figure: Any) -> Estimate | None:
        return estimate([figure(f) for _, f in faithful], [stratum_of(row) for row, _ in faithful])

    def nll(fidelity: Fidelity) -> float:
        return fidelity.full_nll if method == FULL else fidelity.nll

    sizes = [row.ratio for row in measured if row.ratio is not None]
    got = {where_of(row) for row in measured}
    same_tasks = {where[:2] for where in got} == {where[:2] for where in expected}
    return Entry(
        method=method,
        budget=budget,
        ours=ours,
        n=len(measured),
        expected=len(expected),
        errors=dict(Counter(row.error for row in rows if row.error is not None)),
        unfolded=sum(bool(row.note) for row in measured) if method != FULL else 0,
        complete=same_tasks and len(got) >= COVERAGE * len(expected),
        ratio=sum(sizes) / len(sizes) if sizes else None,
        score=estimate([score_of(row) for row in scored], [stratum_of(row) for row in scored]),
        difference=estimate(
            [score_of(row) - (reference[where_of(row)] or 0.0) for row in paired],
            [stratum_of(row) for row in paired],
        ),
        kl=over(lambda f: f.kl) if method != FULL else None,
        top1=over(lambda f: f.top1) if method != FULL else None,
        logit_error=over(lambda f: f.logit_error) if method != FULL else None,
        perplexity=_exp(over(nll)),
        fold_seconds=_median(row.fold_seconds for row in measured),
        decode_seconds=_median(row.decode_seconds for row in measured),
    )


def _exp(nll: Estimate | None) -> Estimate | None:
    if nll is None:
        return None
    low, high = (None if end is None else math.exp(min(end, 700)) for end in (nll.low, nll.high))
    return Estimate(math.exp(min(nll.mean, 700)), low, high, nll.n)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mark_frontiers(entries: list[Entry], higher_is_better: bool) -> list[Entry]:
    by_score = _unbeaten(entries, "score", higher_is_better)
    by_kl = _unbeaten(entries, "kl", False)
    return [
        replace(entry, on_score_frontier=index in by_score, on_kl_frontier=index in by_kl)
        for index, entry in enumerate(entries)
    ]


def _unbeaten(entries: list[Entry], figure: str, higher_is_better: bool) -> set[int]:
    sign = -1 if higher_is_better else 1
    able = [index for index, entry in enumerate(entries) if comparable(entry, figure)]
    points = [(entries[i].ratio or 0.0, sign * getattr(entries[i], figure).mean) for i in able]
    return {able[index] for index in frontier(points)}


def comparable(entry: Entry, figure: str) -> bool:
    """Measured enough of the setting, and with a finite `figure`."""
    found = getattr(entry, figure)
    return (
        entry.complete
        and entry.method != FULL
        and entry.ratio is not None
        and found is not None
        and math.isfinite(found.mean)
    )
