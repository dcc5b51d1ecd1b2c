"""AdaKV: heads of a layer compete for its tokens (arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.baselines.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV's scores, pooled over all heads of a layer: a head keeps what it wins, and at least a floor.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    window, pool, pooling, heads
        As for `SnapKV`, with the defaults of AdaKV's own code.
    floor : float
        Part of an equal number of tokens that every head keeps whatever it wins (the paper's alpha).
    """

    name = "adakv"
    paper = "AdaKV, arXiv 2407.11550"

    pool: int = 7
    pooling: Literal["avg", "max"] = "max"
    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_floor(self.floor)

    def counts(self, scores: Tensor) -> Callable[[int], list[int]]:
        return adaptive_counts(scores, self.floor)


def check_floor(floor: float) -> None:
    """Raise ValueError unless the floor is a part."""
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must lie between 0 and 1, got {floor}")


def adaptive_counts(scores: Tensor, floor: float) -> Callable[[int], list[int]]:
    """How many tokens each head keeps, by capacity, when heads compete (AdaKV, Algorithms 1 and 2).

    The `heads * capacity` best scores of the layer tell how many tokens each head wins; it gets 1 - floor of that, and
    floor * capacity besides. Tokens that are always kept do not compete, and come out of the capacity first.

    Parameters
    ----------
    scores : (kv_heads, tokens) float32
        Of one row; inf for what is always kept, -inf where there is no token.
    floor : float
    """
    heads, tokens = scores.shape
    always = (scores == torch.inf).sum(-1).tolist()
    present = (scores > -torch.inf).sum(-1).tolist()
    contest = scores.masked_fill(scores == torch.inf, -torch.inf).flatten()
    owners = contest.argsort(descending=True, stable=True) // tokens

    def counts(capacity: int) -> list[int]:
        free = capacity - max(always)
        if free <= 0:
            return [min(capacity, count) for count in present]
        won = owners[: heads * free].bincount(minlength=heads).tolist()
        wanted = [kept + round((1 - floor) * number + floor * free) for kept, number in zip(always, won)]
        return [min(want, count) for want, count in zip(wanted, present)]

    return counts
