"""What `kvfold demo` reads: a novel's beginning, and facts that are not in it.

The text is the first three chapters of Jane Austen's Northanger Abbey (1817, public domain). The facts are planted
between its paragraphs when the demo runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

TITLE = "Northanger Abbey, chapters 1-3, by Jane Austen (public domain)"


@dataclass(frozen=True)
class Fact:
    """A sentence planted in the text, and the question it answers.

    Attributes
    ----------
    sentence, question : str
    answer : str
        A word that a right answer holds.
    depth : float
        Where in the text, 0 (start) to 1 (end).
    """

    sentence: str
    question: str
    answer: str
    depth: float

    def in_answer(self, text: str) -> bool:
        """Whether a text says the answer, as a word of its own."""
        return re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", text, re.IGNORECASE) is not None


def facts() -> list[Fact]:
    """The facts to plant, in the order of the text."""
    data = json.loads(_read("facts.json"))
    return sorted((Fact(**fact) for fact in data), key=lambda fact: fact.depth)


def text() -> str:
    """The untouched text."""
    return _read("northanger_abbey.txt")


def planted(original: str, chosen: list[Fact]) -> str:
    """The text with each fact as a paragraph of its own, at the first break between paragraphs after its depth."""
    pieces: list[str] = []
    at = 0
    for fact in sorted(chosen, key=lambda fact: fact.depth):
        found = original.find("\n\n", int(fact.depth * len(original)))
        cut = len(original) if found < 0 else found
        cut = max(cut, at)
        pieces += [original[at:cut], "\n\n" + fact.sentence]
        at = cut
    return "".join([*pieces, original[at:]])


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
