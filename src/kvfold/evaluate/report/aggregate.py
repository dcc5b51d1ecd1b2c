"""Rows to figures: one entry a method and budget, in each setting where methods can be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.evaluate.report.bits import BitMap, head_bits
from kvfold.evaluate.report.statistics import SAME_SIZE, Estimate, estimate, frontier
from kvfold.evaluate.results import Fidelity, Row, Run

FULL = "full"
"""The method that every other one is paired with."""

OURS = ("rdkv", "xkv", "dbtrimkv", "blockgtq", "kvsculpt")
"""kvfold's own methods. Named here, so that a report needs no torch; a test compares them with the registered ones."""

COVERAGE = 0.9
"""A method that measured less of a setting's samples is shown, but compared with nobody."""

RETAINED = 0.95
"""Share of the full cache's score that the summary asks for."""


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


@dataclass(frozen=True)
class NeedleMap:
    """Mean score by depth and length.

    Attributes
    ----------
    model, view, when, format, task, method, budget : str
    ours : bool
    ratio : float or None
        Mean of folded bytes over full bytes.
    depths : list of float
        Where the needle is, 0 (beginning) to 1 (end).
    lengths : list of int
        Tokens.
    scores : list over depths of list over lengths of float or None
    errors : list over depths of list over lengths of int
        Samples that failed.
    """

    model: str
    view: str
    when: str
    format: str
    task: str
    method: str
    budget: str
    ours: bool
    ratio: float | None
    depths: list[float]
    lengths: list[int]
    scores: list[list[float | None]]
    errors: list[list[int]]


@dataclass(frozen=True)
class Report:
    """All figures of a results folder.

    Attributes
    ----------
    settings : tuple of Setting
        By model and protocol; of each, the mean over tasks first (where there are several), then each task and length.
    needles : tuple of NeedleMap
    bits : tuple of BitMap
    runs : tuple of Run
    notes : tuple of str
        What a reader must know before trusting the figures.
    rows : int
        Measurements.
    """

    settings: tuple[Setting, ...]
    needles: tuple[NeedleMap, ...]
    bits: tuple[BitMap, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; figures that are not finite become None."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain


def aggregate(
    runs: Iterable[Run],
    rows: Iterable[Row],
    *,
    ours: Sequence[str] | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Group rows into settings and estimate each method's figures.

    Parameters
    ----------
    runs, rows : iterable
        Of one or several results folders. Of rows with equal cells the last one counts.
    ours : sequence of str, optional
        Method names to bring forward; by default `OURS`.
    notes : iterable of str
        Remarks of whoever read the folder.

    Raises
    ------
    KvfoldError
        There are no rows.
    """
    latest = {row.cell: row for row in rows}
    if not latest:
        raise KvfoldError("no measurements to report: run `kvfold eval` first")
    highlighted = frozenset(OURS if ours is None else ours)
    places: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in latest.values():
        cell = row.cell
        places.setdefault((cell.model, cell.view, cell.when, cell.format), []).append(row)

    settings: list[Setting] = []
    needles: list[NeedleMap] = []
    bits: list[BitMap] = []
    # The harder protocol, a question the fold did not see, comes first.
    for place in sorted(places, key=lambda key: (key[0], key[1] != "unseen", key[2] != "prefill", key[3])):
        here = places[place]
        by_task: dict[tuple[str, int], list[Row]] = {}
        for row in here:
            by_task.setdefault((row.cell.task, row.cell.tokens), []).append(row)
        if len(by_task) > 1:
            settings.append(_setting(place, "", None, here, highlighted))
        for (task, tokens), group in sorted(by_task.items()):
            settings.append(_setting(place, task, tokens, group, highlighted))
        needles += _needles(place, here, highlighted)
        bits += _bits(place, here, highlighted)
    used = {row.run for row in latest.values()}
    told = tuple(sorted((run for run in runs if run.id in used), key=lambda run: run.started))
    remarks = (*notes, *_remarks(latest.values(), told, settings))
    return Report(tuple(settings), tuple(needles), tuple(bits), told, remarks, len(latest))


def protocol_name(view: str, when: str, format: str) -> str:
    """A protocol in words, such as "question unseen, folded after prefill, plain prompt"."""
    moment = "folded after prefill" if when == "prefill" else "folded while generating"
    return f"question {view}, {moment}, {'chat template' if format == 'chat' else 'plain prompt'}"


def _is_ours(label: str, highlighted: frozenset[str]) -> bool:
    return label.split(">>")[0].split(":")[0].strip() in highlighted


def _where(row: Row) -> tuple[str, int, int, int]:
    """What rows of the same sample share, whatever the method."""
    return row.cell.task, row.cell.tokens, row.cell.sample, row.cell.seed


def _scored(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.error is None and row.score is not None]


def _setting(
    place: tuple[str, str, str, str],
    task: str,
    tokens: int | None,
    rows: list[Row],
    highlighted: frozenset[str],
) -> Setting:
    scored = _scored(rows)
    directions = {row.higher_is_better for row in scored}
    # A mean over tasks takes only scores of the same kind: between 0 and 1, more being better.
    comparable = scored if task else [row for row in scored if row.higher_is_better]
    metrics = sorted({row.metric for row in comparable})
    countable = {row.cell for row in comparable}
    reference = {_where(row): row.score for row in comparable if row.cell.method == FULL}
    expected = {_where(row) for row in rows}
    methods: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        methods.setdefault((row.cell.method, row.cell.budget), []).append(row)
    entries = [
        _entry(method, budget, group, countable, reference, expected, _is_ours(method, highlighted))
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
    paired = [row for row in scored if _where(row) in reference] if method != FULL else []
    faithful = [(row, row.fidelity) for row in measured if row.fidelity is not None]

    def over(figure: Any) -> Estimate | None:
        return estimate([figure(f) for _, f in faithful], [_stratum(row) for row, _ in faithful])

    def nll(fidelity: Fidelity) -> float:
        return fidelity.full_nll if method == FULL else fidelity.nll

    sizes = [row.ratio for row in measured if row.ratio is not None]
    got = {_where(row) for row in measured}
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
        score=estimate([_score(row) for row in scored], [_stratum(row) for row in scored]),
        difference=estimate(
            [_score(row) - (reference[_where(row)] or 0.0) for row in paired],
            [_stratum(row) for row in paired],
        ),
        kl=over(lambda f: f.kl) if method != FULL else None,
        top1=over(lambda f: f.top1) if method != FULL else None,
        logit_error=over(lambda f: f.logit_error) if method != FULL else None,
        perplexity=_exp(over(nll)),
        fold_seconds=_median(row.fold_seconds for row in measured),
        decode_seconds=_median(row.decode_seconds for row in measured),
    )


def _score(row: Row) -> float:
    assert row.score is not None
    return row.score


def _stratum(row: Row) -> tuple[str, int]:
    return row.cell.task, row.cell.tokens


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
    able = [index for index, entry in enumerate(entries) if _comparable(entry, figure)]
    points = [(entries[i].ratio or 0.0, sign * getattr(entries[i], figure).mean) for i in able]
    return {able[index] for index in frontier(points)}


def _comparable(entry: Entry, figure: str) -> bool:
    found = getattr(entry, figure)
    return (
        entry.complete
        and entry.method != FULL
        and entry.ratio is not None
        and found is not None
        and math.isfinite(found.mean)
    )


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
    able = [e for e in setting.entries if _comparable(e, "score") or _comparable(e, "kl")]
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
    able = [entry for entry in entries if _comparable(entry, figure)]
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
        if _comparable(entry, "score")
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


def _needles(
    place: tuple[str, str, str, str], rows: list[Row], highlighted: frozenset[str]
) -> list[NeedleMap]:
    # A failed row knows nothing of its sample; the same sample of another method does.
    depth_of = {_where(row): depth for row in rows if (depth := _depth(row)) is not None}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if _where(row) in depth_of:
            groups.setdefault((row.cell.task, row.cell.method, row.cell.budget), []).append(row)
    grids: dict[str, tuple[list[float], list[int]]] = {}
    for task in {task for task, _, _ in groups}:
        wheres = [where for where in depth_of if where[0] == task]
        grids[task] = (sorted({depth_of[where] for where in wheres}), sorted({where[1] for where in wheres}))
    size = {
        key: _mean([r.ratio for r in group if r.ratio is not None]) or 0.0 for key, group in groups.items()
    }
    maps = []
    for key in sorted(groups, key=lambda k: (k[0], k[1] != FULL, -size[k], k[1], k[2])):
        task, method, budget = key
        depths, lengths = grids[task]
        here: dict[tuple[float, int], list[Row]] = {}
        for row in groups[key]:
            here.setdefault((depth_of[_where(row)], row.cell.tokens), []).append(row)
        scores = [
            [_mean([_score(r) for r in _scored(here.get((d, n), []))]) for n in lengths] for d in depths
        ]
        failed = [[sum(r.error is not None for r in here.get((d, n), [])) for n in lengths] for d in depths]
        maps.append(
            NeedleMap(
                *place,
                task=task,
                method=method,
                budget=budget,
                ours=_is_ours(method, highlighted),
                ratio=size[key] or None,
                depths=depths,
                lengths=lengths,
                scores=scores,
                errors=failed,
            )
        )
    return maps


def _depth(row: Row) -> float | None:
    depth = row.about.get("depth")
    if isinstance(depth, bool) or not isinstance(depth, int | float):
        return None
    return float(depth)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _bits(place: tuple[str, str, str, str], rows: list[Row], highlighted: frozenset[str]) -> list[BitMap]:
    """Of each method and budget, the longest prompt whose widths were kept."""
    longest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.widths is not None and any(row.widths) and row.prompt_tokens:
            key = (row.cell.method, row.cell.budget)
            if key not in longest or row.prompt_tokens > longest[key].prompt_tokens:
                longest[key] = row
    maps = []
    for row in sorted(
        longest.values(),
        key=lambda r: (not _is_ours(r.cell.method, highlighted), r.cell.method, -(r.ratio or 0.0)),
    ):
        keys, values = head_bits(row.widths or [], row.prompt_tokens)
        cell = row.cell
        ours = _is_ours(cell.method, highlighted)
        maps.append(
            BitMap(
                *place, cell.method, cell.budget, cell.task, row.prompt_tokens, ours, row.ratio, keys, values
            )
        )
    return maps


def _remarks(rows: Iterable[Row], runs: Sequence[Run], settings: Sequence[Setting]) -> list[str]:
    rows = list(rows)
    remarks = []
    failed = sum(row.error is not None for row in rows)
    if failed:
        remarks.append(f"{failed} of {len(rows)} measurements failed; tables say which and why.")
    missing = {row.run for row in rows} - {run.id for run in runs}
    if missing:
        remarks.append(f"Rows name runs that are not described: {', '.join(sorted(missing))}.")
    for what, values in (
        ("dtypes", {run.dtype for run in runs}),
        ("hardware", {run.hardware for run in runs}),
        ("versions", {tuple(sorted(run.versions.items())) for run in runs}),
    ):
        if len(values) > 1:
            effect = "speeds" if what == "hardware" else "figures"
            remarks.append(f"The runs differ in {what}: {effect} of different runs may not compare.")
    places = {(s.model, s.view, s.when, s.format): s.full for s in settings}
    for setting in settings:
        place = (setting.model, setting.view, setting.when, setting.format)
        places[place] = places[place] or setting.full
    lacking = [f"{place[0]} ({protocol_name(*place[1:])})" for place, full in places.items() if not full]
    if lacking:
        remarks.append(
            f"No full cache was measured for {'; '.join(lacking)}: no differences to it are given."
        )
    few = min((e.n for s in settings if s.task for e in s.entries if e.n), default=0)
    if few == 1:
        remarks.append("Some entries have only 1 sample, and so no interval.")
    elif few and few < 10:
        remarks.append(f"Some entries have only {few} samples: their intervals are too narrow.")
    return remarks


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
