"""Ranks within groups of any size: what a global top-k, or one for each head, keeps."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(scores: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """Rank of each entry within its group, 0 for the highest score; of equal scores the newest is first.

    Parameters
    ----------
    scores : (n,) float32
        No NaN.
    positions : (n,) integer
        From 0 on; the larger, the newer. Equal ones too keep their order.
    groups : (n,) int64
        From 0 on.

    Returns
    -------
    (n,) int64
    """
    # Bits of a float are in the order of floats, those of negative ones backwards; -0.0 + 0.0 is 0.0.
    bits = (scores + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = (bits.long() << 32 | positions).argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    ordered = groups[order]
    # Where each group begins; counting its entries would wait for a GPU.
    starts = torch.searchsorted(ordered, ordered)
    found = torch.empty_like(groups)
    found[order] = torch.arange(len(groups), device=groups.device) - starts
    return found
