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
PROGRAMS = 512
"""Programs at most, if there are no more pools."""
TRIED, ROUNDS = 64, 6
"""Prices tried at once, and how often: 63^6 is more than there are float32 numbers above 0."""
LARGEST = tl.constexpr(0x7F000000)
"""Bits of the largest price tried, 2^127."""


@triton.jit
def _best(distortion, cost, pool, unit, units, price, CHOICES: tl.constexpr):
    """Index of the least distortion plus price times cost, the first of equals, and its cost: (units, prices).

    Rounded once, and said so: left to the compiler, one kernel would round twice and another not, so that choices would
    cost more than the sums that they were chosen by.
    """
    here = unit < units
    at = distortion + (pool.to(tl.int64) * units + unit) * CHOICES
    first = tl.load(cost + pool * CHOICES).to(tl.int32)
    least = tl.fma(price[None, :], first.to(tl.float32), tl.load(at, mask=here, other=0.0)[:, None])
    choice = tl.zeros(least.shape, tl.int32)
    taken = choice + first
    for index in tl.static_range(1, CHOICES):
        own = tl.load(cost + pool * CHOICES + index).to(tl.int32)
        value = tl.fma(price[None, :], own.to(tl.float32), tl.load(at + index, mask=here, other=0.0)[:, None])
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
def _narrow(
    sums, budget, bounds, prices, rows, FIRST: tl.constexpr, PRICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Between which two prices the budget is met, and the next prices to try, as the bits of float32, which order them."""
    which = tl.arange(0, PRICES)
    low = tl.zeros([PRICES], tl.int64)
    high = low + LARGEST
    if not FIRST:
        total = tl.zeros([PRICES], tl.int64)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            at = sums + row[:, None] * PRICES + which[None, :]
            total += tl.sum(tl.load(at, mask=(row < rows)[:, None], other=0), 0)
        # Costs fall as prices rise, but for rounding: the last price that does not fit, and the one after it.
        over = tl.max(tl.where(total.to(tl.float64) > tl.load(budget), which + 1, 0), 0).to(tl.int64)
        low, high = low + tl.load(bounds), low + tl.load(bounds + 1)
        own = low + (high - low) * which // (PRICES - 1)
        over = tl.minimum(over, PRICES - 1)
        before = tl.maximum(over - 1, 0)
        low = low * 0 + tl.sum(tl.where(which == before, own, 0), 0)
        high = low * 0 + tl.sum(tl.where(which == over, own, 0), 0)
    tl.store(bounds + which, tl.where(which == 0, low, high), mask=which < 2)
    bits = (low + (high - low) * which // (PRICES - 1)).to(tl.int32)
    tl.store(prices + which, bits.to(tl.float32, bitcast=True))


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
    sums = _sums(distortion, prices)
    _take(distortion.contiguous(), cost.contiguous(), prices, sums)
    return sums.sum((0, 1))


def _sums(distortion: Tensor, prices: Tensor) -> Tensor:
    pools, units, _ = distortion.shape
    programs = max(1, min(PROGRAMS // pools, triton.cdiv(units, BLOCK)))
    return torch.empty(pools, programs, len(prices), dtype=torch.int64, device=distortion.device)


def _take(distortion: Tensor, cost: Tensor, prices: Tensor, sums: Tensor) -> None:
    (pools, units, choices), count = distortion.shape, len(prices)
    _taken[(sums.shape[1], pools)](
        distortion, cost, prices, sums, units, count,
        CHOICES=choices, PRICES=triton.next_power_of_2(count), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def around(distortion: Tensor, cost: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """Best choices at the least price at which they fit the budget, and at the next smaller one.

    Parameters
    ----------
    distortion : (pools, units, choices) float32
    cost : (pools, choices) int64
    budget : () float64
        For all pools together.

    Returns
    -------
    (pools, units) int64, twice
        Both the same where all fit at no price at all.
    """
    distortion, cost = distortion.contiguous(), cost.contiguous()
    (pools, units, choices), device = distortion.shape, distortion.device
    prices, bounds = torch.empty(TRIED, device=device), torch.empty(2, dtype=torch.int64, device=device)
    sums = _sums(distortion, prices)
    for done in range(ROUNDS + 1):
        _narrow[(1,)](
            sums, budget, bounds, prices, sums.shape[0] * sums.shape[1],
            FIRST=done == 0, PRICES=TRIED, BLOCK=32, num_warps=4,
        )  # fmt: skip
        if done < ROUNDS:
            _take(distortion, cost, prices, sums)
    found = torch.empty(2, pools, units, dtype=torch.uint8, device=device)
    _choices[(triton.cdiv(units, BLOCK), pools)](
        distortion, cost, bounds.int().view(torch.float32), found, units,
        CHOICES=choices, PRICES=2, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    dear, cheap = found.long()
    return cheap, dear
