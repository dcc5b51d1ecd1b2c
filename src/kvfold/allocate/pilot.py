"""Budgets from a pilot run: units with larger errors get more, damped."""

from __future__ import annotations

import torch
from torch import Tensor


def damped_counts(
    error: Tensor,
    total: int,
    damping: float,
    low: int | Tensor,
    high: int | Tensor,
    base: float | Tensor = 0.0,
) -> Tensor:
    """Whole numbers that with a base are in proportion to error**damping, within limits, and sum to the total exactly.

    Parameters
    ----------
    error : (units,) float, >= 0
        Those of a pilot run in which all units had the same.
    total : int
    damping : float
        0.5 is the square-root rule of KVSculpt; 0 gives all units the same.
    low, high : int or (units,) int64
        Least and most of a unit; what they withhold is shared out among the others.
    base : float or (units,) float
        What a unit has in any case; not part of the total.

    Returns
    -------
    (units,) int64 on the CPU

    Raises
    ------
    ValueError
        The total is outside what the limits allow, or an error is negative or not finite.
    """
    error = error.detach().double().cpu()
    floor, ceiling = (torch.as_tensor(limit).cpu().expand(len(error)) for limit in (low, high))
    if not int(floor.sum()) <= total <= int(ceiling.sum()):
        raise ValueError(
            f"{len(error)} units of {int(floor.min())} to {int(ceiling.max())} cannot have {total} together"
        )
    if not bool(error.isfinite().all()) or bool((error < 0).any()):
        raise ValueError("errors must be finite and at least 0")
    # Units without any error still share what the others may not have.
    weight = (error / error.max().clamp_min(1e-300)).clamp_min(1e-12) ** damping
    least, most = 0.0, float(((ceiling + base) / weight).max())

    def shares(level: float) -> Tensor:
        return (level * weight - base).clamp(floor, ceiling)

    for _ in range(100):
        middle = (least + most) / 2
        if float(shares(middle).sum()) > total:
            most = middle
        else:
            least = middle
    share = shares(least)
    counts = share.floor().long()
    order = (share - counts).masked_fill(counts >= ceiling, -1).argsort(descending=True, stable=True)
    counts[order[: total - int(counts.sum())]] += 1
    return counts
