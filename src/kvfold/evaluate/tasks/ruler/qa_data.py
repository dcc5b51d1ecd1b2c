"""Question answering files in the formats of SQuAD and HotpotQA."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes
    ----------
    question : str
    answers : tuple of str
        Any is right.
    documents : tuple of int
        Those it is about.
    related : tuple of int
        Others of the same article, taken first to distract.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """All questions and documents of a file."""

    asked: tuple[Asked, ...]
    documents: tuple[str, ...]

    def others(self, asked: Asked, rng: random.Random) -> tuple[list[int], list[int]]:
        """Documents that do not answer a question, of the same article and of others, each in any order."""
        known = {*asked.documents, *asked.related}
        near = [number for number in asked.related if number not in asked.documents]
        far = [number for number in range(len(self.documents)) if number not in known]
        return rng.sample(near, len(near)), rng.sample(far, len(far))


@lru_cache(maxsize=2)
def squad(path: str) -> Questions:
    """SQuAD 1.1 or 2.0: `{"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]}`.

    Questions without an answer are left out.

    Raises
    ------
    KvfoldError
        Not such a file; the message names the place and the field.
    """
    numbers: dict[str, int] = {}
    asked = []
    for a, article in enumerate(_field(_read(path), "data", path, "the file", list)):
        paragraphs = _field(article, "paragraphs", path, f"data[{a}]", list)
        contexts = [
            _field(paragraph, "context", path, f"data[{a}].paragraphs[{p}]", str)
            for p, paragraph in enumerate(paragraphs)
        ]
        related = tuple(dict.fromkeys(numbers.setdefault(context, len(numbers)) for context in contexts))
        for p, paragraph in enumerate(paragraphs):
            place = f"data[{a}].paragraphs[{p}]"
            for q, question in enumerate(_field(paragraph, "qas", path, place, list)):
                here = f"{place}.qas[{q}]"
                answers = _field(question, "answers", path, here, list)
                texts = tuple(_field(answer, "text", path, f"{here}.answers", str) for answer in answers)
                if texts and not question.get("is_impossible"):
                    words = _field(question, "question", path, here, str)
                    asked.append(Asked(words, texts, (numbers[contexts[p]],), related))
    return _found(asked, numbers, path)


@lru_cache(maxsize=2)
def hotpotqa(path: str) -> Questions:
    """HotpotQA, distractor setting: `[{"question", "answer", "context": [[title, [sentence, ...]], ...]}]`.

    Raises
    ------
    KvfoldError
        Not such a file; the message names the place and the field.
    """
    rows = _read(path)
    if not isinstance(rows, list):
        raise KvfoldError(f"data={path}: expected a list of questions, as in HotpotQA")
    numbers: dict[str, int] = {}
    asked = []
    for r, row in enumerate(rows):
        place = f"[{r}]"
        documents = []
        for item in _field(row, "context", path, place, list):
            if not (isinstance(item, list) and len(item) == 2 and isinstance(item[1], list)):
                raise KvfoldError(f"data={path}: {place}.context must hold [title, [sentence, ...]]")
            document = f"{item[0]}\n{''.join(map(str, item[1]))}"
            documents.append(numbers.setdefault(document, len(numbers)))
        question = _field(row, "question", path, place, str)
        answer = _field(row, "answer", path, place, str)
        asked.append(Asked(question, (answer,), tuple(dict.fromkeys(documents))))
    return _found(asked, numbers, path)


def _found(asked: list[Asked], numbers: dict[str, int], path: str) -> Questions:
    if not asked:
        raise KvfoldError(f"data={path}: no question in it has an answer")
    return Questions(tuple(asked), tuple(numbers))


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KvfoldError(f"data={path}: cannot be read as JSON ({error})") from error


def _field(row: Any, name: str, path: str, place: str, kind: type) -> Any:
    if not isinstance(row, dict) or not isinstance(row.get(name), kind):
        raise KvfoldError(f"data={path}: {place} has no field {name!r} ({kind.__name__})")
    return row[name]
