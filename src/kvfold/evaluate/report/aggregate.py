"""Rows to figures: settings, needle maps, bit maps, and what a reader must know before trusting them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.evaluate.report.bits import BitMap, bit_maps
from kvfold.evaluate.report.needles import NeedleMap, needle_maps
from kvfold.evaluate.report.samples import Place
from kvfold.evaluate.report.settings import Setting, protocol_name, setting_of
from kvfold.evaluate.results import Row, Run

OURS = ("rdkv", "xkv", "dbtrimkv", "blockgtq", "kvsculpt")
"""kvfold's own methods. Named here, so that a report needs no torch; a test compares them with the registered ones."""


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
    places: dict[Place, list[Row]] = {}
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
            settings.append(setting_of(place, "", None, here, highlighted))
        for (task, tokens), group in sorted(by_task.items()):
            settings.append(setting_of(place, task, tokens, group, highlighted))
        needles += needle_maps(place, here, highlighted)
        bits += bit_maps(place, here, highlighted)
    used = {row.run for row in latest.values()}
    told = tuple(sorted((run for run in runs if run.id in used), key=lambda run: run.started))
    remarks = (*notes, *_remarks(latest.values(), told, settings))
    return Report(tuple(settings), tuple(needles), tuple(bits), told, remarks, len(latest))


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
