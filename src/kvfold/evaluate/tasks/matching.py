"""How answers are scored, each in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence


def all_of(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, whatever their case (RULER's `string_match_all`)."""
    answer = answer.lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def any_of(answer: str, references: Sequence[str]) -> float:
    """1 if the answer holds any reference, whatever its case (RULER's `string_match_part`)."""
    answer = answer.lower()
    return float(any(reference.lower() in answer for reference in references))


def says(answer: str, reference: str) -> float:
    """1 if the answer holds the reference as a word of its own: 4831 is not in 48312."""
    pattern = rf"(?<!\w){re.escape(reference)}(?!\w)"
    return float(re.search(pattern, answer, re.IGNORECASE) is not None)


def edit_similarity(a: str, b: str) -> float:
    """1 - (insertions and deletions that turn one text into the other) / (length of both).

    The edit similarity of code completion benchmarks (RepoBench, arXiv 2306.03091; LongBench, arXiv 2308.14508).
    Equal to 2 x (longest common subsequence) / (length of both).
    """
    if not a and not b:
        return 1.0
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return 2 * row[-1] / (len(a) + len(b))
