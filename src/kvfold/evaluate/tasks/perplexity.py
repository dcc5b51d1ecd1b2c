"""Perplexity of a text's own next words."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import text
from kvfold.evaluate.tasks.base import Count, Sample, Task
from kvfold.evaluate.tasks.fit import fit, largest


@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """The passage is folded, and the words after it are fed token by token.

    Parameters
    ----------
    continuation : int
        Most tokens of the words after it, beside those of the passage.
    text : str
        A file, or a folder of .txt files ("": the novel that ships).
    """

    name = "perplexity"
    source = "Language modelling with teacher forcing, on a text that ships or is given"
    metric = "perplexity"
    higher_is_better = False
    asks = False

    continuation: int = 256
    text: str = ""

    def __post_init__(self) -> None:
        if self.continuation < 1:
            raise KvfoldError(f"{self.name}: continuation must be at least 1 token, got {self.continuation}")

    def check(self) -> None:
        text.load(self.text)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        book = text.load(self.text)
        start = book.somewhere(rng)

        def build(words: int) -> Sample:
            return Sample(
                context="".join(book.passage(start, words)).rstrip(), about={"start": start, "words": words}
            )

        sample = fit(build, tokens, count, task=self.name, least=1, most=min(tokens, len(book.words)))
        words = int(sample.about["words"])
        left = len(book.words) - words

        def following(words_after: int) -> str:
            # White space is of the word after it, for most tokenizers.
            whole = "".join(book.passage(start, words + words_after)).rstrip()
            return whole[len(sample.context) :]

        if left < 1 or count(following(1)) > self.continuation:
            raise KvfoldError(
                f"{self.name}: nothing of the text is left to continue a passage of {words} words (it has"
                f" {len(book.words)}) with at most {self.continuation} tokens: ask for a shorter passage, or name a"
                " longer text with text=PATH"
            )
        after = largest(
            lambda n: count(following(n)),
            self.continuation,
            1,
            min(left, self.continuation),
            count(following(1)),
        )
        return Sample(context=sample.context, continuation=following(after), about=sample.about)
