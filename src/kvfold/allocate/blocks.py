"""Whole bits for equally large blocks of channels under the law that a bit quarters a squared error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement

import numpy as np
import torch
from torch import Tensor


def allocate_blocks(
    scores: Tensor,
    total: Tensor,
    *,
    widths: Sequence[int] = range(1, 9),
    shared: bool = False,
    most_widths: int | None = None,
    width_cost: int = 0,
    tile: int = 1,
) -> Tensor:
    """Widths that minimise sum_i scores_i 4^-width_i.

    Parameters
    ----------
    scores : (heads, blocks) float
        Not negative.
    total : (heads,) int64
        Bits for the blocks of each head: the sum of their widths, and of `width_cost` where that is given.
    widths : sequence of int
        What a width may be.
    shared : bool
        Heads share their bits: those of the largest scores get most. Where widths are limited too, each head's sum is what
        sharing gives it without that limit.
    most_widths : int, optional
        Distinct widths of a head at most (4, where not all widths are allowed or they cost, if not given).
    width_cost : int
        Bits that each distinct width of a head costs.
    tile : int
        Blocks that must have one width. They are taken in order of their scores, and that many must divide each head.

    Returns
    -------
    (heads, blocks) int64
        On the CPU. The sums are `total` if widths are not limited, at most that if they are. Of equal scores the lowest
        index gets the wider width.

    Raises
    ------
    ValueError
        The total is too small for `least`, a score is negative or not finite, or the tiles do not fit.

    References
    ----------
    Block-GTQ, allocator: its greedy is the case without limits, optimal because each further bit of a block gains less.
    """
    scores, total = scores.detach().double().cpu(), total.cpu()
    heads, blocks = scores.shape
    if not bool((torch.isfinite(scores) & (scores >= 0)).all()):
        raise ValueError("scores must be finite and not negative")
    kinds = sorted(set(widths))
    if not kinds or kinds[0] < 1 or blocks % tile or tile < 1:
        raise ValueError(f"tiles of {tile} must divide {blocks} blocks, and widths be positive (got {kinds})")
    least, most = kinds[0], kinds[-1]
    gaps = len(kinds) <= most - least
    cost = -(-width_cost // tile)
    smallest = blocks * least + cost * tile
    if bool((total < smallest).any()):
        raise ValueError(f"{blocks} blocks need at least {smallest} bits, got {int(total.min())}")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    tiles = scores.gather(1, order).view(heads, -1, tile).sum(-1)
    budget = total.div(tile, rounding_mode="floor")
    if shared:
        together = int(total.sum()) // tile - heads * cost
        found = greedy(tiles.flatten(), together, least, most).view_as(tiles)
        budget = found.sum(1) + cost
    elif most_widths is None and not width_cost and not gaps:
        found = torch.stack(
            [greedy(one, count, least, most) for one, count in zip(tiles, budget.tolist(), strict=True)]
        )
    if most_widths is not None or width_cost or gaps:
        distinct = min(most_widths or 4, len(kinds), tiles.shape[1])
        found = _few_widths(tiles, budget, cost, distinct, kinds)
    return torch.empty_like(order).scatter_(1, order, found.repeat_interleave(tile, 1))


def greedy(scores: Tensor, total: int, least: int, most: int) -> Tensor:
    """One bit at a time to the block that gains most, ties to the lowest index; (blocks,) int64.

    A block's gains fall by the factor 4 from bit to bit, so that the largest gains of all are a valid choice.
    """
    widths = torch.full_like(scores, least, dtype=torch.int64)
    bits = min(total - least * len(scores), (most - least) * len(scores))
    gains = scores[:, None] * 4.0 ** -torch.arange(least, most, dtype=scores.dtype)
    chosen = gains.flatten().argsort(dim=0, descending=True, stable=True)[:bits]
    return widths.index_add_(0, chosen // max(most - least, 1), torch.ones_like(chosen))


def _few_widths(scores: Tensor, total: Tensor, cost: int, distinct: int, kinds: Sequence[int]) -> Tensor:
    """The best of `kinds` of widths, at most `distinct` of them, each of which costs; scores (heads, blocks) descending.

    A larger score never gets a narrower width, so that widths fall along the blocks in as many runs. Where all runs but the
    last two end is tried; the last but one is then as long as the bits allow. All heads and choices of widths at once.
    """
    heads, blocks = scores.shape
    before = np.pad(scores.numpy().cumsum(1), ((0, 0), (1, 0)))
    head = np.arange(heads)[:, None]
    least = np.full(heads, np.inf)
    result = np.zeros((heads, blocks), dtype=np.int64)
    for used in range(1, distinct + 1):
        widths = np.array(list(combinations(sorted(kinds, reverse=True), used)))
        law = 4.0**-widths
        step, gain = -np.diff(widths, axis=1), -np.diff(law, axis=1)
        ends = np.array([*combinations_with_replacement(range(blocks + 1), max(used - 2, 0))], dtype=np.int64)
        room = (total.numpy() - cost * used - blocks * widths[:, -1:])[:, :, None]
        loss = (law[:, -1:] * before[:, -1])[:, :, None]
        if used > 1:
            room = room - (step[:, :-1] @ ends.T)[:, None]
            last = np.clip(room // step[:, -1][:, None, None], 0, blocks)
            loss = loss + gain[:, -1][:, None, None] * before[head, last]
            for run in range(used - 2):
                loss = loss + gain[:, run][:, None, None] * before[:, ends[:, run]]
                room = np.where(last < ends[:, run], -1, room)
        loss = np.where(room < 0, np.inf, loss)
        for one in range(heads):
            choice, end = np.unravel_index(loss[:, one].argmin(), loss[:, one].shape)
            if loss[choice, one, end] < least[one]:
                least[one] = loss[choice, one, end]
                stops = [*ends[end], *([last[choice, one, end]] if used > 1 else []), blocks]
                result[one] = np.repeat(widths[choice], np.diff([0, *stops]))
    return torch.from_numpy(result)
