"""Random eviction: the control that every score has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.base import LayerView
from kvfold.methods.baselines.select import Selection


@dataclass(frozen=True, kw_only=True)
class Random(Selection):
    """Each KV head keeps tokens drawn at random, by seed, layer, head and place in the prompt.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    seed : int
        The same seed keeps the same tokens, whatever the batch and its padding.
    """

    name = "random"
    paper = "control"

    seed: int = 0

    def scores(self, view: LayerView) -> Tensor:
        scores = torch.zeros(view.valid.shape)
        for row, real in enumerate(view.real_tokens):
            generator = torch.Generator().manual_seed(self.seed * 100_003 + view.layer_idx)
            drawn = torch.rand(view.valid.shape[1], real, generator=generator)
            place = view.positions[row].cpu() - int(view.positions[row].max()) + real - 1
            scores[row] = drawn[:, place.clamp(0, real - 1)]
        return scores.to(view.keys.device)
