"""RULER's frequent words extraction: the three most frequent of made-up words, drawn by a zeta law (paper, section 3)."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.fit import fit
from kvfold.evaluate.tasks.ruler.common import RulerTask

ASKED = 3


@dataclass(frozen=True, kw_only=True)
class FrequentWords(RulerTask):
    """Words of six letters; the first by frequency is dots, and the next three are asked for.

    The k-th is `k ** -alpha / zeta(alpha)` of all.

    Parameters
    ----------
    alpha : float
        Above 1; the smaller, the harder.
    max_new_tokens : int
    """

    name = "fwe"

    alpha: float = 2.0
    max_new_tokens: int = 50

    def __post_init__(self) -> None:
        if not self.alpha > 1:
            raise KvfoldError(f"{self.name}: alpha must be above 1, got {self.alpha}")

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        vocabulary: dict[str, None] = {"...": None}
        while len(vocabulary) < max(tokens // 50, ASKED + 2):
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        ranked = list(vocabulary)
        seed = rng.getrandbits(64)
        total = zeta(self.alpha)
        shares = [rank**-self.alpha / total for rank in range(1, len(ranked) + 1)]
        turn = Turn(
            question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most"
            " frequently appeared words in the above coded text?",
            references=tuple(ranked[1 : ASKED + 1]),
            answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            max_new_tokens=self.max_new_tokens,
        )

        def build(drawn: int) -> Sample:
            coded = [word for word, share in zip(ranked, shares) for _ in range(int(drawn * share))]
            random.Random(seed).shuffle(coded)
            context = (
                "Read the following coded text and track the frequency of each coded word. Find the three most"
                f" frequently appeared coded words. {' '.join(coded)}"
            )
            return Sample(context=context, turns=(turn,), verbatim=True, about={"words": len(coded)})

        # Enough that the last word asked for stands more often than the next.
        least = math.ceil(1 / (shares[ASKED] - shares[ASKED + 1]))
        return fit(build, tokens, count, task=self.name, least=least, most=max(least, 2 * tokens))


def zeta(alpha: float) -> float:
    """Riemann's zeta function above 1, by Euler and Maclaurin's sum from the 1,000th term."""
    n = 1000
    head = math.fsum(k**-alpha for k in range(1, n))
    return head + n ** (1 - alpha) / (alpha - 1) + n**-alpha / 2 + alpha * n ** (-alpha - 1) / 12
