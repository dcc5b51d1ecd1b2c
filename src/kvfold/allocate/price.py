"""One price for many units: each takes the choice with the least distortion plus price times cost."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate_at_one_price(distortion: Tensor, cost: Tensor, budget: int, steps: int = 40) -> Tensor:
    """Choices whose total cost is the most that fits the budget at one common price.

    The Lagrangian solution of `allocate` for units that all have their own distortions, without a sort: a bisection on
    the logarithm of the price, then the units on the last boundary in index order until nothing more fits.

    Parameters
    ----------
    distortion : (pools, units, choices) float32, >= 0
        Choice 0 is the cheapest.
    cost : (pools, choices) int64, >= 0
        In bytes; units of a pool cost the same, pools share the budget.
    budget : int
        For all pools together.
    steps : int
        Bisections.

    Returns
    -------
    (pools, units) int64

    Raises
    ------
    ValueError
        The budget is negative.

    References
    ----------
    RDKV, Theorem 3.3 and Algorithm 2 (one multiplier, here for any number of heads and layers).
    """
    if budget < 0:
        raise ValueError(f"budget must be at least 0 bytes, got {budget}")
    price_per_byte = cost[:, None].float()
    positive = distortion[distortion > 0]
    if not positive.numel():
        return torch.zeros(distortion.shape[:2], dtype=torch.int64, device=distortion.device)
    low = float(positive.min().log()) - float(cost.max().clamp_min(1).log()) - 1
    high = float(distortion.max().log()) + 1

    def choose(log_price: float) -> tuple[Tensor, Tensor]:
        choice = torch.add(distortion, price_per_byte, alpha=float(torch.tensor(log_price).exp())).argmin(-1)
        return choice, cost.gather(1, choice)

    cheap, spent = choose(high)
    if int(spent.sum()) > budget:
        raise ValueError(f"budget {budget} is below the {int(spent.sum())} bytes of the cheapest choices")
    dear, dear_spent = choose(low)
    if int(dear_spent.sum()) <= budget:
        return dear
    for _ in range(steps):
        middle = (low + high) / 2
        choice, each = choose(middle)
        if int(each.sum()) > budget:
            low, dear, dear_spent = middle, choice, each
        else:
            high, cheap, spent = middle, choice, each
    left = budget - int(spent.sum())
    extra = (dear_spent - spent).clamp_min(0).flatten()
    fits = (extra.cumsum(0) <= left).view_as(cheap)
    return torch.where(fits, dear, cheap)
