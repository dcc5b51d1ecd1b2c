"""LongBench v2: 503 multiple-choice questions about documents of 8 thousand to 2 million words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvfold.errors import KvfoldError
from kvfold.evaluate import scorers
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.datasets import rows
from kvfold.evaluate.tasks.datasets.prompts import halves, sample_of
from kvfold.evaluate.tasks.datasets.public import PublicTask

PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n"
    "(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
"""The published zero-shot prompt (THUDM/LongBench, `prompts/0shot.txt`)."""

SOURCE = rows.Source("THUDM/LongBench-v2", "data")
FIELDS = {
    "context": rows.NONEMPTY,
    "question": rows.NONEMPTY,
    **{f"choice_{letter}": rows.TEXT for letter in "ABCD"},
    "answer": rows.one_of("ABCD"),
    "difficulty": rows.one_of(("easy", "hard")),
    "length": rows.one_of(("short", "medium", "long")),
}


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(PublicTask):
    """Choose the right one of four answers; zero-shot, without a chain of thought.

    `about` has the question's `difficulty`, `length` and `domain`, by which the benchmark's tables break accuracy down.

    Parameters
    ----------
    difficulty : "all", "easy" or "hard"
    length : "all", "short", "medium" or "long"
        Under 32 thousand words, under 128 thousand, longer.
    path : str
        See `PublicTask`; the published name is `data.json`.
    """

    name = "longbench-v2"
    source = "LongBench v2 (arXiv 2412.15204; THUDM/LongBench)"
    metric = "accuracy"

    difficulty: Literal["all", "easy", "hard"] = "all"
    length: Literal["all", "short", "medium", "long"] = "all"

    def load(self) -> Sequence[rows.Row]:
        found = rows.load(SOURCE, self.path, FIELDS).rows
        if self.difficulty == self.length == "all":
            return found
        wanted = {"difficulty": self.difficulty, "length": self.length}
        chosen = [
            row for row in found if all(choice in ("all", row[name]) for name, choice in wanted.items())
        ]
        if not chosen:
            raise KvfoldError(
                f"{self.name}: no row has difficulty {self.difficulty} and length {self.length}"
            )
        return chosen

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        row = self.rows()[index]
        values = {name: row[name].strip() for name in FIELDS}
        before, after = halves(PROMPT, "context", values)
        return sample_of(
            before,
            values["context"],
            after,
            lambda text: Turn(text, (row["answer"],), max_new_tokens=128),
            tokens,
            count,
            task=self.name,
            about={name: row[name] for name in ("difficulty", "length", "domain") if row.get(name)},
        )

    def score(self, answer: str, turn: Turn) -> float:
        return float(scorers.stated_choice(answer) == turn.references[0])
