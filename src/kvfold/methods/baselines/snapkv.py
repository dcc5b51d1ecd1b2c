"""SnapKV: keep the tokens that the newest queries attend to (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.base import LayerView, Needs
from kvfold.methods.baselines.select import Selection
from kvfold.methods.scores import smooth, window_mass


@dataclass(frozen=True, kw_only=True)
class SnapKV(Selection):
    """The same number of tokens in every KV head: the window itself, and those it attends to most.

    Scores are summed over the window and joined over the query heads of a KV head (the released code keeps one set of
    tokens a query head, which stores the cache several times over).

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    window : int
        Newest tokens, always kept, whose queries score the rest.
    pool : int
        Neighbouring tokens (before the window) whose scores are pooled.
    pooling : "avg" or "max"
    heads : "mean" or "max"
        How the query heads of a KV head are joined, before pooling.
    """

    name = "snapkv"
    paper = "SnapKV, arXiv 2404.14469"

    window: int = 32
    pool: int = 5
    pooling: Literal["avg", "max"] = "avg"
    heads: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(
                f"window must be at least 1 and pool odd, got window={self.window}, pool={self.pool}"
            )

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def shortest(self) -> int:
        return self.window

    def scores(self, view: LayerView) -> Tensor:
        mass = window_mass(view, self.window, normalise=False)
        if self.heads == "max":
            alone = window_mass(ungrouped(view), self.window, normalise=False)
            mass = alone.unflatten(1, (mass.shape[1], -1)).amax(2)
        mass[..., -self.window :] = 0
        scores = smooth(mass, view.valid, self.pool, self.pooling, reflect=False)
        scores[..., -self.window :] = torch.inf
        return scores


def ungrouped(view: LayerView) -> LayerView:
    """The same layer with keys of its own for every query head; a view to score, not to store."""
    assert view.queries is not None
    keys = view.expand(view.keys, view.values)[0] if view.expand is not None else view.keys
    heads = view.queries.shape[1]
    return replace(
        view,
        keys=keys.repeat_interleave(heads // keys.shape[1], 1),
        valid=view.valid.repeat_interleave(heads // view.valid.shape[1], 1),
        expand=None,
    )
