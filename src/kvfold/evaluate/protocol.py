"""What is folded and what is asked: a sample as token ids, and greedy answers from a cache.

Every answer token is read from the folded cache. When the question is in view the last token of the prompt is held back
and read after the fold, since the prompt's own pass would otherwise give the first answer token exactly; in the same way
a continuation begins with the document's last token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.evaluate.results import Format, View
from kvfold.evaluate.tasks.base import Count, Sample
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.prompt import context_length, cut_at, end_tokens, prompt_of, start_tokens, tokens_of


@dataclass(frozen=True)
class Script:
    """A sample as the model reads it.

    Attributes
    ----------
    folded : list of int
        Tokens that are folded.
    asked : list of list of int
        Tokens fed before each answer (before the continuation: the document's last token).
    limits : list of int
        Longest answer to each.
    continuation : list of int
        Tokens that are fed instead of answers.
    stop : str
        Text that ends an answer.
    """

    folded: list[int]
    asked: list[list[int]]
    limits: list[int] = field(default_factory=list)
    continuation: list[int] = field(default_factory=list)
    stop: str = ""

    @property
    def tokens(self) -> int:
        """Positions that the sample takes at most."""
        return len(self.folded) + sum(map(len, [*self.asked, self.continuation])) + sum(self.limits)


def script_of(tokenizer: Any, sample: Sample, view: View, format: Format) -> Script:
    """Put a sample to the model.

    Raises
    ------
    KvfoldError
        The sample has images, or neither questions nor a continuation, or the chat template cannot hold it.
    """
    if sample.images:
        raise KvfoldError("the sample has images, and kvfold eval reads text only")
    if not sample.turns and not sample.continuation:
        raise KvfoldError("the sample has neither questions nor a continuation")
    document = f"{sample.instruction}\n\n{sample.context}" if sample.instruction else sample.context
    prefix, template = prompt_of(tokenizer, document, chat=format == "chat")
    ids = (start_tokens(tokenizer) if format == "plain" else []) + tokens_of(tokenizer, prefix)
    if sample.continuation:
        space = document[len(document.rstrip()) :]
        following = tokens_of(tokenizer, space + sample.continuation)
        return Script(ids[:-1], [ids[-1:]], continuation=following)
    asked = []
    for number, turn in enumerate(sample.turns):
        if number:
            text = template.later(turn.question)
        elif sample.verbatim:
            text = turn.question + (template.after if format == "chat" else "")
        elif not turn.question and format == "plain":
            text = ""  # the document itself is to be gone on with
        else:
            text = template.first(turn.question)
        prefix = turn.answer_prefix
        gap = " " if text and prefix and not text[-1].isspace() and not prefix[0].isspace() else ""
        asked.append(tokens_of(tokenizer, text + gap + prefix))
    if view == "in view" or not asked[0]:
        whole = ids + asked[0]
        ids, asked[0] = whole[:-1], whole[-1:]
    stop = "" if sample.verbatim else template.stop
    return Script(ids, asked, [turn.max_new_tokens for turn in sample.turns], stop=stop)


def room(tokenizer: Any, tokens: int, format: Format) -> tuple[int, Count]:
    """Of a length asked for, what the prompt's own words leave to the sample; and how to count that."""

    def count(text: str) -> int:
        return len(tokens_of(tokenizer, text))

    prefix, template = prompt_of(tokenizer, "x", chat=format == "chat")
    words = prefix + template.first("y")
    start = len(start_tokens(tokenizer)) if format == "plain" else 0
    # "x" and "y" are one token each at least; two more for words that meet differently in place.
    return tokens - start - count(words), count


class Reader:
    """Feeds tokens to a model and answers greedily from its cache.

    Parameters
    ----------
    model, tokenizer
    exact : bool
        Answer tokens stay exact in the cache; False: they are folded as the method's `block` says.

    Attributes
    ----------
    steps, seconds : int, float
        Tokens decoded one by one so far, and the time that took.
    """

    def __init__(self, model: Any, tokenizer: Any, exact: bool):
        self.model, self.tokenizer, self.exact = model, tokenizer, exact
        self.ends = end_tokens(model, tokenizer)
        self.limit = context_length(model.config)
        self.steps, self.seconds = 0, 0.0

    @torch.no_grad()
    def feed(self, cache: FoldedCache, ids: Sequence[int], last: int, *, exact: bool = True) -> Tensor:
        """Read tokens into a cache; logits (last, vocabulary) of those after the last ones."""
        cache.keep_exact(exact)
        step = torch.tensor([ids], device=self.model.device)
        logits: Tensor = self.model(
            input_ids=step, use_cache=True, logits_to_keep=last, **{CACHE_KEYWORD: cache}
        ).logits[0]
        return logits

    def forced(self, cache: FoldedCache, chunks: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """Logits (tokens, vocabulary) of given answers, in the dialogue that they belong to.

        Parameters
        ----------
        cache : FoldedCache
            Holds the dialogue afterwards.
        chunks : sequence of (question, answer) tokens
            The logits are those of the answers' tokens. An answer's last token is not read; where it counts, the next
            question begins with it.
        """
        if self.exact:
            ids: list[int] = []
            rows: list[int] = []
            for asked, answer in chunks:
                ids += asked
                rows += range(len(ids) - 1, len(ids) - 1 + len(answer))
                ids += answer[:-1]
            first = rows[0]
            logits = self.feed(cache, ids, len(ids) - first)
            return logits[torch.tensor(rows, device=logits.device) - first]
        parts = []
        for asked, answer in chunks:
            parts.append(self.feed(cache, asked, 1))
            parts += [self.feed(cache, [token], 1, exact=False) for token in answer[:-1]]
        return torch.cat(parts)

    def answer(
        self, cache: FoldedCache, asked: Sequence[int], limit: int, stop: str, begun: Sequence[int] = ()
    ) -> list[int]:
        """Answer greedily; the tokens, with the end token or those that complete the stop text.

        Parameters
        ----------
        cache : FoldedCache
            Afterwards holds the question and all but the last token of the answer.
        asked : sequence of int
            Tokens to read first, up to the answer.
        limit : int
            Most tokens.
        stop : str
            Text that ends the answer.
        begun : sequence of int
            Tokens that the answer begins with.
        """
        if self.limit is not None:
            limit = max(1, min(limit, self.limit - cache.get_seq_length() - len(asked)))
        made, before = list(begun), len(begun)
        ended = bool(made) and self._ended(made, limit, stop)
        read = made[:-1] if ended else made
        if self.exact:
            logits = self.feed(cache, [*asked, *read], 1)
        else:
            logits = self.feed(cache, asked, 1)
            for token in read:
                logits = self.feed(cache, [token], 1, exact=False)
        start = time.perf_counter()
        while not ended:
            made.append(int(logits[-1].argmax()))
            ended = self._ended(made, limit, stop)
            if not ended:
                logits = self.feed(cache, made[-1:], 1, exact=self.exact)
        # The first token needed no step of its own.
        steps = len(made) - before - 1
        if steps > 0:
            self.steps += steps
            self.seconds += time.perf_counter() - start
        return made

    def _ended(self, made: list[int], limit: int, stop: str) -> bool:
        return made[-1] in self.ends or len(made) >= limit or cut_at(self._decoded(made), stop) is not None

    def _decoded(self, answer: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def text(self, answer: Sequence[int], stop: str) -> str:
        """An answer's text, without what ended it."""
        text = self._decoded(answer)
        cut = cut_at(text, stop)
        return text if cut is None else cut

    def unread(self, answer: Sequence[int]) -> list[int]:
        """What the next question begins with: an answer's last token, which the model has not read.

        Not an end token: the template of the next question has it.
        """
        return [] if answer[-1] in self.ends else [answer[-1]]

    def follow(
        self,
        cache: FoldedCache,
        chunks: Sequence[tuple[list[int], list[int]]],
        preferred: Sequence[int],
        script: Script,
    ) -> list[list[int]]:
        """The cache's own greedy answers, where it has read another's already.

        As in speculative decoding: as far as the other's tokens are those that this cache prefers after the same
        words, they are its own answer too, and only what follows the first difference is decoded.

        Parameters
        ----------
        cache : FoldedCache
            As before the dialogue.
        chunks : sequence of (question, answer) tokens
            The other's dialogue.
        preferred : sequence of int
            For each token of the answers, the one with the largest logit from this cache.
        script : Script
        """
        answers: list[list[int]] = []
        position = 0
        for turn, (asked, answer) in enumerate(chunks):
            own = list(preferred[position : position + len(answer)])
            position += len(answer)
            if own == answer:
                answers.append(answer)
                continue
            same = next(index for index, token in enumerate(answer) if token != own[index])
            if turn:
                self.forced(cache, chunks[:turn])
            begun = own[: same + 1]
            answers.append(self.answer(cache, asked, script.limits[turn], script.stop, begun))
            for asked_next, limit in zip(script.asked[turn + 1 :], script.limits[turn + 1 :], strict=True):
                asked = self.unread(answers[-1]) + asked_next
                answers.append(self.answer(cache, asked, limit, script.stop))
            break
        return answers
