"""Widths of blocks against every choice there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.allocate.blocks import allocate_blocks

scores = st.floats(0, 100, width=32)


def loss(one, widths):
    return sum(score * 4.0**-width for score, width in zip(one, widths, strict=True))


def choices(blocks, least, most):
    return itertools.product(range(least, most + 1), repeat=blocks)


@settings(deadline=None, max_examples=60)
@given(st.lists(scores, min_size=1, max_size=5), st.integers(0, 14), st.integers(1, 2), st.integers(2, 4))
def test_greedy_is_the_optimum_and_spends_all(one, extra, least, most):
    total = len(one) * least + extra
    (found,) = allocate_blocks(
        torch.tensor([one]), torch.tensor([total]), widths=range(least, most + 1)
    ).tolist()
    assert sum(found) == min(total, most * len(one))
    best = min(loss(one, c) for c in choices(len(one), least, most) if sum(c) <= total)
    assert loss(one, found) <= best * (1 + 1e-9)
    more = allocate_blocks(torch.tensor([one]), torch.tensor([total + 1]), widths=range(least, most + 1))[
        0
    ].tolist()
    assert all(a <= b for a, b in zip(found, more, strict=True))
    assert all(found[i] >= found[j] for i, j in itertools.permutations(range(len(one)), 2) if one[i] > one[j])


@settings(deadline=None, max_examples=40)
@given(st.lists(scores, min_size=6, max_size=6), st.integers(6, 26))
def test_heads_may_share(values, total):
    table = torch.tensor(values).view(2, 3)
    found = allocate_blocks(table, torch.tensor([total // 2, total - total // 2]).clamp_min(3), shared=True)
    spent = int(found.sum())
    best = min(loss(values, c) for c in choices(6, 1, 6) if sum(c) <= spent)
    assert loss(values, found.flatten().tolist()) <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(scores, min_size=2, max_size=5),
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_few_widths_are_the_optimum_of_their_kind(one, extra, distinct, cost):
    total = len(one) + cost + extra
    (found,) = allocate_blocks(
        torch.tensor([one]), torch.tensor([total]), widths=range(1, 6), most_widths=distinct, width_cost=cost
    ).tolist()

    def spent(widths):
        return sum(widths) + cost * len(set(widths))

    assert spent(found) <= total and len(set(found)) <= distinct
    best = min(loss(one, c) for c in choices(len(one), 1, 5) if spent(c) <= total and len(set(c)) <= distinct)
    assert loss(one, found) <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(scores, min_size=1, max_size=4), st.integers(0, 20), st.sets(st.integers(1, 8), min_size=1))
def test_some_widths_only(one, extra, widths):
    total = len(one) * min(widths) + extra
    (found,) = allocate_blocks(torch.tensor([one]), torch.tensor([total]), widths=sorted(widths)).tolist()
    assert set(found) <= widths and sum(found) <= total
    best = min(loss(one, c) for c in itertools.product(widths, repeat=len(one)) if sum(c) <= total)
    assert loss(one, found) <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(scores, min_size=4, max_size=4), st.integers(4, 20))
def test_tiles_are_the_optimum_of_their_kind(one, total):
    (found,) = allocate_blocks(
        torch.tensor([one]), torch.tensor([total]), widths=range(1, 6), tile=2
    ).tolist()
    assert sum(found) <= total
    pairs = [c for c in choices(4, 1, 5) if all(c.count(width) % 2 == 0 for width in c)]
    best = min(loss(one, c) for c in pairs if sum(c) <= total)
    assert loss(one, found) <= best * (1 + 1e-9)


def test_several_heads_with_few_widths_are_each_as_alone():
    table, total = (
        torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) ** 4,
        torch.arange(20, 70, 10),
    )
    found = allocate_blocks(table, total, most_widths=3, width_cost=2)
    for head in range(5):
        alone = allocate_blocks(table[head : head + 1], total[head : head + 1], most_widths=3, width_cost=2)
        assert torch.equal(found[head], alone[0])


def test_shared_bits_pay_for_widths_too():
    table = torch.tensor([[64.0, 9.0, 8.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    found = allocate_blocks(table, torch.tensor([9, 9]), shared=True, width_cost=3)
    spent = [sum(widths) + 3 * len(set(widths)) for widths in found.tolist()]
    assert sum(spent) <= 18 and spent[1] == 7
    with pytest.raises(ValueError, match="need at least 8 bits"):
        allocate_blocks(table, torch.tensor([7, 9]), shared=True, width_cost=3, tile=2)


def test_ties_go_to_the_lowest_index():
    assert allocate_blocks(torch.ones(1, 4), torch.tensor([6])).tolist() == [[2, 2, 1, 1]]
    assert allocate_blocks(torch.zeros(1, 3), torch.tensor([5]), widths=(1, 2)).tolist() == [[2, 2, 1]]
    assert allocate_blocks(torch.ones(1, 4), torch.tensor([6]), most_widths=2).tolist() == [[2, 2, 1, 1]]


@pytest.mark.parametrize(
    ("table", "total", "options", "message"),
    [
        ([[1.0, 1.0]], 1, {}, "need at least 2 bits"),
        ([[1.0, 1.0]], 4, {"width_cost": 3}, "need at least 5 bits"),
        ([[1.0, -1.0]], 4, {}, "negative"),
        ([[1.0, float("nan")]], 4, {}, "finite"),
        ([[1.0, 1.0, 1.0]], 6, {"tile": 2}, "tiles of 2 must divide 3"),
        ([[1.0]], 6, {"widths": ()}, "widths be positive"),
        ([[1.0]], 6, {"widths": (0, 2)}, "widths be positive"),
    ],
)
def test_bad_input(table, total, options, message):
    with pytest.raises(ValueError, match=message):
        allocate_blocks(torch.tensor(table), torch.tensor([total]), **options)
