"""A published prompt at an asked length: the middle of the document is left out, as the benchmarks do it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.base import Count, Sample, Turn


def halves(template: str, document: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """What a template (`str.format` fields, one of them the document's) has before and after its document."""
    before, _, after = template.partition("{" + document + "}")
    return before.format_map(values), after.format_map(values)


def sample_of(
    before: str,
    document: str,
    after: str,
    turn: Callable[[str], Turn],
    tokens: int,
    count: Count,
    *,
    task: str,
    about: Mapping[str, str | int | float],
) -> Sample:
    """A sample whose prompt is `before + document + after`, at most `tokens` long.

    A longer prompt loses the middle of its document, so that half of what is left comes from the prompt's beginning
    and half from its end (LongBench, Section 4.1; InfiniteBench and LongBench v2 do the same). Half a token more or
    less apart, this is their truncation; it works on text because a task can count tokens only.

    Parameters
    ----------
    before, document, after : str
    turn : callable
        Makes the turn from the text of its question.
    tokens : int
        Most tokens; a shorter prompt stays as it is.
    count : callable
        Tokens of a text.
    task : str
        Its name, for the error.
    about : mapping

    Raises
    ------
    KvfoldError
        What stands around the document is too long; the message names the least number of tokens.
    """
    if count(before + document + after) > tokens:
        half = tokens // 2
        around = max(count(before), count(after))
        if around >= half:
            raise KvfoldError(
                f"{task}: {tokens} tokens are too few, this prompt takes at least {2 * around + 2}"
            )
        head = _longest(len(document), half, lambda n: count(before + document[:n]))
        tail = _longest(len(document) - head, half, lambda n: count(document[len(document) - n :] + after))
        document = document[:head] + document[len(document) - tail :]
        while tail and (over := count(before + document) + count(after) - tokens) > 0:
            tail -= min(tail, over)
            document = document[:head] + document[len(document) - tail :]
    context = before + document
    # A document is folded without white space around it, so the question begins with what is stripped at its end.
    kept = context.rstrip()
    question = context[len(kept) :] + after
    return Sample(context=kept.lstrip(), turns=(turn(question),), verbatim=True, about=dict(about))


def _longest(most: int, limit: int, measure: Callable[[int], int]) -> int:
    """The largest number of characters, at most `most`, whose measure (all but monotone) is at most `limit`."""
    return max(0, bisect_right(range(most + 1), limit, key=measure) - 1)
