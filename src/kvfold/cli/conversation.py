"""Ask a model questions that continue a cache: greedy decoding, streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.engine import Decoding, stream
from kvfold.errors import KvfoldError
from kvfold.hf import FoldedCache
from kvfold.prompt import Template, context_length, cut_at, end_tokens, tokens_of

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Answer:
    """An answer and how fast it came.

    Attributes
    ----------
    text : str
    tokens : int
        Generated tokens, the end token included.
    first_token_seconds : float
        Reading the question, up to the first token.
    decode_seconds : float
        From the first token to the last.
    """

    text: str
    tokens: int
    first_token_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token; None for an answer of one token."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 else None


class Conversation:
    """A growing exchange on one cache, which already holds the document.

    Questions and answers stay exact in the cache's tail: next to the document they are small.

    Parameters
    ----------
    model, tokenizer
    cache : FoldedCache or a transformers cache
        Grows with every question; give it a fork to keep the original.
    template : Template
    max_new_tokens : int
    """

    def __init__(self, model: Any, tokenizer: Any, cache: Any, template: Template, max_new_tokens: int = 64):
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.template, self.max_new_tokens = template, max_new_tokens
        self.answer: Answer | None = None
        self._unread: list[int] = []
        self._end = end_tokens(model, tokenizer)
        if isinstance(cache, FoldedCache):
            cache.keep_exact()

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece; afterwards `answer` holds all of it.

        Raises
        ------
        KvfoldError
            The question is empty, or no room for it is left in the model's context.
        """
        if not question.strip():
            raise KvfoldError("the question is empty")
        put = self.template.first if self.answer is None else self.template.later
        ids = self._unread + tokens_of(self.tokenizer, put(question.strip()))
        room = self._room(len(ids))
        start = first = time.perf_counter()
        made: list[int] = []
        text = shown = ""
        with closing(self._greedy(ids, room)) as tokens:
            for token in map(int, tokens):
                if not made:
                    first = time.perf_counter()
                made.append(token)
                if token in self._end:
                    break
                text = self.tokenizer.decode(
                    made, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                cut = cut_at(text, self.template.stop)
                if cut is not None:
                    text = cut
                    break
                if not text.endswith("\ufffd"):  # half of a character: the rest may come
                    yield text[len(shown) :]
                    shown = text
        if text != shown:
            yield text[len(shown) :]
        end = time.perf_counter()
        # The last token was never read by the model; an end token comes again with the next question's template.
        self._unread = [] if made and made[-1] in self._end else made[-1:]
        self.answer = Answer(text.strip(), len(made), first - start, end - first)

    def say(self, question: str) -> Answer:
        """The whole answer at once."""
        for _ in self.ask(question):
            pass
        assert self.answer is not None
        return self.answer

    def _room(self, new: int) -> int:
        limit = context_length(self.model.config)
        if limit is None:
            return self.max_new_tokens
        used = self.cache.get_seq_length()
        if used + new >= limit:
            raise KvfoldError(
                f"no room for the question: {used} tokens in the cache and {new} new ones,"
                f" and the model reads at most {limit}"
            )
        return min(self.max_new_tokens, limit - used - new)

    def _greedy(self, ids: list[int], max_new_tokens: int) -> Decoding:
        """The likeliest tokens after new ones; no other preference of the model's generation config is followed."""
        new = torch.tensor([ids], device=self.model.device)
        return stream(
            self.model,
            new,
            self.cache,
            attention_mask=new.new_ones(1, self.cache.get_seq_length() + len(ids)),
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **GREEDY,
        )
