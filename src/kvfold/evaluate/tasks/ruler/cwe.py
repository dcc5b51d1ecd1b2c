"""RULER's common words extraction: the ten words that a long list repeats most (paper, section 3)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.fit import fit
from kvfold.evaluate.tasks.ruler.common import RulerTask, words

COMMON = 10
"""Words asked for."""

_KINDS = ("noun", "adjective", "verb")
_BEFORE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear"
    " most often."
)
_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


@dataclass(frozen=True, kw_only=True)
class CommonWords(RulerTask):
    """A numbered list with ten words 30 times and others 3 times each (6 times and once below 4,096 tokens).

    Parameters
    ----------
    example : bool
        Begin with a small worked example, as published.
    max_new_tokens : int
    """

    name = "cwe"

    example: bool = True
    max_new_tokens: int = 120

    def check(self) -> None:
        words(*_KINDS)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        vocabulary = words(*_KINDS)
        short = tokens < 4096
        example = ""
        if self.example:
            drawn = rng.sample(vocabulary, 20 if short else 40)
            listed = _listed(drawn, 3 if short else 10, 1 if short else 3, rng.getrandbits(64))
            example = f"{_BEFORE}\n{listed}{_QUESTION}{_PREFIX}{_numbered(drawn[:COMMON])}\n"
        drawn = rng.sample(vocabulary, len(vocabulary))
        seed = rng.getrandbits(64)
        turn = Turn(_QUESTION, tuple(drawn[:COMMON]), _PREFIX, self.max_new_tokens)

        def build(different: int) -> Sample:
            listed = _listed(drawn[:different], 6 if short else 30, 1 if short else 3, seed)
            context = f"{example}{_BEFORE}\n{listed}"
            return Sample(context=context, turns=(turn,), verbatim=True, about={"words": different})

        return fit(build, tokens, count, task=self.name, least=2 * COMMON, most=len(vocabulary))


def _listed(drawn: list[str], often: int, seldom: int, seed: int) -> str:
    """The first ten words often and the others seldom, in any order, numbered."""
    every = drawn[:COMMON] * often + drawn[COMMON:] * seldom
    random.Random(seed).shuffle(every)
    return _numbered(every)


def _numbered(listed: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
