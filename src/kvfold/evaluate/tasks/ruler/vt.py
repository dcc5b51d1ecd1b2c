"""RULER's variable tracking: which variables hold a value, through a chain of assignments (paper, section 3)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.fit import fit
from kvfold.evaluate.tasks.ruler.common import NOISE, RulerTask

_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text."


@dataclass(frozen=True, kw_only=True)
class VariableTracking(RulerTask):
    """A chain `VAR A = 12345`, `VAR B = VAR A`, ... scattered in noise; all variables of the first chain are asked for.

    Parameters
    ----------
    chains, hops : int
        Chains, and assignments of each after its first.
    example : bool
        Begin with a small worked example (variables of three letters), as published.
    max_new_tokens : int
    """

    name = "vt"

    chains: int = 1
    hops: int = 4
    example: bool = True
    max_new_tokens: int = 30

    def __post_init__(self) -> None:
        if min(self.chains, self.hops) < 1:
            raise KvfoldError(f"{self.name}: chains and hops must be at least 1")

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        example = ""
        if self.example:
            chains = self._draw(3, rng)
            turn = self._turn(chains[0])
            text = self._scatter(chains, 10, rng.getrandbits(64))
            answer = f"{turn.answer_prefix} {' '.join(turn.references)}"
            example = f"{_BEFORE}\n\n{text}{turn.question}{answer}\n\n\n\n"
        chains = self._draw(5, rng)
        seed = rng.getrandbits(64)

        def build(lines: int) -> Sample:
            context = f"{example}{_BEFORE}\n\n{self._scatter(chains, lines, seed)}"
            # A document is folded without white space at its end, so the question begins with it.
            kept = context.rstrip()
            turn = self._turn(chains[0])
            turn = replace(turn, question=context[len(kept) :] + turn.question)
            return Sample(context=kept, turns=(turn,), verbatim=True, about={"hops": self.hops})

        return fit(build, tokens, count, task=self.name, least=self.hops + 1, most=tokens)

    def _draw(self, letters: int, rng: random.Random) -> list[list[str]]:
        """Chains, each a value and its variables."""
        names: dict[str, None] = {}
        while len(names) < self.chains * (self.hops + 1):
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        left = iter(names)
        values = rng.sample(range(10_000, 100_000), self.chains)
        return [[str(value), *(next(left) for _ in range(self.hops + 1))] for value in values]

    def _scatter(self, chains: list[list[str]], lines: int, seed: int) -> str:
        """The assignments of each chain in their order, anywhere among lines of noise."""
        chance = random.Random(seed)
        pieces = [f"{NOISE}\n"] * lines
        for value, *names in chains:
            steps = [f"VAR {names[0]} = {value}"]
            steps += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:])]
            places = sorted(chance.sample(range(len(pieces)), len(steps)))
            for place, step in reversed(list(zip(places, steps))):
                pieces.insert(place, step)
        return " ".join(pieces)

    def _turn(self, chain: list[str]) -> Turn:
        value, *names = chain
        return Turn(
            question=f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            references=tuple(names),
            answer_prefix=" Answer: According to the chain(s) of variable assignment in the text above,"
            f" {len(names)} variables are assgined the value {value}, they are: ",
            max_new_tokens=self.max_new_tokens,
        )
