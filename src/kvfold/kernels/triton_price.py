"""Choices at many prices at once, for `allocate.price`: one launch reads all distortions, in Triton.

Sums are of whole numbers, so that they do not vary from run to run.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Units of a program at a time."""
PROGRAMS = 1024
"""Programs of a pool at most."""


@triton.jit
def _best(distortion, cost, pool, unit, units, price, CHOICES: tl.constexpr):
    """Index of the least distortion plus price times cost, the first of equals, and its cost: (units, prices)."""
    here = unit < units
    at = distortion + (pool.to(tl.int64) * units + unit) * CHOICES
    first = tl.load(cost + pool * CHOICES).to(tl.int32)
    least = tl.load(at, mask=here, other=0.0)[:, None] + price[None, :] * first.to(tl.float32)
    choice = tl.zeros(least.shape, tl.int32)
    taken = choice + first
    for index in tl.static_range(1, CHOICES):
        own = tl.load(cost + pool * CHOICES + index).to(tl.int32)
        value = tl.load(at + index, mask=here, other=0.0)[:, None] + price[None, :] * own.to(tl.float32)
        choice = tl.where(value < least, index, choice)
        taken = tl.where(value < least, own, taken)
        least = tl.minimum(least, value)
    return choice, tl.where(here[:, None], taken, 0)


@triton.jit
def _taken(
    distortion, cost, prices, sums, units, count,
    CHOICES: tl.constexpr, PRICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pool, which = tl.program_id(1), tl.arange(0, PRICES)
    price = tl.load(prices + which, mask=which < count, other=0.0)
    total = tl.zeros([PRICES], tl.int64)
    for start in range(tl.program_id(0) * BLOCK, units, tl.num_programs(0) * BLOCK):
        _, taken = _best(distortion, cost, pool, start + tl.arange(0, BLOCK), units, price, CHOICES)
        total += tl.sum(taken, 0).to(tl.int64)
    out = sums + (pool * tl.num_programs(0) + tl.program_id(0)) * count + which
    tl.store(out, total, mask=which < count)


@triton.jit
def _choices(
    distortion, cost, prices, choices, units,
    CHOICES: tl.constexpr, PRICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pool, which = tl.program_id(1), tl.arange(0, PRICES)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice, _ = _best(distortion, cost, pool, unit, units, tl.load(prices + which), CHOICES)
    out = choices + (which[None, :] * tl.num_programs(1) + pool).to(tl.int64) * units + unit[:, None]
    tl.store(out, choice.to(tl.uint8), mask=(unit < units)[:, None])


def taken(distortion: Tensor, cost: Tensor, prices: Tensor) -> Tensor:
    """Cost of all units' best choices at each price.

    Parameters
    ----------
    distortion : (pools, units, choices) float32
    cost : (pools, choices) int64
    prices : (prices,) float32

    Returns
    -------
    (prices,) int64
    """
    pools, units, choices = distortion.shape
    programs = max(1, min(PROGRAMS, triton.cdiv(units, BLOCK)))
    sums = torch.empty(pools, programs, len(prices), dtype=torch.int64, device=distortion.device)
    _taken[(programs, pools)](
        distortion.contiguous(), cost.contiguous(), prices, sums, units, len(prices),
        CHOICES=choices, PRICES=triton.next_power_of_2(len(prices)), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return sums.sum((0, 1))


def choices(distortion: Tensor, cost: Tensor, prices: Tensor) -> Tensor:
    """The best choices at each price, of which there is a power of two: (prices, pools, units) uint8."""
    pools, units, count = distortion.shape
    found = torch.empty(len(prices), pools, units, dtype=torch.uint8, device=distortion.device)
    _choices[(triton.cdiv(units, BLOCK), pools)](
        distortion.contiguous(), cost.contiguous(), prices, found, units,
        CHOICES=count, PRICES=len(prices), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return found
