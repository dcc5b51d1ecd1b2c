"""AIME: competition problems whose answers are integers, solved in long chains of thought."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.errors import KvfoldError
from kvfold.evaluate import scorers
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.datasets import rows
from kvfold.evaluate.tasks.datasets.public import PublicTask

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What the makers of reasoning models (DeepSeek-R1, Qwen) recommend for mathematics."""

SOURCES = {
    "2024": rows.Source("Maxwell-Jia/AIME_2024", "aime_2024_problems", "train"),
    "2025": rows.Source("math-ai/aime25", "test", "test"),
}
PROBLEM, ANSWER = ("problem", "question"), ("answer",)
"""Names that publishers give the two fields, in any case."""


def _field(row: rows.Row, names: Sequence[str]) -> str | None:
    return next((key for key in row if key.lower() in names and row[key] is not None), None)


def _integer(value: Any) -> int | None:
    text = str(value).strip()
    return int(text) if text.isdecimal() and int(text) <= 999 else None


@dataclass(frozen=True, kw_only=True)
class AIME(PublicTask):
    """Solve a problem of the American Invitational Mathematics Examination.

    The prompt is short and the answer long: what is measured is folding while generating. Published figures are means
    over sampled answers (temperature 0.6); a greedy answer each, as here, is one draw and not comparable to the digit.

    Parameters
    ----------
    year : "2024" or "2025"
        The thirty problems of that year's two papers.
    max_new_tokens : int
    path : str
        See `PublicTask`; the published names are `aime_2024_problems` and `test`.
    """

    name = "aime"
    source = "American Invitational Mathematics Examination (Mathematical Association of America)"
    metric = "accuracy"

    year: Literal["2024", "2025"] = "2025"
    max_new_tokens: int = 32768

    def __post_init__(self) -> None:
        if str(self.year) not in SOURCES:
            raise KvfoldError(f"{self.name}: year must be {' or '.join(SOURCES)}, not {self.year}")

    def load(self) -> Sequence[rows.Row]:
        table = rows.load(SOURCES[str(self.year)], self.path, {})
        problems = []
        for index, row in enumerate(table.rows):
            problem, answer = _field(row, PROBLEM), _field(row, ANSWER)
            if problem is None or answer is None:
                missing = PROBLEM[0] if problem is None else ANSWER[0]
                raise table.wrong(index, missing, f"is missing (it has {', '.join(sorted(row))})")
            if not isinstance(row[problem], str) or not row[problem].strip():
                raise table.wrong(index, problem, "must be a text that is not empty")
            integer = _integer(row[answer])
            if integer is None:
                raise table.wrong(index, answer, f"must be an integer from 0 to 999, not {row[answer]!r}")
            problems.append({"problem": row[problem].strip(), "answer": str(integer)})
        return problems

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        row = self.rows()[index]
        needed = count(row["problem"]) + count(INSTRUCTION)
        if needed > tokens:
            raise KvfoldError(f"{self.name}: {tokens} tokens are too few, problem {index} takes {needed}")
        turn = Turn(INSTRUCTION, (row["answer"],), max_new_tokens=self.max_new_tokens)
        return Sample(context=row["problem"], turns=(turn,), verbatim=True, about={"year": str(self.year)})

    def score(self, answer: str, turn: Turn) -> float:
        return float(scorers.boxed_integer(answer) == int(turn.references[0]))
