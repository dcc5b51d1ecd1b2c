"""Scores by the depth of what is asked for, and the length of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.evaluate.report.samples import FULL, Place, is_ours, score_of, scored_of, where_of
from kvfold.evaluate.results import Row


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


def needle_maps(place: Place, rows: list[Row], highlighted: frozenset[str]) -> list[NeedleMap]:
    """One map for each task, method and budget that has depths."""
    # A failed row knows nothing of its sample; the same sample of another method does.
    depth_of = {where_of(row): depth for row in rows if (depth := _depth(row)) is not None}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if where_of(row) in depth_of:
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
            here.setdefault((depth_of[where_of(row)], row.cell.tokens), []).append(row)
        scores = [
            [_mean([score_of(r) for r in scored_of(here.get((d, n), []))]) for n in lengths] for d in depths
        ]
        failed = [[sum(r.error is not None for r in here.get((d, n), [])) for n in lengths] for d in depths]
        maps.append(
            NeedleMap(
                *place,
                task=task,
                method=method,
                budget=budget,
                ours=is_ours(method, highlighted),
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
