"""What the RULER tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import matching
from kvfold.evaluate.tasks.base import Task, Turn

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The filling of haystacks without content."""


@dataclass(frozen=True, kw_only=True)
class RulerTask(Task):
    """Scored by the share of right answers that the model's answer holds."""

    source = "RULER, arXiv 2404.06654"
    metric = "recall"

    def score(self, answer: str, turn: Turn) -> float:
        return matching.all_of(answer, turn.references)


@cache
def words(*kinds: str) -> tuple[str, ...]:
    """English words of some kinds ("noun", "adjective", "verb"), sorted: the lists RULER draws from.

    Raises
    ------
    KvfoldError
        The package that has them is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise KvfoldError(
            "RULER's word lists are in the package wonderwords: pip install 'kvfold[eval]'"
        ) from error
    return tuple(sorted(set(RandomWord().filter(include_categories=list(kinds)))))
