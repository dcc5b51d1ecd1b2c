"""What a task is: documents made from a seed, what is asked of them, and how an answer is scored."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

Count = Callable[[str], int]
"""Tokens of a text for the model at hand."""


@dataclass(frozen=True)
class Turn:
    """One question about a document.

    Attributes
    ----------
    question : str
        What the user asks.
    references : tuple of str
        Right answers: `Task.score` says whether all or any are wanted.
    answer_prefix : str
        First words of the answer, given to the model, so that models differ in what they know and not in how they word it.
    max_new_tokens : int
    """

    question: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    max_new_tokens: int = 32


@dataclass(frozen=True)
class Sample:
    """One document and what is asked of it.

    Attributes
    ----------
    context : str
        The document, which is folded.
    turns : tuple of Turn
        Asked one after another of the same cache, each after the model's own answer to the one before.
    continuation : str
        Instead of turns: the document's own next words, fed to the model and scored token by token.
    instruction : str
        What the task tells the model before the document ("": nothing).
    images : tuple of bytes
        Encoded images of the document, in order, each where `context` says `<image>`.
    verbatim : bool
        `context` and the first question are a benchmark's published prompt, cut in two where the document ends: joined
        as they are, with nothing around them but what a chat template puts around a user's words, and no text ends an
        answer. `context` neither begins nor ends with white space; the question may.
    about : mapping
        What tells this sample from others of its task, for tables and charts (`depth`, `needles`, ...).
    """

    context: str
    turns: tuple[Turn, ...] = ()
    continuation: str = ""
    instruction: str = ""
    images: tuple[bytes, ...] = ()
    verbatim: bool = False
    about: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A way to make samples and to score answers; its fields are the task's options.

    Class attributes
    ----------------
    name : str
        On the command line and in results.
    source : str
        Where the task comes from.
    metric : str
        What `score` is ("recall", "exact match", "F1", "perplexity", ...).
    higher_is_better : bool
    asks : bool
        Whether answers are scored; otherwise `metric` is a figure of the continuation.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def check(self) -> None:
        """Raise KvfoldError before any work if samples cannot be made: a package, a file or a field is missing."""

    @abstractmethod
    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        """The sample with that index.

        Parameters
        ----------
        index : int
            From 0; tasks with a grid (needle depths) walk it by the index.
        tokens : int
            The instruction, the document and the first question together take at most this many tokens, and
            nearly as many; the runner takes off what the chat template adds.
        count : callable
            Tokens of a text.
        rng : random.Random
            Seeded from the run's seed, the task and the index: the only source of chance.

        Raises
        ------
        KvfoldError
            `tokens` is too short for the task (the message says how many more it takes), or a data set lacks a field
            (row and field named).
        IndexError
            A data set has no such row.
        """

    def score(self, answer: str, turn: Turn) -> float:
        """Score of an answer, in [0, 1]; for tasks that ask."""
        raise NotImplementedError(f"{self.name} scores a continuation, not an answer")

    def to_dict(self) -> dict[str, Any]:
        """Name and options as plain data."""
        return {"task": self.name, **asdict(self)}
