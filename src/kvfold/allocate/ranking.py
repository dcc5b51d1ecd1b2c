"""Ranks within groups of any size: what a global top-k, or one for each head, keeps."""

from __future__ import annotations

import torch
from torch import Tensor


def best_first(scores: Tensor, positions: Tensor) -> Tensor:
    """Indices by falling score; of equal scores the newest is first.

    Parameters
    ----------
    scores : (n,) float32
        No NaN.
    positions : (n,) integer
        From 0 on; the larger, the newer. Equal ones too keep their order.

    Returns
    -------
    (n,) int64
    """
    # Bits of a float are in the order of floats, those of negative ones backwards; -0.0 + 0.0 is 0.0.
    bits = (scores + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.long() << 32 | positions).argsort(descending=True, stable=True)


def ranks(order: Tensor, groups: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
    """Rank of each entry within its group, 0 for the first.

    Parameters
    ----------
    order : (n,) int64
        All entries, best first.
    groups : (n,) int64, optional
        From 0 on. None: all are one group.
    ahead : (n,) bool, optional
        Entries that come before all others.

    Returns
    -------
    (n,) int64
    """
    # Stable sorts, the least important first; narrow keys take few passes on a GPU.
    if ahead is not None:
        order = order[ahead[order].logical_not().argsort(stable=True)]
    rank = torch.arange(len(order), device=order.device)
    if groups is not None:
        order = order[groups.int()[order].argsort(stable=True)]
        ordered = groups[order]
        # Where each group begins; counting its entries would wait for a GPU.
        rank = rank - torch.searchsorted(ordered, ordered)
    found = torch.empty_like(order)
    found[order] = rank
    return found
