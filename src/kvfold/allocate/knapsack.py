"""Budgeted choice of a precision for every unit: the multiple-choice knapsack by its Lagrangian.

RDKV (Algorithm 2) minimises ``sum_u w_u eps(b_u)`` under a budget by bisecting the price ``lambda`` of a bit.
Its released code stops within 1 % of the budget, on either side. Here the price is found exactly and what is
left is spent.

**What "optimal" means.** Only the choices on the lower convex hull of (cost, distortion) can minimise
``w eps + lambda cost`` for some price. Moving a unit from one hull choice to the next is a *step*; its worth
is the distortion that it saves per unit of cost. The steps, taken in order of worth, are optimal at each of
the budgets where one has just been taken (no other feasible choice, on the hull or off it, has less
distortion). Between two such budgets the result is at most the next step's saving above the optimum, and is
never worse than it was at the budget before. Of equally worthy steps, units' earlier ones come first, then
those of lower index.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_INF64 = 0x7FF0_0000_0000_0000
# Choices on a straight stretch of a hull belong to it, whatever the rounding of their slopes.
_NEARLY = 1 - 1e-12


def allocate(
    weights: Tensor,
    distortion: Sequence[float] | Tensor,
    cost: Sequence[int] | Tensor,
    budget: int | Sequence[int] | Tensor,
    valid: Tensor | None = None,
) -> Tensor:
    """Choose one of a few precisions for every unit, each pool within its own budget.

    Minimises ``sum_u weights[p, u] * distortion[choice[p, u]]`` subject to
    ``sum_u cost[choice[p, u]] <= budget[p]``; the module's docstring says how closely. Units of equal weight
    are served in index order. Once no hull step fits, choices off the hull are tried, so that on return no
    single unit could take a better choice within what is left. Units of weight 0 save nothing and are served
    last, from budget that nobody else can use.

    Parameters
    ----------
    weights : Tensor (pools, units) float, >= 0
        Importance of each unit, used in float32. NaN and infinity are allowed only where ``valid`` is False.
    distortion : (choices,) float
        Relative distortion of each choice, strictly decreasing; for the widths 0, 2, 4, 8, 16 it starts at 1
        (dropped) and ends at 0 (kept as it is). A small host array; a device tensor is copied to the host.
    cost : (choices,) int
        Cost of one unit at each choice, strictly increasing, in any whole unit (bits, bytes), everything
        included (scales, positions). It need not be linear in the bits.
    budget : int or (pools,) int64
        In the unit of ``cost``. One number serves every pool.
    valid : Tensor (pools, units) bool, optional
        False marks padding: such a unit gets choice 0, costs nothing and counts for nothing.

    Returns
    -------
    Tensor (pools, units) uint8
        Index into ``cost``, on the device of ``weights``.

    Raises
    ------
    ValueError
        If shapes, order or signs are wrong, or a budget is below the cost of the cheapest choice for every
        unit.

    References
    ----------
    RDKV, Theorem 3.3 and Algorithm 2.
    """
    eps, price = _check_choices(distortion, cost)
    if weights.dim() != 2 or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating (pools, units), got {weights.dtype} {tuple(weights.shape)}."
        )
    if valid is not None and (valid.shape != weights.shape or valid.dtype != torch.bool):
        raise ValueError(
            f"valid must be bool {tuple(weights.shape)}, got {valid.dtype} {tuple(valid.shape)}."
        )
    pools, units = weights.shape
    device = weights.device
    money = _check_budget(budget, pools, device)

    weights = weights.detach().float()
    if valid is not None:
        weights = weights.masked_fill(~valid, 0.0)
        members = valid.sum(1)
    else:
        members = torch.full((pools,), units, dtype=torch.int64, device=device)
    money = money - members * price[0]
    _check_values(weights, money, "weights must be finite and >= 0 (mark padding with valid=False)")
    choice = torch.zeros(pools, units, dtype=torch.uint8, device=device)
    if units == 0 or pools == 0 or len(price) == 1:
        return choice
    if valid is not None:
        weights = weights.masked_fill(~valid, -1.0)

    hull = _hull(eps, price)
    step_cost = torch.tensor([price[b] - price[a] for a, b in zip(hull, hull[1:])], device=device)
    slope = [(eps[a] - eps[b]) / (price[b] - price[a]) for a, b in zip(hull, hull[1:])]
    # On a straight stretch of the hull rounding alone could make a later step look the worthier one.
    worth = torch.tensor(slope, dtype=torch.float64, device=device).cummin(0).values

    # The whole state of the solver is `taken` (pools, steps): the heaviest taken[p, j] units of pool p have taken
    # step j. It never rises with j, because the worth of a unit's steps falls. Which units these are is only asked at
    # the end, so weights are sorted without their indices.
    ascending = _sort(weights)

    def count(price_bits: Tensor) -> Tensor:
        """Units to which a step is worth a price: its float64 bits (pools, n) -> count (pools, n, steps)."""
        least = price_bits.view(torch.float64)[..., None] / worth
        rounded = least.float()
        above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
        rounded = torch.where(rounded.double() < least, above, rounded)
        return units - torch.searchsorted(ascending, rounded.flatten(1)).view(rounded.shape)

    # The lowest affordable price, searched 63 probes at a time over all float64 prices from 0 to infinity: positive
    # floats compare as their bit patterns do.
    low = torch.full((pools, 1), -1, dtype=torch.int64, device=device)
    high = torch.full((pools, 1), _INF64, dtype=torch.int64, device=device)
    probe = torch.arange(1, 64, device=device)
    for _ in range(11):
        width = (high - low + 63) // 64
        probes = torch.minimum(low + probe * width, high)
        too_dear = (count(probes) * step_cost).sum(-1) > money[:, None]
        passed = too_dear.sum(-1, keepdim=True)
        low, high = low + passed * width, torch.minimum(low + (passed + 1) * width, high)
    taken = count(high)[:, 0]
    # Steps worth exactly the price just below are equally good: take those that fit, in index order.
    tied = count((high - 1).clamp(min=0))[:, 0]
    money = money - (taken * step_cost).sum(-1)
    above_step = members
    for j in range(len(hull) - 1):
        more = torch.minimum(
            torch.minimum(tied[:, j], above_step) - taken[:, j], money // step_cost[j]
        ).clamp(min=0)
        taken[:, j] += more
        money = money - more * step_cost[j]
        above_step = taken[:, j]

    taken, money = _spend_on_hull(taken, money, members, ascending, step_cost, worth)
    for j, (a, b) in enumerate(zip(hull, hull[1:])):
        choice.add_(_heaviest(weights, ascending, taken[:, j]), alpha=b - a)
    if len(hull) < len(price):
        _spend_off_hull(choice, weights, taken, money, members, hull, eps, price)
    return choice


def allocate_general(distortion: Tensor, cost: Tensor, budget: int | Sequence[int] | Tensor) -> Tensor:
    """Choose a precision for every unit when distortion and cost differ from unit to unit.

    Like `allocate` (same meaning of optimal, same guarantee that nothing affordable is left), with a hull for
    each unit and one sort of all steps; meant for up to some 100 000 units. A choice that lowers no
    distortion is never bought.

    Parameters
    ----------
    distortion : Tensor (pools, units, choices) float
        Absolute distortion of each choice (weights multiplied in), >= 0, used in float64; in any order.
    cost : Tensor (pools, units, choices) int
        Cost of each choice, >= 0, in the unit of ``budget``. To forbid a choice, repeat a cheaper one.
    budget : int or (pools,) int64
        One number serves every pool.

    Returns
    -------
    Tensor (pools, units) uint8
        Index of the choice, on the device of ``distortion``.

    Raises
    ------
    ValueError
        If shapes or values are wrong, or a budget is below the cost of the cheapest choice for every unit.
    """
    if distortion.dim() != 3 or cost.shape != distortion.shape or not 1 <= distortion.shape[-1] <= 256:
        raise ValueError(
            "distortion and cost must both be (pools, units, choices) with 1 to 256 choices, got "
            f"{tuple(distortion.shape)} and {tuple(cost.shape)}."
        )
    if cost.is_floating_point() or cost.dtype == torch.bool:
        raise ValueError(
            f"cost must be whole numbers, got {cost.dtype}; count in a smaller unit (bits or bytes)."
        )
    pools, units, choices = distortion.shape
    device = distortion.device
    money = _check_budget(budget, pools, device)
    eps, price = distortion.double(), cost.to(device=device, dtype=torch.int64)
    if units == 0 or pools == 0:
        _check_values(eps, money, "")
        return torch.zeros(pools, units, dtype=torch.uint8, device=device)

    # Everyone starts at the cheapest choice; of equally cheap ones, at the least distorting.
    cheapest = price.amin(-1, keepdim=True)
    now = torch.where(price == cheapest, eps, torch.inf).argmin(-1)
    money = money - cheapest.sum((1, 2))
    _check_values(eps, money, "distortion must be finite and >= 0")

    # A unit's hull: from where it stands, the steepest way down, and of equally steep ones the shortest.
    at = now
    worths: list[Tensor] = []
    prices: list[Tensor] = []
    targets: list[Tensor] = []
    for _ in range(choices - 1):
        saving, extra = _gain(eps, price, at)
        possible = (saving > 0) & (extra > 0)
        rate = torch.where(possible, saving / extra, -torch.inf)
        worth = rate.amax(-1, keepdim=True)
        step = torch.where((rate >= worth * _NEARLY) & possible, extra, torch.iinfo(torch.int64).max)
        target = step.argmin(-1)
        at = torch.where(possible.any(-1), target, at)
        # On a straight stretch of the hull rounding alone could make a later step look the worthier one.
        worths.append(torch.minimum(worth[..., 0], worths[-1]) if worths else worth[..., 0])
        prices.append(step.amin(-1))
        targets.append(at)
    if worths:
        # Laid out step by step, a stable sort keeps a unit's steps in order where they are equally worthy.
        worth, order = torch.cat(worths, 1).sort(dim=1, stable=True, descending=True)
        owner = order % units
        step = torch.cat(prices, 1).gather(1, order)
        took, money = _take_in_order(step, worth > -torch.inf, money, owner, units)
        level = torch.zeros(pools, units, dtype=torch.int64, device=device).scatter_add_(
            1, owner, took.long()
        )
        now = torch.stack([now, *targets], -1).gather(-1, level[..., None])[..., 0]

    while True:
        # What is left buys no hull step; perhaps it buys a choice off the hull.
        saving, extra = _gain(eps, price, now)
        affordable = (saving > 0) & (extra <= money[:, None, None])
        saving, target = torch.where(affordable, saving, 0.0).max(-1)
        step = extra.gather(-1, target[..., None])[..., 0]
        possible = saving > 0
        if not possible.any():
            return now.to(torch.uint8)
        worth, order = torch.where(possible, saving / step, -torch.inf).sort(
            dim=1, stable=True, descending=True
        )
        took, money = _take_in_order(step.gather(1, order), worth > -torch.inf, money, order, units)
        now = torch.where(torch.zeros_like(took).scatter_(1, order, took), target, now)


def _sort(weights: Tensor) -> Tensor:
    """(pools, units) float32, each pool ascending."""
    if weights.device.type != "cpu":
        return weights.sort(1).values
    # torch would sort indices along, at some twenty times the time of NumPy's vectorised sort.
    return torch.from_numpy(np.sort(weights.numpy(), axis=1))


def _at_rank(ascending: Tensor, rank: Tensor) -> Tensor:
    """Weights (pools, n) of ranks (pools, n), 0 the heaviest; ranks outside are clamped, the caller masks them."""
    last = ascending.shape[1] - 1
    return ascending.gather(1, (last - rank).clamp(0, last))


def _heaviest(weights: Tensor, ascending: Tensor, number: Tensor) -> Tensor:
    """1 for the heaviest number[p] units of each pool p, of equal ones the first; (pools, units) uint8."""
    lightest = _at_rank(ascending, number[:, None] - 1)
    lightest = lightest.masked_fill(number[:, None] == 0, torch.inf)
    chosen = weights > lightest
    heavier = ascending.shape[1] - torch.searchsorted(ascending, lightest, right=True)
    pool, unit = (weights == lightest).nonzero(as_tuple=True)
    among_equals = torch.arange(len(pool), device=pool.device) - torch.searchsorted(pool, pool)
    first = among_equals < (number - heavier[:, 0])[pool]
    chosen[pool[first], unit[first]] = True
    return chosen.view(torch.uint8)


def _spend_on_hull(
    taken: Tensor, money: Tensor, members: Tensor, ascending: Tensor, step_cost: Tensor, worth: Tensor
) -> tuple[Tensor, Tensor]:
    """Take the worthiest hull step that fits, again and again; less than one dear step is left to spend."""
    pools = torch.arange(len(money), device=money.device)
    while True:
        room = torch.cat([members[:, None], taken[:, :-1]], 1) - taken
        fits = step_cost <= money[:, None]
        possible = (room > 0) & fits
        if not possible.any():
            return taken, money
        value = torch.where(possible, _at_rank(ascending, taken).double() * worth, -1.0)
        best = value.argmax(1)
        step = step_cost[best]
        # With a single step cheap enough there is nothing to weigh, so take as many as fit in one round.
        many = torch.where(fits.sum(1) == 1, torch.minimum(money // step, room[pools, best]), 1)
        many = torch.where(possible.any(1), many, 0)
        taken[pools, best] += many
        money = money - many * step


def _spend_off_hull(
    choice: Tensor,
    weights: Tensor,
    taken: Tensor,
    money: Tensor,
    members: Tensor,
    hull: list[int],
    eps: list[float],
    price: list[int],
) -> None:
    """Spend what buys no hull step on choices between two hull choices; changes ``choice`` in place."""
    between = [(level, b) for level, (a, z) in enumerate(zip(hull, hull[1:])) for b in range(z - 1, a, -1)]
    level = torch.tensor([level for level, _ in between], device=money.device)
    target = torch.tensor([b for _, b in between], device=money.device)
    extra = torch.tensor([price[b] - price[hull[level]] for level, b in between], device=money.device)
    saving = torch.tensor(
        [eps[hull[level]] - eps[b] for level, b in between], dtype=torch.float64, device=money.device
    )
    pools = torch.arange(len(money), device=money.device)
    order = weights.sort(dim=1, descending=True, stable=True).indices
    # At each level the next unit to serve is the heaviest one there that still has its hull choice.
    next_rank = taken.clone()
    end = torch.cat([members[:, None], taken[:, :-1]], 1)
    while True:
        possible = (next_rank < end)[:, level] & (extra <= money[:, None])
        if not possible.any():
            return
        unit = order.gather(1, next_rank[:, level].clamp(max=order.shape[1] - 1))
        # The largest saving, not the best rate: the unit then has all that it could afford and need not be
        # seen again.
        value = torch.where(possible, weights.gather(1, unit).double() * saving, -1.0)
        best = value.argmax(1)
        some = possible.any(1)
        served = unit[pools, best]
        choice[pools, served] = torch.where(some, target[best].to(torch.uint8), choice[pools, served])
        next_rank[pools, level[best]] += some.long()
        money = money - torch.where(some, extra[best], 0)


def _take_in_order(
    step: Tensor, possible: Tensor, money: Tensor, owner: Tensor, units: int
) -> tuple[Tensor, Tensor]:
    """Walk (pools, n) steps in order; take each that fits unless an earlier one of its owner was refused."""
    took = torch.zeros_like(possible)
    while True:
        # Money only shrinks, so a step too dear now is too dear for good, and so are its owner's later ones.
        possible = possible & ~took & (step <= money[:, None])
        position = torch.arange(step.shape[1], device=step.device).expand_as(step)
        refused = torch.where(took | possible, step.shape[1], position)
        first = torch.full((len(step), units), step.shape[1], device=step.device)
        first.scatter_reduce_(1, owner, refused, "amin")
        possible = possible & (position < first.gather(1, owner))
        if not possible.any():
            return took, money
        spent = torch.where(possible, step, 0).cumsum(1)
        now = possible & (spent <= money[:, None])
        took = took | now
        money = money - torch.where(now, step, 0).sum(1)


def _gain(eps: Tensor, price: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Distortion saved and cost added by moving each unit from its choice ``at`` to every choice."""
    at = at[..., None]
    return eps.gather(-1, at) - eps, price - price.gather(-1, at)


def _hull(eps: list[float], price: list[int]) -> list[int]:
    """Indices of the choices on the lower convex hull of (price, eps), cheapest first."""
    hull = [0]
    while hull[-1] < len(price) - 1:
        a = hull[-1]
        rates = [(eps[a] - eps[b]) / (price[b] - price[a]) for b in range(a + 1, len(price))]
        hull.append(next(a + 1 + i for i, rate in enumerate(rates) if rate >= max(rates) * _NEARLY))
    return hull


def _check_choices(
    distortion: Sequence[float] | Tensor, cost: Sequence[int] | Tensor
) -> tuple[list[float], list[int]]:
    eps = [float(value) for value in distortion]
    price = [int(value) for value in cost]
    if not 1 <= len(eps) == len(price) <= 256:
        raise ValueError(
            f"distortion and cost need one entry a choice, 1 to 256, got {len(eps)} and {len(price)}."
        )
    if any(int(whole) != float(value) for whole, value in zip(price, cost)):
        raise ValueError(
            f"cost must be whole numbers, got {list(cost)}; count in a smaller unit (bits or bytes)."
        )
    if price[0] < 0 or any(b <= a for a, b in zip(price, price[1:])):
        raise ValueError(f"cost must be >= 0 and strictly increasing, got {price}; sort the choices by cost.")
    if not all(0 <= value < float("inf") for value in eps) or any(b >= a for a, b in zip(eps, eps[1:])):
        raise ValueError(
            f"distortion must be finite, >= 0 and strictly decreasing, got {eps}; leave out a choice that "
            "costs more without lowering it."
        )
    return eps, price


def _check_budget(budget: int | Sequence[int] | Tensor, pools: int, device: torch.device) -> Tensor:
    money = torch.as_tensor(budget, device=device)
    if money.is_floating_point() or money.dtype == torch.bool or money.shape not in ((), (pools,)):
        raise ValueError(
            f"budget must be one whole number or {pools} of them, one a pool, got {money.dtype} "
            f"{tuple(money.shape)}."
        )
    return money.to(torch.int64).expand(pools)


def _check_values(values: Tensor, money_left: Tensor, rule: str) -> None:
    """Raise unless values are finite and >= 0 and no money is owed; waits for the device once."""
    # Extremes carry NaN along and cost far less than a test of each element.
    least, most = values.aminmax() if values.numel() else (values.new_zeros(()),) * 2
    owed = (money_left < 0).any()
    if not ((least >= 0) & (most < torch.inf) & ~owed):
        if not owed:
            raise ValueError(f"{rule}; they range from {float(least)} to {float(most)}.")
        pool = int(money_left.argmin())
        raise ValueError(
            f"The budget of pool {pool} is {-int(money_left[pool])} below the cost of the cheapest choice "
            "for all its units. Raise the budget, or offer a choice of cost 0."
        )
