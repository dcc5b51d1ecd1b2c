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
    choices, costs = [], []
    least = torch.tensor([size // 2, size * 3 // 4, size])  # the last one only gives, and so always fits
    least = least.to(distortion.device, non_blocking=True)
    target = budget
    for _ in range(TRIES):
        exact = allocate_at_one_price(distortion, cost, target)
        choices.append(_rounded(exact, distortion, size, grouped, least))
        costs.append(_cost(choices[-1], cost, size, grouped))
        target = (budget - (costs[0][0] - budget).clamp_min(0)).clamp_min(0)
    choice, spent = torch.cat(choices), torch.cat(costs)
    lost = _at(distortion, choice).sum((1, 2))
    best = lost.where(spent <= budget, torch.inf).argmin()[None]
    return choice.index_select(0, best)[0], spent.index_select(0, best)[0]


def _at(distortion: Tensor, choice: Tensor) -> Tensor:
    """Distortion of choices (tries, pools, units)."""
    return distortion.expand(len(choice), -1, -1, -1).gather(-1, choice[..., None])[..., 0]


def _rounded(choice: Tensor, distortion: Tensor, size: int, grouped: int, least: Tensor) -> Tensor:
    """Whole groups (tries, pools, units); those with `least` (tries,) units or more are filled, others emptied."""
    choice = choice.expand(len(least), -1, -1).clone()
    few = min(size - 1, choice.shape[2])
    rank = torch.arange(few, device=choice.device)
    for own in range(grouped, 0, -1):
        here = choice == own
        spare = here.sum(-1, keepdim=True) % size
        fill = spare >= least[:, None, None]
        to = torch.where(fill, own, own - 1)
        gain = _at(distortion, choice) - torch.where(fill, distortion[..., own], distortion[..., own - 1])
        gain, index = torch.where(torch.where(fill, choice < own, here), gain, -torch.inf).topk(few, -1)
        # Whoever leaves must; whoever comes must gain by it.
        moved = torch.where(fill, (rank < size - spare) & (gain > 0), rank < spare)
        choice.scatter_(2, index, torch.where(moved, to, choice.gather(2, index)))
    return choice


def _cost(choice: Tensor, cost: Tensor, size: int, grouped: int) -> Tensor:
    """Of all pools together (tries,), groups that are not full as if they were."""
    counts = torch.stack([(choice == own).sum(-1) for own in range(cost.shape[1])], -1)
    counts[..., 1 : grouped + 1] = -(-counts[..., 1 : grouped + 1] // size) * size
    return (counts * cost).sum((1, 2))
