"""Block energies against each model's own rotary embedding and its own attention calls."""

from __future__ import annotations

import torch

from kvfold.methods.energies import Energy, partner_of
from tests.stores.checks import Turn

CPU = torch.device("cpu")


class Halves(Turn):
    """Turns channels (i, i + 3) of the first six."""

    def _turn(self, x, positions, sign):
        order = [0, 3, 1, 4, 2, 5]
        x = x.clone()
        x[..., order] = super()._turn(x[..., order], positions, sign)
        return x


def test_blocks_are_the_planes_that_rope_turns():
    ones = torch.ones(1, 10)
    key = torch.tensor([[1.0, 1, 1, 1, 1, 1, 5, 2, 7, 3]])

    def blocks(rotary, score="product", query=ones):
        return Energy(query, key, partner_of(rotary, 10, CPU)).blocks(score)[0].tolist()

    assert blocks(Halves()) == [[0, 3], [1, 4], [2, 5], [8, 6], [9, 7]]
    assert blocks(Turn()) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert blocks(None)[:2] == [[8, 6], [9, 7]]
    # Product and sum put different channels first.
    query, key[0, 8] = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 6, 1, 1]]), 9
    assert blocks(Halves(), "product", query)[3:] == [[7, 8], [6, 9]]
    assert blocks(Halves(), "sum", query)[3:] == [[8, 7], [6, 9]]
