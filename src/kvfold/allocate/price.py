"""One price for many units: each takes the choice with the least distortion plus price times cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvfold.kernels import dense_decode


def allocate_at_one_price(distortion: Tensor, cost: Tensor, budget: int | Tensor, steps: int = 40) -> Tensor:
    """Choices whose total cost is the most that fits the budget at one common price.

    The Lagrangian solution of `allocate` for units that all have their own distortions, without a sort: a bisection on
    the logarithm of the price, then the units on the last boundary in index order until nothing more fits.

    Parameters
    ----------
    distortion : (pools, units, choices) float32, >= 0
        Choice 0 is the cheapest.
    cost : (pools, choices) int64, >= 0
        In bytes; units of a pool cost the same, pools share the budget.
    budget : int or Tensor
        For all pools together. Of one element on the device, so that nothing waits for it there.
    steps : int
        Bisections.

    Returns
    -------
    (pools, units) int64

    Raises
    ------
    ValueError
        The budget is negative, or less than the cheapest choices cost. Not on a GPU, where nothing waits to find out:
        each unit then gets the cheapest.

    References
    ----------
    RDKV, Theorem 3.3 and Algorithm 2 (one multiplier, here for any number of heads and layers).
    """
    if dense_decode.problem(distortion.device) is None:
        return _on_gpu(distortion, cost, budget)
    budget = int(budget)
    if budget < 0:
        raise ValueError(f"budget must be at least 0 bytes, got {budget}")
    positive = distortion[distortion > 0]
    if not positive.numel():
        return torch.zeros(distortion.shape[:2], dtype=torch.int64, device=distortion.device)
    low = float(positive.min().log()) - float(cost.max().clamp_min(1).log()) - 1
    high = float(positive.max().log()) + 1
    del positive
    table, price_per_byte = distortion.permute(2, 0, 1).contiguous(), cost.t().float()[..., None]

    cheap = _choose(table, price_per_byte, high)
    spent = cost.gather(1, cheap)
    if int(spent.sum()) > budget:
        raise ValueError(f"budget {budget} is below the {int(spent.sum())} bytes of the cheapest choices")
    dear = _choose(table, price_per_byte, low)
    if int(cost.gather(1, dear).sum()) <= budget:
        return dear
    # A higher price never makes a unit dearer, so one with the same choice at both ends is settled. `undecided` indexes
    # the others, once they are few enough to be worth gathering.
    pool = torch.arange(len(cost), device=cost.device)[:, None].expand_as(cheap).flatten()
    undecided = torch.arange(cheap.numel(), device=cost.device)
    cheap, dear, settled = cheap.flatten(), dear.flatten(), 0
    table, price_per_byte = table.flatten(1), price_per_byte.expand_as(table).flatten(1)
    for _ in range(steps):
        open_ = cheap[undecided] != dear[undecided]
        if 2 * int(open_.sum()) < len(undecided):
            done = undecided[~open_]
            settled += int(cost[pool[done], cheap[done]].sum())
            undecided, table = undecided[open_], table[:, open_]
            price_per_byte = cost[pool[undecided]].t().float()
        middle = (low + high) / 2
        choice = _choose(table, price_per_byte, middle)
        if settled + int(cost[pool[undecided], choice].sum()) > budget:
            low = middle
            dear[undecided] = choice
        else:
            high = middle
            cheap[undecided] = choice
    spent = cost[pool, cheap]
    extra = (cost[pool, dear] - spent).clamp_min(0)
    fits = extra.cumsum(0) <= budget - int(spent.sum())
    return torch.where(fits, dear, cheap).view(distortion.shape[:2])


def _on_gpu(distortion: Tensor, cost: Tensor, budget: int | Tensor) -> Tensor:
    """As `allocate_at_one_price`, many prices at a time, and without a word to the host."""
    from kvfold.kernels import triton_price

    have = torch.zeros((), dtype=torch.float64, device=distortion.device) + budget
    cheap, dear = triton_price.around(distortion, cost, have)
    spent, dearer = cost.gather(1, cheap), cost.gather(1, dear)
    extra = (dearer - spent).clamp_min(0).flatten().cumsum(0).view_as(spent)
    return torch.where(extra <= have - spent.sum(), dear, cheap)


@cache
def _sent(prices: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(prices, device=device)


def _choose(table: Tensor, price_per_byte: Tensor, log_price: float) -> Tensor:
    """Index of the least distortion plus price times cost, over the first dimension; the first of equals."""
    price = math.exp(log_price)
    best = torch.add(table[0], price_per_byte[0], alpha=price)
    choice = torch.zeros_like(best, dtype=torch.uint8)
    for index in range(1, len(table)):
        value = torch.add(table[index], price_per_byte[index], alpha=price)
        choice.masked_fill_(value < best, index)
        best = torch.minimum(best, value, out=best)
    return choice.long()


def bytes_at_prices(distortion: Tensor, cost: Tensor, prices: Sequence[float]) -> Tensor:
    """What the units of `allocate_at_one_price` would take at each of several prices: (prices,) float64."""
    if dense_decode.problem(distortion.device) is None:
        from kvfold.kernels import triton_price

        return triton_price.taken(distortion, cost, _sent(tuple(prices), distortion.device)).double()
    price_per_byte = cost[:, None].float()
    taken = [
        cost.gather(1, torch.add(distortion, price_per_byte, alpha=price).argmin(-1)).sum()
        for price in prices
    ]
    return torch.stack(taken).double()
