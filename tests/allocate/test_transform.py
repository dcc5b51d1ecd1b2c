"""Bits for components, against trying everything."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvfold.allocate.transform import ERROR, Components, fill


def best(parts, tokens, budget, widths):
    """Least error of all choices of a width for each component (tiles of one)."""
    least = float("inf")
    sizes = [len(part.energy) for part in parts]
    for chosen in product([0, *widths], repeat=sum(sizes)):
        nbytes, lost = 0.0, 0.0
        for part, one in zip(parts, (chosen[: sizes[0]], chosen[sizes[0] :]), strict=True):
            used = {width for width in one if width}
            if not used:
                break
            nbytes += sum(tokens * width / 8 + (width > 0) * part.basis_bytes for width in one)
            nbytes += 2 * tokens * len(used)
            lost += sum(
                float(energy) * (ERROR[width] if width else 1)
                for energy, width in zip(part.energy, one, strict=True)
            )
        else:
            if nbytes <= budget:
                least = min(least, lost)
    return least


@pytest.mark.parametrize("budget", [600, 800, 1000, 1400])
@pytest.mark.parametrize("decay", [0.9, 0.3])
def test_nearly_the_best_of_all_choices(budget, decay):
    parts = [
        Components(100 * decay ** torch.arange(3.0), 30),
        Components(40 * decay ** torch.arange(3.0), 50),
    ]
    found = fill(parts, 64, budget, (2, 4, 8), tile=1)
    assert sum(part.nbytes(groups, 64) for part, groups in zip(parts, found, strict=True)) <= budget
    lost = sum(part.lost(groups) for part, groups in zip(parts, found, strict=True))
    # One price for all reaches the corners of the convex hull only, and does not see norms: a third of so small a budget.
    least, hedged = (best(parts, 64, share * budget, (2, 4, 8)) for share in (1, 0.66))
    assert least - 1e-3 <= lost <= hedged + 1e-3


def test_more_bytes_lose_less_and_are_spent():
    energy = 0.97 ** torch.arange(300.0)
    parts = [Components(energy, 400), Components(0.5 * energy, 400)]
    before = float("inf")
    for budget in (40_000, 80_000, 160_000, 320_000):
        found = fill(parts, 1000, budget, (2, 3, 4, 5, 6, 8))
        spent = sum(part.nbytes(groups, 1000) for part, groups in zip(parts, found, strict=True))
        lost = sum(part.lost(groups) for part, groups in zip(parts, found, strict=True))
        assert 0.9 * budget < spent <= budget and lost < before
        assert all(list(groups) == sorted(groups, reverse=True) for groups in found)
        before = lost


def test_a_dear_basis_leaves_components_out():
    energy = 0.97 ** torch.arange(64.0)
    cheap, dear = (fill([Components(energy, row)] * 2, 100, 9_000, (2, 4, 8)) for row in (1, 400))
    assert sum(n for _, n in dear[0]) < sum(n for _, n in cheap[0])


def test_16_bits_are_ranks():
    energy = torch.tensor([8.0, 4, 2, 1, 0.5, 0.25, 0.1, 0.05])
    (groups, _) = fill([Components(energy, 10)] * 2, 100, 1_500, (16,), tile=1)
    assert groups == ((16, 3),)
    assert Components(energy, 10).lost(groups) == pytest.approx(1.9)
    assert Components(energy, 10, rest=2.0).lost(groups) == pytest.approx(3.9)


def test_too_small_a_budget():
    assert fill([Components(torch.ones(16), 10)] * 2, 100, 300, (2, 4)) is None
