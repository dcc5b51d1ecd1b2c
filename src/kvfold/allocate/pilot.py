"""Budgets from a pilot run: units with larger errors get more, damped."""

from __future__ import annotations

from torch import Tensor


def damped_counts(error: Tensor, total: int, damping: float, low: int, high: int) -> Tensor:
    """Whole numbers in proportion to error**damping, within limits, that sum to the total exactly.

    Parameters
    ----------
    error : (units,) float, >= 0
        Those of a pilot run in which all units had the same.
    total : int
    damping : float
        0.5 is the square-root rule of KVSculpt; 0 gives all units the same.
    low, high : int
        Least and most of one unit; what they withhold is shared out among the others.

    Returns
    -------
    (units,) int64 on the CPU

    Raises
    ------
    ValueError
        The total is outside what the limits allow, or an error is negative or not finite.
    """
    error = error.detach().double().cpu()
    if not low * len(error) <= total <= high * len(error):
        raise ValueError(f"{len(error)} units of {low} to {high} cannot have {total} together")
    if not bool(error.isfinite().all()) or bool((error < 0).any()):
        raise ValueError("errors must be finite and at least 0")
    # Units without any error still share what the others may not have.
    weight = (error / error.max().clamp_min(1e-300)).clamp_min(1e-12) ** damping
    least, most = 0.0, high / float(weight.min())
    for _ in range(100):
        middle = (least + most) / 2
        if float((middle * weight).clamp(low, high).sum()) > total:
            most = middle
        else:
            least = middle
    share = (least * weight).clamp(low, high)
    counts = share.floor().long()
    order = (share - counts).masked_fill(counts >= high, -1).argsort(descending=True, stable=True)
    counts[order[: total - int(counts.sum())]] += 1
    return counts
