"""TOVA: keep the tokens that the newest query attends to, the same in every head (arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.methods.base import LayerView, Needs
from kvfold.methods.baselines.select import Selection
from kvfold.methods.scores import window_mass


@dataclass(frozen=True, kw_only=True)
class TOVA(Selection):
    """One set of tokens a layer, by the last token's attention averaged over all heads; nothing is kept by rule.

    Applied once, when the prompt is complete, as the released code does (the paper then drops one token for each
    generated one).

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    """

    name = "tova"
    paper = "TOVA, arXiv 2401.06104"

    @property
    def needs(self) -> Needs:
        return Needs(window=1)

    def scores(self, view: LayerView) -> Tensor:
        mass = window_mass(view, 1, normalise=False)
        return mass.mean(1, keepdim=True).expand_as(mass)
