"""What tells the sample, the stratum and the owner of a row."""

from __future__ import annotations

from collections.abc import Iterable

from kvfold.evaluate.results import Row

FULL = "full"
"""The method that every other one is paired with."""

Place = tuple[str, str, str, str]
"""Model, view, when and format: where methods can be compared."""


def is_ours(label: str, highlighted: frozenset[str]) -> bool:
    """One of `highlighted`, or a chain that begins with one."""
    return label.split(">>")[0].split(":")[0].strip() in highlighted


def where_of(row: Row) -> tuple[str, int, int, int]:
    """What rows of the same sample share, whatever the method."""
    return row.cell.task, row.cell.tokens, row.cell.sample, row.cell.seed


def scored_of(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a score."""
    return [row for row in rows if row.error is None and row.score is not None]


def score_of(row: Row) -> float:
    """Of a row that has one."""
    assert row.score is not None
    return row.score


def stratum_of(row: Row) -> tuple[str, int]:
    """Within which samples are drawn again for an interval."""
    return row.cell.task, row.cell.tokens
