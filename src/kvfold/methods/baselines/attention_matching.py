"""Attention Matching: keys of chosen tokens, biases that match the attention mass, values that match the output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.methods.baselines.select_fit import SelectFit
from kvfold.methods.fit import Target, bounded_least_squares, ridge_values, zones
from kvfold.stores.base import Kept


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(SelectFit):
    """Fast KV compaction with highest-attention keys (arXiv 2602.16284, section 3.2).

    Keys are those of the tokens with the largest root mean square of attention. Each gets a weight, the exponential of a
    bias on its logit, by bounded non-negative least squares on the attention mass of all tokens, and a value by least
    squares on their output. First and newest tokens stay as they are. (The paper's queries come from the model itself,
    asked to repeat the text; here they are the prompt's, turned to later positions.)

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget.
    sinks, window, sampled, horizon : int
        As for `SelectFit`.
    ridge : float
        0 is least squares, as released.
    ridge_to : "zero" or "own"
        What a ridge above 0 draws values to.
    bound : float
        Largest size of a bias.
    """

    name = "attention-matching"
    paper = "Attention Matching, arXiv 2602.16284"
    leaves_tokens = True

    sampled: int = 2048
    ridge: float = 0.0
    ridge_to: Literal["zero", "own"] = "zero"
    bound: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Beyond that, a weight leaves float32.
        if not 0 <= self.bound <= 80:
            raise ValueError(f"bound must be from 0 to 80, got {self.bound}")

    @property
    def biased(self) -> bool:
        return True

    def _fit(self, target: Target, count: int) -> Kept:
        weights = target.weights
        chosen, exact = zones(weights.square().mean(0), count, self.sinks, self.window)
        if not len(chosen):
            return target.kept(exact, bias=torch.zeros(len(exact), device=exact.device))
        mass = torch.exp(target.logits - target.logits.amax(-1, keepdim=True))
        wanted = mass.sum(-1) - mass[:, exact].sum(-1)
        weight = bounded_least_squares(mass[:, chosen], wanted, math.exp(-self.bound), math.exp(self.bound))
        bias = torch.cat([weight.log(), torch.zeros(len(exact), device=exact.device)])
        index = torch.cat([chosen, exact])
        over_kept = (target.logits[:, index] + bias).softmax(-1)
        on_chosen, on_exact = over_kept.split([len(chosen), len(exact)], -1)
        lacking = weights @ target.values - on_exact @ target.values[exact]
        own = target.values[chosen]
        fitted = ridge_values(
            on_chosen, lacking, self.ridge, own if self.ridge_to == "own" else torch.zeros_like(own)
        )
        return target.kept(index, torch.cat([fitted, target.values[exact]]), bias)
