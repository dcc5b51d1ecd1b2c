"""One price for units that are stored in whole groups: what is missing in a group costs as much as what is there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.allocate.price import allocate_at_one_price

TRIES = 2
"""Budgets tried: the second is less by what rounding to whole groups cost at the first."""


def allocate_in_groups(
    distortion: Tensor, cost: Tensor, budget: int | Tensor, size: int, grouped: int
) -> tuple[Tensor, Tensor]:
    """`allocate_at_one_price`, then rounded to whole groups, which hardly cost more where units are many.

    From the dearest choice down, a group that is not full either takes those units of lower choices that gain most by it, or
    gives its own to the next lower choice, those first that lose least. How full it must be to be filled is tried out.

    Parameters
    ----------
    distortion : (pools, units, choices) float32, >= 0
    cost : (pools, choices) int64, >= 0
        Of a unit; ascending up to choice `grouped`.
    budget : int or Tensor
        As for `allocate_at_one_price`.
    size : int
        Units of a group.
    grouped : int
        Choices 1 to `grouped` come in groups, of each pool its own.

    Returns
    -------
    ((pools, units) int64, what they cost () int64)
        Groups are full, but where no other unit of the pool would gain by it; then they cost as if they were.
    """
    choices, costs, lost = [], [], []
    target = budget
    for _ in range(TRIES):
        exact = allocate_at_one_price(distortion, cost, target)
        for least in (size // 2, size * 3 // 4, size):  # the last one only gives, and so always fits
            choices.append(_rounded(exact, distortion, size, grouped, least))
            costs.append(_cost(choices[-1], cost, size, grouped))
            total = distortion.gather(-1, choices[-1][..., None]).sum()
            lost.append(total.where(costs[-1] <= budget, torch.inf))
        target = (budget - (costs[0] - budget).clamp_min(0)).clamp_min(0)
    best = torch.stack(lost).argmin()
    return torch.stack(choices)[best], torch.stack(costs)[best]


def _rounded(choice: Tensor, distortion: Tensor, size: int, grouped: int, least: int) -> Tensor:
    """Whole groups; those with `least` units or more are filled, others emptied."""
    choice, few = choice.clone(), min(size - 1, choice.shape[1])
    rank = torch.arange(few, device=choice.device)
    for own in range(grouped, 0, -1):
        here = choice == own
        spare = here.sum(-1, keepdim=True) % size
        fill = spare >= least
        lost = torch.where(here, distortion[..., own - 1] - distortion[..., own], torch.inf)
        _, index = lost.topk(few, -1, largest=False)
        _move(choice, index, ~fill & (rank < spare), own - 1)
        gain = distortion.gather(-1, choice[..., None])[..., 0] - distortion[..., own]
        gain, index = torch.where(choice < own, gain, 0).topk(few, -1)
        _move(choice, index, fill & (rank < size - spare) & (gain > 0), own)
    return choice


def _move(choice: Tensor, index: Tensor, where: Tensor, to: int) -> None:
    choice.scatter_(1, index, torch.where(where, to, choice.gather(1, index)))


def _cost(choice: Tensor, cost: Tensor, size: int, grouped: int) -> Tensor:
    """Of all pools, groups that are not full as if they were."""
    counts = torch.stack([(choice == own).sum(-1) for own in range(cost.shape[1])], -1)
    counts[:, 1 : grouped + 1] = -(-counts[:, 1 : grouped + 1] // size) * size
    return (counts * cost).sum()
