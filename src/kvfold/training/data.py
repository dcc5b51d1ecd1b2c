"""Texts as rows of tokens of one length, in an order that a seed fixes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.prompt import end_tokens


def pack(model: Any, tokenizer: Any, texts: Sequence[str], tokens: int) -> Tensor:
    """Texts one after the other, an end token between them, cut into rows.

    Parameters
    ----------
    model, tokenizer
    texts : sequence of str
    tokens : int
        Length of a row. What is left at the end is dropped.

    Returns
    -------
    (rows, tokens) int64

    Raises
    ------
    KvfoldError
        They are shorter than one row.
    """
    ends = sorted(end_tokens(model, tokenizer))[:1]
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *ends]
    if len(ids) < tokens:
        raise KvfoldError(
            f"the texts are {len(ids)} tokens, shorter than one sequence of {tokens}: give more text, or fewer --tokens"
        )
    return torch.tensor(ids[: len(ids) // tokens * tokens]).view(-1, tokens)


def batch_of(rows: Tensor, number: int, size: int, seed: int) -> Tensor:
    """A batch (size, tokens) by its number: every row once, in a new order each time round."""
    count, picked = len(rows), []
    for place in range(number * size, (number + 1) * size):
        draw = torch.Generator().manual_seed(seed * 1_000_003 + place // count)
        picked.append(torch.randperm(count, generator=draw)[place % count])
    return rows[torch.stack(picked)]


def digest_of(rows: Tensor) -> str:
    """SHA-256 of the tokens."""
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()
