"""Needles in a haystack: numbers planted in a long text at a grid of depths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import matching, text
from kvfold.evaluate.tasks.base import Count, Sample, Task, Turn
from kvfold.evaluate.tasks.depths import depth_of
from kvfold.evaluate.tasks.fit import fit

PLACES = (
    "lighthouse", "orchard gate", "harbour office", "clock tower", "old mill", "garden shed", "ferry landing",
    "bell tower", "wine cellar", "boat house", "town library", "water tower", "stone bridge", "railway depot",
    "fish market", "ice house", "chapel door", "customs house", "north barn", "printing press", "rope walk",
    "salt store", "toll booth", "weather station",
)  # fmt: skip
"""Where the numbers are of."""


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Find a planted number; with several turns, one number after another.

    The first needle's depth is one of a grid from `first` to `last`, walked so that a few samples spread over it already: the
    middle, the ends, then halfway between. Other needles follow at equal distances and go on from the beginning. The first
    turn asks for the first needle, the next for the next.

    Parameters
    ----------
    depths : int
        Depths of the grid, at equal distances; one alone is halfway.
    first, last : float
        Ends of the grid: 0 is the start of the document, 1 its end.
    needles : int
        Numbers planted.
    turns : int
        Numbers asked for, at most `needles`.
    text : str
        A file, or a folder of .txt files, for the haystack ("": the novel that ships).
    """

    name = "needle"
    source = "Needle in a haystack (G. Kamradt, 2023), own needles"
    metric = "recall"

    depths: int = 5
    first: float = 0.0
    last: float = 1.0
    needles: int = 1
    turns: int = 1
    text: str = ""

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise KvfoldError(f"{self.name}: depths must be at least 1, got {self.depths}")
        if not 0 <= self.first <= self.last <= 1:
            raise KvfoldError(
                f"{self.name}: first and last must be 0 <= first <= last <= 1, got {self.first} and {self.last}"
            )
        if not 1 <= self.needles <= len(PLACES):
            raise KvfoldError(f"{self.name}: needles must be 1 to {len(PLACES)}, got {self.needles}")
        if not 1 <= self.turns <= self.needles:
            raise KvfoldError(
                f"{self.name}: turns must be 1 to needles={self.needles}, got {self.turns}: each asks for another needle"
            )

    def check(self) -> None:
        text.load(self.text)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        haystack = text.load(self.text)
        depth = round(self.first + (self.last - self.first) * depth_of(index, self.depths), 6)
        depths = [depth + number / self.needles for number in range(self.needles)]
        depths = [at - 1 if at > 1 else at for at in depths]
        places = rng.sample(PLACES, self.needles)
        codes = [str(code) for code in rng.sample(range(10_000, 100_000), self.needles)]
        start = haystack.somewhere(rng)
        turns = tuple(
            Turn(
                question=f"What is the secret number of the {place}?",
                references=(code,),
                answer_prefix=f"The secret number of the {place} is",
                max_new_tokens=16,
            )
            for place, code in zip(places[: self.turns], codes)
        )

        def build(words: int) -> Sample:
            passage = haystack.passage(start, words)
            breaks = [0, *text.sentence_ends(passage), words]
            planted = []
            for wanted, place, code in zip(depths, places, codes):
                distance = [abs(at - wanted * words) for at in breaks]
                planted.append((breaks[distance.index(min(distance))], place, code))
            for at, place, code in sorted(planted, reverse=True):
                passage.insert(at, f"The secret number of the {place} is {code}. ")
            return Sample(
                context="".join(passage).rstrip(),
                turns=turns,
                instruction="Read this text. Questions about it follow it.",
                about={"depth": depth, "needles": self.needles, "turns": self.turns},
            )

        return fit(build, tokens, count, task=self.name, least=1, most=tokens)

    def score(self, answer: str, turn: Turn) -> float:
        return matching.says(answer, turn.references[0])
