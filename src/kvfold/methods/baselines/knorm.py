"""Knorm: keep the tokens whose keys are short (arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.methods.base import LayerView
from kvfold.methods.baselines.select import Selection, mean_over_group
from kvfold.methods.scores import keys_for_scores


@dataclass(frozen=True, kw_only=True)
class Knorm(Selection):
    """Tokens with the smallest L2 norm of the key, which tend to receive the most attention.

    Every layer is folded (the paper's experiments leave the first two alone; its code's default does not).

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    """

    name = "knorm"
    paper = "L2 norm-based compression, arXiv 2406.11430"

    def scores(self, view: LayerView) -> Tensor:
        # In 16 bits most norms would be ties.
        return -mean_over_group(keys_for_scores(view).float().norm(dim=-1), view)
