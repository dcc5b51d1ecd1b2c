"""Whole groups: full, within the budget, and hardly worse than units one by one."""

from __future__ import annotations

import pytest
import torch

from kvfold.allocate.groups import allocate_in_groups
from kvfold.allocate.price import allocate_at_one_price

GROUPED, SIZE = 3, 16


def problem(units, seed, pools=4):
    """Distortions that fall by a factor at each choice, for weights over several orders; a choice that is never worth it."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(pools, units, 1, generator=generator) * 2).exp()
    factors = torch.rand(pools, units, GROUPED, generator=generator) * 0.5 + 0.05
    falling = torch.cat([torch.ones(pools, units, 1), factors.cumprod(-1)], -1)
    distortion = torch.cat([weights * falling, weights, torch.zeros_like(weights)], -1)
    cost = torch.randint(2, 9, (pools, GROUPED), generator=generator).cumsum(-1)
    cost = torch.cat([torch.zeros(pools, 1).long(), cost, torch.tensor([[90, 120]]).expand(pools, 2)], -1)
    return distortion, cost


def cost_of(choice, cost):
    """Unit by unit, and what is missing in the groups."""
    total = 0
    for own, prices in zip(choice.tolist(), cost.tolist(), strict=True):
        total += sum(prices[k] for k in own)
        total += sum(prices[k] * (-own.count(k) % SIZE) for k in range(1, GROUPED + 1))
    return total


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_whole_groups_within_the_budget(seed, share):
    distortion, cost = problem(600, seed)
    budget = int(share * 600 * cost[:, GROUPED].sum())
    choice, spent = allocate_in_groups(distortion, cost, budget, SIZE, GROUPED)
    for own in choice.tolist():
        assert all(own.count(k) % SIZE == 0 for k in range(1, GROUPED + 1))
        assert GROUPED + 1 not in own
    assert int(spent) == cost_of(choice, cost) <= budget
    one_by_one = allocate_at_one_price(distortion, cost, budget)
    lost, least = (float(distortion.gather(-1, found[..., None]).sum()) for found in (choice, one_by_one))
    assert lost <= 1.5 * least
    of_tensor = allocate_in_groups(distortion, cost, torch.tensor(budget), SIZE, GROUPED)
    assert torch.equal(of_tensor[0], choice)


@pytest.mark.parametrize("units", [1, 5, 16, 40])
def test_few_units(units):
    """Groups may stay open where a pool has too few units; they cost as if they were full."""
    distortion, cost = problem(units, 0)
    distortion[:, units // 2 :] = 0  # padding
    for budget in (0, 100, 1000, 10**6):
        choice, spent = allocate_in_groups(distortion, cost, budget, SIZE, GROUPED)
        assert int(spent) == cost_of(choice, cost) <= budget
        assert not choice[:, units // 2 :].any()


def test_many_units_hardly_notice():
    distortion, cost = problem(20_000, 1)
    budget = int(0.2 * 20_000 * cost[:, GROUPED].sum())
    choice, spent = allocate_in_groups(distortion, cost, budget, SIZE, GROUPED)
    one_by_one = allocate_at_one_price(distortion, cost, budget)
    lost, least = (float(distortion.gather(-1, found[..., None]).sum()) for found in (choice, one_by_one))
    assert lost <= 1.005 * least and int(spent) > 0.995 * budget
