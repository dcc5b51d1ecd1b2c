"""RULER's question answering: a question about one (`qa_1`) or two (`qa_2`) of many documents (paper, section 3).

Published, these are SQuAD and HotpotQA questions among documents of the same data set; `data=PATH` reads those files. Without
them the documents are passages of a novel, each with one made-up fact in it. All facts are of the same form, so that only
the name that the question gives tells the right document from the others, and no model can know the answer beforehand:

- `qa_1`, one hop: a town, its river, founder, year and craft; the question asks for one of them.
- `qa_2`, two hops: a building and its architect in one document, the architect's life in another; the question names the
  building and asks about its architect.

Scores on these do not compare with published ones; scores with `data=` do.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvfold.evaluate.tasks import matching, text
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.fit import Supply, fit
from kvfold.evaluate.tasks.ruler import qa_data
from kvfold.evaluate.tasks.ruler.common import RulerTask

WORDS = 80
"""Of the novel, in a document."""

_BEFORE = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Fact:
    """A sentence for a document, and what may be asked of it.

    Attributes
    ----------
    title : str
        What it is about.
    sentence : str
    questions : tuple of (str, str)
        With their answers.
    """

    title: str
    sentence: str
    questions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class QA(RulerTask):
    """Scored 1 if the answer holds any right answer.

    Parameters
    ----------
    text : str
        A file, or a folder of .txt files, for the passages ("": the novel that ships).
    data : str
        The published questions and documents, a JSON file; sample `index` is its question of that index.
    max_new_tokens : int
    """

    metric = "match"
    read: ClassVar[Callable[[str], qa_data.Questions]]
    titled: ClassVar[bool]

    text: str = ""
    data: str = ""
    max_new_tokens: int = 32

    def check(self) -> None:
        if self.data:
            type(self).read(self.data)
        else:
            text.load(self.text)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        if self.data:
            return self._published(index, tokens, count, rng)
        names = Names(rng)
        gold, others = self.facts(names, rng)
        question, answer = rng.choice(gold[-1].questions)
        facts = Supply(others)
        book = text.load(self.text)
        start, seed = book.somewhere(rng), rng.getrandbits(64)

        def build(words: int) -> Sample:
            passages = [min(WORDS, words - at) for at in range(0, words, WORDS)]
            chance = random.Random(seed)
            chosen = [*gold, *facts.first(len(passages) - len(gold))]
            chance.shuffle(chosen)
            at, parts = start, []
            for fact, size in zip(chosen, passages):
                lines = text.sentences(book.passage(at, size))
                lines.insert(chance.randrange(len(lines) + 1), fact.sentence)
                parts.append((f"{fact.title}\n" if self.titled else "") + " ".join(lines))
                at += size
            return self._sample(parts, question, (answer,))

        return fit(build, tokens, count, task=self.name, least=(len(gold) + 1) * WORDS, most=tokens)

    def score(self, answer: str, turn: Turn) -> float:
        return matching.any_of(answer, turn.references)

    @abstractmethod
    def facts(self, names: Names, rng: random.Random) -> tuple[list[Fact], Callable[[], Fact]]:
        """The facts that the question needs, the last with questions, and a way to draw others."""

    def _published(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        questions = type(self).read(self.data)
        asked = questions.asked[index]
        near, far = questions.others(asked, rng)
        order = [*asked.documents, *near, *far]
        seed = rng.getrandbits(64)

        def build(documents: int) -> Sample:
            chosen = order[:documents]
            random.Random(seed).shuffle(chosen)
            return self._sample(
                [questions.documents[number] for number in chosen], asked.question, asked.answers
            )

        return fit(build, tokens, count, task=self.name, least=len(asked.documents), most=len(order))

    def _sample(self, documents: list[str], question: str, answers: tuple[str, ...]) -> Sample:
        listed = "\n\n".join(f"Document {n}:\n{document}" for n, document in enumerate(documents, 1))
        turn = Turn(f"\n\n{_BEFORE}\n\nQuestion: {question}", answers, " Answer:", self.max_new_tokens)
        return Sample(
            context=f"{_BEFORE}\n\nThe following are given documents.\n\n{listed}",
            turns=(turn,),
            verbatim=True,
            about={"documents": len(documents)},
        )


@dataclass(frozen=True, kw_only=True)
class QA1(QA):
    """One hop: SQuAD (`data=`, its dev-v2.0.json), or a fact about a made-up town."""

    name = "qa_1"
    read = staticmethod(qa_data.squad)
    titled = False

    def facts(self, names: Names, rng: random.Random) -> tuple[list[Fact], Callable[[], Fact]]:
        def draw() -> Fact:
            town, river, founder, year = names.place(), names.place(), names.person(), names.year()
            craft = rng.choice(_CRAFTS)
            return Fact(
                town,
                f"The town of {town} lies on the river {river}; it was founded in {year} by {founder}, and is known for"
                f" its {craft}.",
                (
                    (f"In which year was the town of {town} founded?", year),
                    (f"Who founded the town of {town}?", founder),
                    (f"On which river does the town of {town} lie?", river),
                    (f"What is the town of {town} known for?", craft),
                ),
            )

        return [draw()], draw


@dataclass(frozen=True, kw_only=True)
class QA2(QA):
    """Two hops: HotpotQA (`data=`, its hotpot_dev_distractor_v1.json), or the life of a made-up building's architect."""

    name = "qa_2"
    read = staticmethod(qa_data.hotpotqa)
    titled = True

    def facts(self, names: Names, rng: random.Random) -> tuple[list[Fact], Callable[[], Fact]]:
        def pair() -> list[Fact]:
            town, village, teacher = names.place(), names.place(), names.person()
            architect, built, born = names.person(), names.year(), names.year()
            building = f"{rng.choice(_BUILDINGS)} of {town}"
            asked = f"the architect who designed the {building}"
            return [
                Fact(
                    building[0].upper() + building[1:],
                    f"The {building} was designed by the architect {architect} in {built}.",
                ),
                Fact(
                    architect,
                    f"The architect {architect} was born in {born} in the village of {village}, and learned the trade"
                    f" from {teacher}.",
                    (
                        (f"In which village was {asked} born?", village),
                        (f"In which year was {asked} born?", born),
                        (f"From whom did {asked} learn the trade?", teacher),
                    ),
                ),
            ]

        left: list[Fact] = []

        def draw() -> Fact:
            if not left:
                left.extend(pair())
            return left.pop()

        return pair(), draw


class Names:
    """Made-up names, none given twice, and years."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._used: set[str] = set()

    def place(self) -> str:
        """One word."""
        return self._new(lambda: self._word(3))

    def person(self) -> str:
        """First and last name."""
        return self._new(lambda: f"{self._word(2)} {self._word(3)}")

    def year(self) -> str:
        """From 1100 to 1899."""
        return str(self._rng.randrange(1100, 1900))

    def _word(self, syllables: int) -> str:
        pairs = ((self._rng.choice(_ONSETS), self._rng.choice(_VOWELS)) for _ in range(syllables))
        return ("".join(onset + vowel for onset, vowel in pairs) + self._rng.choice(_ENDS)).capitalize()

    def _new(self, draw: Callable[[], str]) -> str:
        name = draw()
        while name in self._used:
            name = draw()
        self._used.add(name)
        return name


_ONSETS = ("b", "br", "d", "dr", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("", "l", "n", "r", "s")
_CRAFTS = (
    "glass",
    "lace",
    "clocks",
    "paper",
    "knives",
    "silk",
    "bells",
    "pottery",
    "cheese",
    "boats",
    "rope",
    "gloves",
)
_BUILDINGS = (
    "bridge",
    "town hall",
    "theatre",
    "market hall",
    "observatory",
    "library",
    "railway station",
    "granary",
)
