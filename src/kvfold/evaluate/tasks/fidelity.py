"""Fidelity: how far next-token distributions move from the full cache's over a continuation."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.evaluate.tasks.perplexity import Perplexity


@dataclass(frozen=True, kw_only=True)
class Fidelity(Perplexity):
    """KL(full || folded), top-1 agreement and logit error, per token, over a text's own next words.

    What is measured is in `kvfold.evaluate.results.Fidelity`; the passages are those of `Perplexity`.

    Parameters
    ----------
    continuation, text
        As for `Perplexity`.
    """

    name = "fidelity"
    source = "Next-token distributions against the full cache's, with teacher forcing"
    metric = "KL"

    continuation: int = 128
