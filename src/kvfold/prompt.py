"""How a document, and questions about it, are put to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.errors import KvfoldError

_DOCUMENT_END, _ANSWER, _QUESTION = (
    "\u2063kvfold-end\u2063",
    "\u2063kvfold-answer\u2063",
    "\u2063kvfold-question\u2063",
)

RESERVED = 512
"""Positions that --truncate leaves for questions and answers (an eighth of a context shorter than 4096)."""


@dataclass(frozen=True)
class Template:
    """The text around questions that follow a folded document.

    Attributes
    ----------
    before, after : str
        Around the first question.
    between : str
        Before a later question: ends the answer's turn and begins the user's.
    stop : str
        Text that ends an answer ("": only the model's own end token does).
    """

    before: str
    after: str
    between: str
    stop: str = ""

    def first(self, question: str) -> str:
        """What follows the document."""
        return self.before + question + self.after

    def later(self, question: str) -> str:
        """What follows an answer."""
        return self.between + question + self.after

    def to_dict(self) -> dict[str, str]:
        """Plain data, saved with the folded cache."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any] | None) -> Template:
        """The template of a saved cache; one saved without (from Python) is continued as plain text."""
        if not data:
            return PLAIN
        return Template(**{name: str(data.get(name, "")) for name in ("before", "after", "between", "stop")})


PLAIN = Template(before="\n\nQuestion: ", after="\nAnswer:", between="\n\nQuestion: ", stop="\n\n")
"""For models without a chat template."""


def has_chat(tokenizer: Any) -> bool:
    """Whether the model comes with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_of(tokenizer: Any, document: str, *, chat: bool = True) -> tuple[str, Template]:
    """The text to fold, and the template of the questions about it.

    With a chat template the document opens the user's first turn, and the question ends that turn, so that the
    text to fold stops where the document does.

    Parameters
    ----------
    tokenizer
    document : str
    chat : bool
        Use the model's chat template where it has one; False: plain text.

    Raises
    ------
    KvfoldError
        The document is empty, or the model's chat template changes it.
    """
    document = document.strip()
    if not document:
        raise KvfoldError("the document is empty")
    if not chat or not has_chat(tokenizer):
        return document, PLAIN
    first = {"role": "user", "content": document + _DOCUMENT_END}
    rendered = _render(tokenizer, [first])
    prefix, found, after = rendered.partition(_DOCUMENT_END)
    if not found or document not in prefix:
        raise KvfoldError(
            "the model's chat template changes the user's text, so a document cannot be folded in it"
        )
    later = [first, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _QUESTION}]
    between = _render(tokenizer, later).partition(_ANSWER)[2].partition(_QUESTION)[0]
    return prefix, Template(before="\n\n", after=after, between=between)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def document_tokens(
    tokenizer: Any, prefix: str, config: Any, *, templated: bool, truncate: bool
) -> list[int]:
    """Token ids of the text to fold.

    Raises
    ------
    KvfoldError
        Longer than the model's context, unless `truncate` cuts its end.
    """
    ids = ([] if templated else start_tokens(tokenizer)) + tokens_of(tokenizer, prefix)
    limit = context_length(config)
    if limit is None or len(ids) < limit:
        return ids
    if not truncate:
        raise KvfoldError(
            f"the document is {len(ids)} tokens, and the model reads at most {limit}, questions included:"
            " shorten it, or --truncate its end"
        )
    return ids[: limit - min(RESERVED, limit // 8)]


def start_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a plain text: its begin token, or nothing."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a piece of text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def context_length(config: Any) -> int | None:
    """Most positions a model was made for, or None if its config does not say."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(limit) if limit else None


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the model's own, or the tokenizer's."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])


def cut_at(text: str, stop: str) -> str | None:
    """An answer up to its stop text, or None while that has not come; white space before the answer stops nothing."""
    found = text.find(stop, len(text) - len(text.lstrip())) if stop else -1
    return None if found < 0 else text[:found]
