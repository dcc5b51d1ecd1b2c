"""Texts that samples are cut from: a novel that ships with kvfold, or the user's own."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from kvfold.errors import KvfoldError

SHIPPED = "persuasion.txt"
"""Jane Austen, Persuasion (1818, public domain): 83,000 words, about 115,000 tokens."""

_WORD = re.compile(r"\S+\s*")
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')\]]*\s+$|\n\s*\n\s*$")


@dataclass(frozen=True)
class Text:
    """A text as words.

    Attributes
    ----------
    words : tuple of str
        Each with the white space after it: joined, they are the text.
    starts : tuple of int
        The words that begin a sentence.
    """

    words: tuple[str, ...]
    starts: tuple[int, ...]

    def somewhere(self, rng: random.Random) -> int:
        """A word that begins a sentence, by chance."""
        return rng.choice(self.starts)

    def passage(self, start: int, words: int) -> list[str]:
        """So many words from one on; after the last comes the first again."""
        passage = list(self.words[start : start + words])
        while len(passage) < words:
            passage += self.words[: words - len(passage)]
        return passage


def sentence_ends(words: list[str]) -> list[int]:
    """How many words each sentence and all before it have."""
    return [n for n, word in enumerate(words, 1) if _SENTENCE_END.search(word)]


def sentences(words: list[str]) -> list[str]:
    """The sentences of a passage on one line each, white space made single."""
    cuts = [0, *sentence_ends(words)]
    if cuts[-1] < len(words):
        cuts.append(len(words))
    return [" ".join("".join(words[a:b]).split()) for a, b in zip(cuts, cuts[1:])]


@lru_cache(maxsize=8)
def load(path: str = "") -> Text:
    """The text of a file, or of all `.txt` files of a folder in the order of their names ("": the shipped novel).

    Raises
    ------
    KvfoldError
        There is no such file, no text in it, or it is not UTF-8.
    """
    if not path:
        return _split(resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8"))
    place = Path(path).expanduser()
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    if not files:
        raise KvfoldError(f"text={path}: the folder holds no .txt file")
    try:
        content = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise KvfoldError(f"text={path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise KvfoldError(f"text={path}: is no UTF-8 text ({error})") from error
    if not content.strip():
        raise KvfoldError(f"text={path}: there is no text in it")
    return _split(content)


def _split(content: str) -> Text:
    words = _WORD.findall(content.strip() + "\n\n")
    ends = sentence_ends(words)
    return Text(tuple(words), (0, *ends[:-1]))
