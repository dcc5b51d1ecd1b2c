"""A constant turned to every position equals the model's own RoPE on it, position by position."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels.position_bias import planes, position_logits, turned_rows
from tests.stores.test_graded import HalfSplitRotary

CPU = torch.device("cpu")


class InterleavedRotary(HalfSplitRotary):
    """Planes of neighbours; the last eight channels stay."""

    scale = 1.3

    def _turn(self, x, angle):
        moved, still = x.float()[..., :-8], x.float()[..., -8:]
        half = moved.shape[-1] // 2
        moved = moved.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
        moved = super()._turn(moved, angle).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
        return torch.cat([moved, still], -1) * self.scale


class Mixing(HalfSplitRotary):
    """Not planes: every channel meets every other."""

    def rotate(self, x, positions):
        return super().rotate(x, positions) @ torch.linalg.qr(torch.ones(64, 64).tril())[0]


@pytest.mark.parametrize("rotary", [HalfSplitRotary(), InterleavedRotary()], ids=["halves", "neighbours"])
@pytest.mark.parametrize("tokens, shift", [(1, 0), (128, 3), (300, 0), (1000, 77)])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_equals_rope_at_each_position(rotary, tokens, shift, count):
    generator = torch.Generator().manual_seed(0)
    vector, query = torch.randn(2, 64, generator=generator), torch.randn(2, count, 64, generator=generator)
    rows = torch.stack([rotary.rotate(vector[:, None], torch.tensor([shift + i])) for i in range(tokens)])
    rows = rows[:, :, 0].transpose(0, 1)
    found = turned_rows(vector, rotary, tokens, shift)
    torch.testing.assert_close(found, rows, atol=2e-3, rtol=0)
    some = slice(tokens // 3, tokens - tokens // 5)
    assert torch.equal(turned_rows(vector, rotary, tokens, shift, some), found[:, some])
    some = torch.randint(0, tokens, (9,), generator=generator)
    assert torch.equal(turned_rows(vector, rotary, tokens, shift, some), found[:, some])
    expected = query @ rows.transpose(1, 2)
    torch.testing.assert_close(
        position_logits(query, vector, rotary, tokens, shift), expected, atol=1e-2, rtol=0
    )


def test_knows_planes():
    assert planes(HalfSplitRotary(), 64, CPU) == (*range(32, 64), *range(32))
    expected = [i ^ 1 for i in range(56)] + list(range(56, 64))
    assert planes(InterleavedRotary(), 64, CPU) == tuple(expected)
    assert planes(Mixing(), 64, CPU) is None
    with pytest.raises(ValueError, match="planes"):
        turned_rows(torch.ones(1, 64), Mixing(), 5, 0)
