"""One price for many pools: feasible, never over, monotone, and optimal where the price says so."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.allocate import price
from kvfold.allocate.price import allocate_at_one_price, bytes_at_prices

numbers = st.floats(0.0009765625, 100, width=32)


@st.composite
def problems(draw):
    """Convex tables (every choice on the hull), each pool with its own costs; budgets from nothing to all."""
    pools, units, choices = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    cost = torch.zeros(pools, choices, dtype=torch.int64)
    for pool in range(pools):
        steps = draw(st.lists(st.integers(1, 9), min_size=choices - 1, max_size=choices - 1))
        cost[pool] = torch.tensor([0, *itertools.accumulate(steps)])
    distortion = torch.zeros(pools, units, choices)
    for pool, unit in itertools.product(range(pools), range(units)):
        slopes = sorted(draw(st.lists(numbers, min_size=choices - 1, max_size=choices - 1)))
        for choice in reversed(range(choices - 1)):
            step = float(cost[pool, choice + 1] - cost[pool, choice])
            distortion[pool, unit, choice] = distortion[pool, unit, choice + 1] + step * slopes[-1 - choice]
    most = int(cost[:, -1].sum()) * units
    return distortion, cost, draw(st.integers(0, most + 3))


def spent(choice, cost):
    return int(cost.gather(1, choice).sum())


def total(choice, distortion):
    return float(distortion.double().gather(-1, choice[..., None]).sum())


def brute_force(distortion, cost, budget):
    pools, units, choices = distortion.shape
    best = float("inf")
    for picks in itertools.product(range(choices), repeat=pools * units):
        choice = torch.tensor(picks).view(pools, units)
        if spent(choice, cost) <= budget:
            best = min(best, total(choice, distortion))
    return best


@settings(max_examples=120, deadline=None)
@given(problems())
def test_against_brute_force(problem):
    distortion, cost, budget = problem
    choice = allocate_at_one_price(distortion, cost, budget)
    assert choice.shape == distortion.shape[:2]
    assert spent(choice, cost) <= budget
    found, best = total(choice, distortion), brute_force(distortion, cost, budget)
    # Nothing beats a choice at one price at its own cost; the rest is at most the one step that did not fit.
    assert found >= best - 1e-5 * (1 + best)
    own = brute_force(distortion, cost, spent(choice, cost))
    largest = float((distortion[..., :1] - distortion).max())
    assert found <= own + largest + 1e-5 * (1 + own)


@settings(max_examples=60, deadline=None)
@given(problems(), st.floats(-8, 5))
def test_optimal_at_every_price(problem, log_price):
    """At the cost of a Lagrangian solution, which is a vertex of the hull, the least distortion is found."""
    distortion, cost, _ = problem
    lagrangian = (distortion + cost[:, None] * torch.tensor(log_price).exp()).argmin(-1)
    budget = spent(lagrangian, cost)
    choice = allocate_at_one_price(distortion, cost, budget)
    best = brute_force(distortion, cost, budget)
    assert total(choice, distortion) <= best + 1e-4 * (1 + best)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 20))
def test_more_budget_is_never_worse(problem, more):
    distortion, cost, budget = problem
    less = total(allocate_at_one_price(distortion, cost, budget), distortion)
    assert (
        total(allocate_at_one_price(distortion, cost, budget + more), distortion) <= less * (1 + 1e-6) + 1e-6
    )


def random_problem(pools=4, units=3000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(pools, units, generator=generator).mul(1.5).exp()
    error = torch.tensor([2.0, 0.4, 0.2, 0.07, 0.015, 0.0002, 0.0])
    distortion = weights[..., None] * error * (torch.rand(pools, units, 7, generator=generator) + 0.5)
    cost = torch.tensor([0, 38, 56, 80, 120, 264, 514]) + torch.arange(pools)[:, None]
    cost[:, 0] = 0
    return distortion, cost


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.3, 0.7, 0.95])
def test_the_budget_is_used(share):
    distortion, cost = random_problem()
    budget = int(share * int(cost[:, -1].sum()) * distortion.shape[1])
    choice = allocate_at_one_price(distortion, cost, budget)
    assert 0.99 * budget <= spent(choice, cost) <= budget


def test_equal_units_are_served_in_order():
    """Units on the last boundary are many when all are alike; they still use the budget."""
    distortion = torch.tensor([4.0, 1.0, 0.0]).expand(2, 50, 3)
    cost = torch.tensor([[0, 2, 4]] * 2)
    choice = allocate_at_one_price(distortion, cost, 101)
    assert spent(choice, cost) == 100
    assert choice.flatten().tolist() == [1] * 50 + [0] * 50


def test_padding_costs_nothing():
    distortion, cost = random_problem(2, 400)
    distortion[:, 100:200] = 0
    choice = allocate_at_one_price(distortion, cost, 20000)
    assert not choice[:, 100:200].any()
    dense = torch.cat([distortion[:, :100], distortion[:, 200:]], 1)
    alone = allocate_at_one_price(dense, cost, 20000)
    assert torch.equal(torch.cat([choice[:, :100], choice[:, 200:]], 1), alone)
    assert not allocate_at_one_price(torch.zeros(2, 5, 3), cost[:, :3], 10**6).any()


def test_nothing_and_everything():
    distortion, cost = random_problem(2, 50)
    distortion[..., -1] = 0
    assert not allocate_at_one_price(distortion, cost, 0).any()
    choice = allocate_at_one_price(distortion, cost, 10**12)
    assert torch.equal(choice, distortion.argmin(-1))
    assert spent(choice, cost) <= 10**12


def test_pools_share_the_budget():
    distortion, cost = random_problem(2, 500)
    distortion[1] *= 1000
    choice = allocate_at_one_price(distortion, cost, 60000)
    each = cost.gather(1, choice).sum(1)
    assert each[1] > 2 * each[0]


def test_refusals():
    distortion, cost = random_problem(2, 10)
    with pytest.raises(ValueError, match="at least 0"):
        allocate_at_one_price(distortion, cost, -1)
    with pytest.raises(ValueError, match="cheapest"):
        allocate_at_one_price(distortion, cost + 5, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_same_choices_on_a_gpu():
    distortion, cost = random_problem()
    here = allocate_at_one_price(distortion, cost, 200000)
    there = allocate_at_one_price(distortion.cuda(), cost.cuda(), 200000)
    assert spent(there.cpu(), cost) <= 200000
    assert total(there.cpu(), distortion) == pytest.approx(total(here, distortion), rel=1e-3)


def check_kernels(monkeypatch):
    """By the kernels, and by plain torch: the same sums at every price but for rounding, and choices as good."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for units, choices, budgets in ((300, 7, (0, 20000, 60000, 10**9)), (70, 2, (500,))):
        distortion, cost = random_problem(2, units)
        distortion, cost = distortion[..., :choices], cost[:, :choices]
        prices = torch.logspace(-6, 3, 48).tolist()
        # Of a price times a cost plus a distortion, which a GPU rounds once and plain torch may round twice.
        near = (0.99999, 1.00001) if device.type == "cuda" else (1, 1)
        most, least = (bytes_at_prices(distortion, cost, [by * one for one in prices]) for by in near)
        with monkeypatch.context() as patch:
            patch.setattr(price.dense_decode, "problem", lambda device: None)
            found = bytes_at_prices(distortion.to(device), cost.to(device), prices).cpu()
            assert (least <= found).all() and (found <= most).all()
        for budget in budgets:
            here = allocate_at_one_price(distortion, cost, budget)
            with monkeypatch.context() as patch:
                patch.setattr(price.dense_decode, "problem", lambda device: None)
                there = allocate_at_one_price(
                    distortion.to(device), cost.to(device), torch.tensor(budget, device=device)
                ).cpu()
            assert spent(there, cost) <= budget
            assert total(there, distortion) == pytest.approx(total(here, distortion), rel=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(price.dense_decode, "problem", lambda device: None)
            nothing = torch.zeros(2, 5, choices, device=device)
            assert not allocate_at_one_price(nothing, cost.to(device), 10**6).any()


def test_kernels(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        check_kernels(monkeypatch)
        return
    # Triton decides when it is first imported whether to interpret.
    code = "import pytest; from tests.allocate.test_price import check_kernels; check_kernels(pytest.MonkeyPatch())"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
