"""How alike layers are, and windows by it."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from kvfold.allocate.windows import alignment, propose, within


def test_alignment_is_that_of_centred_gram_matrices():
    """Kornblith et al.: HSIC of token-by-token Gram matrices, which never multiplies channels."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(30, dim, generator=generator) + 2 for dim in (5, 8, 3)]
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30
    grams = [centre @ x.double() @ x.double().t() @ centre for x in states]
    found = alignment(states)
    for i in range(3):
        for j in range(3):
            expected = (grams[i] * grams[j]).sum() / (grams[i].norm() * grams[j].norm())
            assert float(found[i, j]) == pytest.approx(float(expected), abs=1e-5)


def test_rotations_and_scales_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=generator)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator))
    assert float(alignment([x, 3 * x @ turn + 1])[0, 1]) == pytest.approx(1, abs=1e-5)
    assert float(alignment([x, torch.zeros(50, 4)])[0, 1]) == 0


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_best_of_all_borders(layers):
    generator = torch.Generator().manual_seed(layers)
    raw = torch.rand(8, 8, generator=generator)
    aligned = ((raw + raw.t()) / 2).fill_diagonal_(1)
    count = -(-8 // layers)

    def score(borders):
        edges = [0, *borders, 8]
        return sum((b - a) * within(aligned, a, b) for a, b in zip(edges, edges[1:]))

    possible = [
        borders
        for borders in combinations(range(1, 8), count - 1)
        if max(b - a for a, b in zip((0, *borders), (*borders, 8))) <= 2 * layers
    ]
    found = propose(aligned, layers)
    assert found in possible
    assert score(found) == pytest.approx(max(map(score, possible)))


def test_alike_layers_end_up_together():
    aligned = torch.block_diag(torch.ones(3, 3), torch.ones(1, 1), torch.ones(4, 4))
    assert propose(aligned, 3) == (3, 4)
