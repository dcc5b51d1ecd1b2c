"""Key-value retrieval: one value out of a long JSON object of random keys and values."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import matching
from kvfold.evaluate.tasks.base import Count, Sample, Task, Turn
from kvfold.evaluate.tasks.depths import depth_of
from kvfold.evaluate.tasks.fit import Supply, fit


@dataclass(frozen=True, kw_only=True)
class KVRetrieval(Task):
    """The value of a key in a JSON object of UUIDs, with the paper's prompt.

    Samples ask for the pairs at a grid of depths, the middle and the ends first.

    Parameters
    ----------
    depths : int
        Depths of the grid, from 0 (first pair) to 1 (last pair) at equal distances; one alone is 0.5.
    """

    name = "kv_retrieval"
    source = "Lost in the Middle, arXiv 2307.03172, section 3"
    metric = "recall"

    depths: int = 5

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise KvfoldError(f"{self.name}: depths must be at least 1, got {self.depths}")

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        depth = depth_of(index, self.depths)
        supply = Supply(lambda: (random_uuid(rng), random_uuid(rng)))
        key, value = supply.first(1)[0]
        turn = Turn(
            question=f'Key: "{key}"',
            references=(value,),
            answer_prefix="Corresponding value:",
            max_new_tokens=64,
        )

        def build(pairs: int) -> Sample:
            asked, *others = supply.first(pairs)
            others.insert(round(depth * (pairs - 1)), asked)
            lines = ",\n ".join(f'"{key}": "{value}"' for key, value in others)
            return Sample(
                context=f"JSON data:\n{{{lines}}}",
                turns=(turn,),
                instruction="Extract the value corresponding to the specified key in the JSON object below.",
                about={"depth": depth, "pairs": pairs},
            )

        return fit(build, tokens, count, task=self.name, least=2, most=tokens)

    def score(self, answer: str, turn: Turn) -> float:
        return matching.any_of(answer, turn.references)


def random_uuid(rng: random.Random) -> str:
    """A version 4 UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
