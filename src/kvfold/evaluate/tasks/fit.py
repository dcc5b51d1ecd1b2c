"""Samples of an asked length: how much of a task's filling goes into a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.base import Count, Sample

_T = TypeVar("_T")
_INTERPOLATIONS = 6


def length(sample: Sample, count: Count) -> int:
    """Tokens of the instruction, the document and the first question, and of what stands between them."""
    parts = [sample.instruction, sample.context, sample.turns[0].question if sample.turns else ""]
    sizes = [count(part) for part in parts if part]
    between = 0 if sample.verbatim else count("\n\n")
    return sum(sizes) + (len(sizes) - 1) * between


def fit(
    build: Callable[[int], Sample], tokens: int, count: Count, *, task: str, least: int, most: int
) -> Sample:
    """The sample with as much filling as `tokens` have room for.

    Parameters
    ----------
    build : callable
        The sample with so many units of filling; the same number gives the same sample.
    tokens : int
        Most tokens (`length`).
    count : callable
        Tokens of a text.
    task : str
        Its name, for the error.
    least, most : int
        Units that the task needs, and has.

    Raises
    ------
    KvfoldError
        Even `least` units are too long; the message says how many tokens more they take.
    """
    needed = length(build(least), count)
    if needed > tokens:
        raise KvfoldError(f"{task} takes at least {needed - tokens} tokens more")
    units = largest(lambda n: length(build(n), count), tokens, least, most, needed)
    return build(units)


def largest(measure: Callable[[int], int], limit: int, least: int, most: int, at_least: int) -> int:
    """A number of units whose measure is at most `limit`, and within 0.5 % of it where `most` allows.

    The measure grows almost in proportion to the units, so a line between the two nearest known points finds the
    place in three or four measurements; where it does not, halving does.

    Parameters
    ----------
    measure : callable
        Tokens of a number of units.
    limit : int
        Most tokens.
    least, most : int
        Bounds of the units; `at_least` is the measure of `least`, at most `limit`.
    """
    slack = limit // 200
    low, low_size = least, at_least
    high, high_size = most + 1, 0
    n = min(most, 2 * least + 32)
    tried = 0
    while low + 1 < high and limit - low_size > slack:
        previous, previous_size = low, low_size
        size = measure(n)
        if size <= limit:
            low, low_size = n, size
        else:
            high, high_size = n, size
        if high_size:
            slope = (high_size - low_size) / (high - low)
        else:
            slope = (low_size - previous_size) / (low - previous)
        tried += 1
        if slope > 0 and tried <= _INTERPOLATIONS:
            n = low + int((limit - slack / 2 - low_size) / slope)
        elif high_size:
            n = (low + high) // 2
        else:
            n = 2 * low
        n = min(max(n, low + 1), high - 1)
    return low


class Supply(Generic[_T]):
    """Things drawn one after another and kept, so that the first `n` are the same whenever they are asked for."""

    def __init__(self, draw: Callable[[], _T]):
        self._draw = draw
        self._drawn: list[_T] = []

    def first(self, n: int) -> list[_T]:
        """The first `n`."""
        while len(self._drawn) < n:
            self._drawn.append(self._draw())
        return self._drawn[:n]
