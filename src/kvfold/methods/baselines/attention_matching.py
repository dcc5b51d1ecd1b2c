"""Attention Matching: keys of chosen tokens, biases that match the attention mass, values that match the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.baselines.select_fit import SelectFit
from kvfold.methods.fit import Target, bounded_least_squares, ridge_values, zones
from kvfold.methods.pieces import slices
from kvfold.stores.base import Kept

TOGETHER_BYTES = 1 << 30
"""Of the normal equations of heads that are solved together."""


@dataclass(frozen=True)
class Mass:
    """Which tokens of a head are fitted and which stay, and the normal equations of the former's weights (n,)."""

    chosen: Tensor
    exact: Tensor
    gram: Tensor
    moment: Tensor


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

    def _fit_heads(self, heads: Callable[[], Iterator[tuple[Target, int]]]) -> list[Kept]:
        problems = [self._mass(target, count) for target, count in heads()]
        low, high = math.exp(-self.bound), math.exp(self.bound)
        weights: list[Tensor] = []
        # Steps are many and small: heads of one size take them together, as many as memory allows.
        sizes = [len(problem.moment) for problem in problems]
        for part in slices(sizes, [problem.gram.nbytes for problem in problems], sizes, TOGETHER_BYTES):
            some = problems[part]
            gram, moment = (torch.stack([getattr(p, name) for p in some]) for name in ("gram", "moment"))
            weights.extend(bounded_least_squares(gram, moment, low, high))
        return [
            self._with_biases(target, problem, weight)
            for (target, _), problem, weight in zip(heads(), problems, weights, strict=True)
        ]

    def _mass(self, target: Target, count: int) -> Mass:
        """Attention mass of all tokens, from those chosen."""
        chosen, exact = zones(target.weights.square().mean(0), count, self.sinks, self.window)
        mass = torch.exp(target.logits - target.logits.amax(-1, keepdim=True))
        wanted = (mass.sum(-1) - mass[:, exact].sum(-1)).double()
        a = mass[:, chosen].double()
        return Mass(chosen, exact, a.t() @ a, a.t() @ wanted)

    def _with_biases(self, target: Target, mass: Mass, weight: Tensor) -> Kept:
        chosen, exact = mass.chosen, mass.exact
        bias = torch.cat([weight.log(), weight.new_zeros(len(exact))])
        if not len(chosen):
            return target.kept(exact, bias=bias)
        weights, index = target.weights, torch.cat([chosen, exact])
        over_kept = (target.logits[:, index] + bias).softmax(-1)
        on_chosen, on_exact = over_kept.split([len(chosen), len(exact)], -1)
        lacking = weights @ target.values - on_exact @ target.values[exact]
        own = target.values[chosen]
        fitted = ridge_values(
            on_chosen, lacking, self.ridge, own if self.ridge_to == "own" else torch.zeros_like(own)
        )
        return target.kept(index, torch.cat([fitted, target.values[exact]]), bias)
