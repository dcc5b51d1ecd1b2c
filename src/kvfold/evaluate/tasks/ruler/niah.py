"""RULER's needles in a haystack: eight tasks, one generator (paper, section 3 and table 2)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import text
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.fit import Supply, fit
from kvfold.evaluate.tasks.kv_retrieval import random_uuid
from kvfold.evaluate.tasks.ruler.common import NOISE, RulerTask, words

Kind = Literal["words", "numbers", "uuids"]

_DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Per cent of the sentences of an essay after which a needle may stand."""


@dataclass(frozen=True, kw_only=True)
class Niah(RulerTask):
    """Sentences that give a key a "special magic" value, hidden in a haystack; the values of some keys are asked for.

    Parameters
    ----------
    haystack : "noise", "essay" or "needle"
        The same five sentences again and again; a text; or other needles.
    keys, values, queries : int
        Keys with needles, values (needles) of each key, keys asked for. At least `queries` keys are planted.
    key_type, value_type : "words", "numbers" or "uuids"
        Adjective-noun; seven digits; UUIDs.
    text : str
        A file, or a folder of .txt files, for essays ("": the novel that ships).
    max_new_tokens : int
    """

    haystack: Literal["noise", "essay", "needle"] = "essay"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_type: Kind = "words"
    value_type: Kind = "numbers"
    text: str = ""
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if min(self.keys, self.values, self.queries) < 1:
            raise KvfoldError(f"{self.name}: keys, values and queries must be at least 1")
        if max(self.keys, self.queries) * self.values > len(_DEPTHS):
            raise KvfoldError(f"{self.name}: at most {len(_DEPTHS)} needles fit (keys x values)")

    def check(self) -> None:
        for kind in (self.key_type, self.value_type):
            _drawn(kind, random.Random(0))
        if self.haystack == "essay":
            text.load(self.text)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        used: set[str] = set()
        keys = [_unused(self.key_type, used, rng) for _ in range(max(self.keys, self.queries))]
        values = {key: [_unused(self.value_type, used, rng) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        before, turn = self._prompt(asked, tuple(value for key in asked for value in values[key]))
        plant = self._essay(needles, rng) if self.haystack == "essay" else self._lines(needles, used, rng)
        first = self._needle(asked[0], values[asked[0]][0])

        def build(units: int) -> Sample:
            context = plant(units)
            depth = round(context.index(first) / len(context), 3)
            return Sample(
                context=f"{before}\n{context}", turns=(turn,), verbatim=True, about={"depth": depth}
            )

        return fit(build, tokens, count, task=self.name, least=len(needles), most=tokens)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_type} for {key} is: {value}."

    def _prompt(self, asked: list[str], references: tuple[str, ...]) -> tuple[str, Turn]:
        *most, last = asked
        query = f"{', '.join(most)}, and {last}" if most else last
        kind = self.value_type
        if len(references) > 1:
            before = f"Some special magic {kind} are hidden within the following text."
            question = f"\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
            prefix = f" The special magic {kind} for {query} mentioned in the provided text are"
        else:
            kind = kind.removesuffix("s")  # type: ignore[assignment]
            before = f"A special magic {kind} is hidden within the following text."
            question = f"\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
            prefix = f" The special magic {kind} for {query} mentioned in the provided text is"
        before += f" Make sure to memorize it. I will quiz you about the {kind} afterwards."
        return before, Turn(question, references, prefix, self.max_new_tokens)

    def _essay(self, needles: list[str], rng: random.Random) -> Callable[[int], str]:
        book = text.load(self.text)
        start = book.somewhere(rng)
        depths = sorted(rng.sample(_DEPTHS, len(needles)), reverse=True)

        def plant(units: int) -> str:
            lines = text.sentences(book.passage(start, units))
            places = [len(lines) * depth // 100 for depth in depths]
            for place, needle in zip(places, needles):
                lines.insert(place, needle)
            return " ".join(lines)

        return plant

    def _lines(self, needles: list[str], used: set[str], rng: random.Random) -> Callable[[int], str]:
        seed = rng.getrandbits(64)

        def other() -> str:
            return self._needle(_unused(self.key_type, used, rng), _unused(self.value_type, used, rng))

        filling = Supply((lambda: NOISE) if self.haystack == "noise" else other)

        def plant(units: int) -> str:
            lines = filling.first(units)
            places = sorted(random.Random(seed).sample(range(units), len(needles)), reverse=True)
            for place, needle in zip(places, needles):
                lines.insert(place, needle)
            return "\n".join(lines)

        return plant


def _unused(kind: Kind, used: set[str], rng: random.Random) -> str:
    drawn = _drawn(kind, rng)
    while drawn in used:
        drawn = _drawn(kind, rng)
    used.add(drawn)
    return drawn


def _drawn(kind: Kind, rng: random.Random) -> str:
    if kind == "words":
        return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return random_uuid(rng)


@dataclass(frozen=True, kw_only=True)
class NiahSingle1(Niah):
    """One word key with a number, in noise (passkey retrieval)."""

    name = "niah_single_1"
    haystack: Literal["noise", "essay", "needle"] = "noise"


@dataclass(frozen=True, kw_only=True)
class NiahSingle2(Niah):
    """One word key with a number, in an essay (the usual needle in a haystack)."""

    name = "niah_single_2"


@dataclass(frozen=True, kw_only=True)
class NiahSingle3(Niah):
    """One word key with a UUID, in an essay."""

    name = "niah_single_3"
    value_type: Kind = "uuids"


@dataclass(frozen=True, kw_only=True)
class NiahMultikey1(Niah):
    """Four word keys with numbers, in an essay; one is asked for."""

    name = "niah_multikey_1"
    keys: int = 4


@dataclass(frozen=True, kw_only=True)
class NiahMultikey2(Niah):
    """One word key with a number among nothing but others (line retrieval)."""

    name = "niah_multikey_2"
    haystack: Literal["noise", "essay", "needle"] = "needle"


@dataclass(frozen=True, kw_only=True)
class NiahMultikey3(Niah):
    """One UUID key with a UUID among nothing but others (key-value retrieval)."""

    name = "niah_multikey_3"
    haystack: Literal["noise", "essay", "needle"] = "needle"
    key_type: Kind = "uuids"
    value_type: Kind = "uuids"


@dataclass(frozen=True, kw_only=True)
class NiahMultivalue(Niah):
    """One word key with four numbers, in an essay; all are asked for."""

    name = "niah_multivalue"
    values: int = 4


@dataclass(frozen=True, kw_only=True)
class NiahMultiquery(Niah):
    """Four word keys with numbers, in an essay; all are asked for."""

    name = "niah_multiquery"
    queries: int = 4
