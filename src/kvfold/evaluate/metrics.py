"""How far next-token distributions are from the full cache's."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.errors import NonFiniteError
from kvfold.evaluate.prefill import kl_divergence
from kvfold.evaluate.results import Fidelity

_ROWS = 64
"""Tokens compared at a time: a vocabulary in float32 takes half a megabyte a token."""


def fidelity(full: Tensor, folded: Tensor, tokens: Tensor) -> Fidelity:
    """Compare logits, token by token.

    Parameters
    ----------
    full, folded : (tokens, vocabulary)
        Logits in any float dtype, of the full and of the folded cache.
    tokens : (tokens,) int64
        What the logits predict.

    Raises
    ------
    NonFiniteError
        A logit is NaN or Inf.
    """
    sums = torch.zeros(6, dtype=torch.float64)
    for start in range(0, len(tokens), _ROWS):
        span = slice(start, start + _ROWS)
        reference, other = full[span].float(), folded[span].float()
        if not bool(torch.isfinite(reference).all() and torch.isfinite(other).all()):
            raise NonFiniteError("the model's logits hold NaN or Inf (try bfloat16 or float32)")
        right = tokens[span, None]
        centred = reference - reference.mean(-1, keepdim=True)
        error = other - other.mean(-1, keepdim=True) - centred
        sums += torch.stack(
            [
                kl_divergence(reference, other).double().sum(),
                (reference.argmax(-1) == other.argmax(-1)).double().sum(),
                error.double().square().sum(),
                centred.double().square().sum(),
                -other.log_softmax(-1).gather(-1, right).double().sum(),
                -reference.log_softmax(-1).gather(-1, right).double().sum(),
            ]
        ).cpu()
    kl, top1, error_square, square, nll, full_nll = sums.tolist()
    count = len(tokens)
    return Fidelity(
        # Rounding can leave a divergence a hair below zero.
        kl=max(kl / count, 0.0),
        top1=top1 / count,
        logit_error=(error_square / square) ** 0.5 if square else 0.0,
        nll=nll / count,
        full_nll=full_nll / count,
        tokens=count,
    )
