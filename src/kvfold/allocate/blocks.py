"""Whole bits for equally large blocks of channels under the law that a bit quarters a squared error."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def allocate_blocks(
    scores: Tensor,
    total: Tensor,
    *,
    least: int = 1,
    most: int = 8,
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
    least, most : int
        Narrowest and widest width.
    shared : bool
        Heads share their bits: those of the largest scores get most. Where widths are limited too, each head's sum is what
        sharing gives it without that limit.
    most_widths : int, optional
        Distinct widths of a head at most.
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
    if not 1 <= least <= most or blocks % tile or tile < 1:
        raise ValueError(
            f"tiles of {tile} must divide {blocks} blocks, and 1 <= least <= most (got {least}, {most})"
        )
    cost = -(-width_cost // tile)
    smallest = blocks * least + cost * tile
    if bool((total < smallest).any()):
        raise ValueError(f"{blocks} blocks need at least {smallest} bits, got {int(total.min())}")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    tiles = scores.gather(1, order).view(heads, -1, tile).sum(-1)
    budget = total.div(tile, rounding_mode="floor")
    if shared:
        together = int(total.sum()) // tile - heads * cost
        widths = greedy(tiles.flatten(), together, least, most).view_as(tiles)
        budget = widths.sum(1) + cost
    elif most_widths is None and not width_cost:
        widths = torch.stack(
            [greedy(one, count, least, most) for one, count in zip(tiles, budget.tolist(), strict=True)]
        )
    if most_widths is not None or width_cost:
        distinct = min(most_widths or most, most - least + 1, tiles.shape[1])
        widths = _few_widths(tiles, budget, cost, distinct, least, most)
    return torch.empty_like(order).scatter_(1, order, widths.repeat_interleave(tile, 1))


def greedy(scores: Tensor, total: int, least: int, most: int) -> Tensor:
    """One bit at a time to the block that gains most, ties to the lowest index; (blocks,) int64.

    A block's gains fall by the factor 4 from bit to bit, so that the largest gains of all are a valid choice.
    """
    widths = torch.full_like(scores, least, dtype=torch.int64)
    bits = min(total - least * len(scores), (most - least) * len(scores))
    gains = scores[:, None] * 4.0 ** -torch.arange(least, most, dtype=scores.dtype)
    chosen = gains.flatten().argsort(dim=0, descending=True, stable=True)[:bits]
    return widths.index_add_(0, chosen // max(most - least, 1), torch.ones_like(chosen))


def _few_widths(scores: Tensor, total: Tensor, cost: int, distinct: int, least: int, most: int) -> Tensor:
    """The best widths of at most `distinct` kinds, each of which costs; scores (heads, blocks) in descending order.

    A larger score never gets a narrower width, so that widths fall along the blocks: a shortest path over (block, widths
    used, width, bits spent), for all heads at once.
    """
    heads, blocks = scores.shape
    most_bits = int(total.max())
    widths = np.arange(min(most, most_bits), least - 1, -1)
    loss = scores.numpy()[:, :, None] * 4.0**-widths
    best = np.full((heads, distinct, len(widths), most_bits + 1), np.inf)
    came_from = np.zeros((blocks, *best.shape), dtype=np.int8)
    for block in range(blocks):
        reached = np.full_like(best, np.inf)
        origin = came_from[block]
        for index, width in enumerate(widths):
            spent = slice(width, None)
            if block == 0:
                reached[:, 0, index, width] = loss[:, 0, index]
                origin[:, 0, index] = index
                continue
            room = most_bits + 1 - width
            stay = best[:, :, index, :room].copy()
            source = np.full(stay.shape, index, dtype=np.int8)
            if index and distinct > 1:
                wider = best[:, :-1, :index, :room]
                chosen = wider.argmin(2)
                value = np.take_along_axis(wider, chosen[:, :, None], 2)[:, :, 0]
                better = value < stay[:, 1:]
                stay[:, 1:] = np.where(better, value, stay[:, 1:])
                source[:, 1:] = np.where(better, chosen, source[:, 1:])
            reached[:, :, index, spent] = stay + loss[:, block, index, None, None]
            origin[:, :, index, spent] = source
        best = reached
    result = torch.empty(heads, blocks, dtype=torch.int64)
    for head in range(heads):
        bits = np.arange(most_bits + 1)
        for used in range(distinct):
            best[head, used][:, bits > int(total[head]) - (used + 1) * cost] = np.inf
        used, index, spent = np.unravel_index(best[head].argmin(), best[head].shape)
        for block in reversed(range(blocks)):
            result[head, block] = int(widths[index])
            previous = int(came_from[block, head, used, index, spent])
            spent -= widths[index]
            used -= previous != index
            index = previous
    return result
