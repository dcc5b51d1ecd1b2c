"""Sums of channels against float64: some tokens at a time in torch, and the kernel, interpreted where there is no GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from kvfold.kernels import channel_sums
from kvfold.kernels.position_bias import turned_rows
from tests import interpreted
from tests.stores.test_graded import ROTARY

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# heads, tokens, dim, RoPE position of index 0, share of valid tokens
CASES = [(2, 300, 64, 5, 0.7), (3, 128, 80, 0, 1.0), (1, 70, 16, 3, 1.0)]


class Doubled:
    """The test's RoPE on whatever device."""

    scale = 1.0

    def rotate(self, x, positions):
        return ROTARY.rotate(x.cpu(), positions.cpu()).to(x.device)

    def unrotate(self, x, positions):
        return ROTARY.unrotate(x.cpu(), positions.cpu()).to(x.device)

    def shared(self, name, make):
        return make()


def drawn(heads, tokens, dim, shift, share):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, dim, generator=generator).half().transpose(0, 1) + 1
    valid = torch.rand(heads, tokens, generator=generator) < share
    constant, centre = torch.randn(2, heads, dim, generator=generator)
    return x, valid, constant.half(), centre


def exact(x, valid, shift, constant=None, centre=None, turned=True):
    x = x.double()
    if constant is not None:
        rows = turned_rows(constant.float(), ROTARY, x.shape[1], shift) if turned else constant[:, None]
        x = x - rows.double()
    if centre is not None:
        x = x - centre[:, None].double()
    x = x * valid[..., None]
    return x.sum(1), x.square().sum(1)


def check():
    """All forms, wherever `channel_sums` sends them."""
    for case in CASES:
        shift = case[3]
        given = x, valid, constant, centre = drawn(*case)
        on = [tensor.to(DEVICE) for tensor in given]
        for rotary in (Doubled(), None):
            for taken in ((None, None), (constant, None), (constant, centre), (None, centre)):
                there = [None if tensor is None else tensor.to(DEVICE) for tensor in taken]
                found = channel_sums.channel_sums(*on[:2], there[0], rotary, shift, there[1])
                right = exact(x, valid, shift, *taken, turned=rotary is not None)
                for one, other in zip(found, right):
                    torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=2e-3)
        back = ROTARY.unrotate(x, torch.arange(shift, shift + x.shape[1])).double() * valid[..., None]
        found = channel_sums.unturned_sum(*on[:2], Doubled(), shift)
        # The kernel turns by tables of 16 bits.
        assert ((found.cpu() - back.sum(1)).abs() <= 5e-4 * back.abs().sum(1)).all()


@pytest.mark.parametrize("at_a_time", [100, 2048])
def test_plain(at_a_time, monkeypatch):
    monkeypatch.setattr(channel_sums, "AT_A_TIME", at_a_time)
    monkeypatch.setattr(channel_sums, "_serves", lambda x: False)
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device("cpu"))
    check()


def check_kernel(monkeypatch):
    monkeypatch.setattr(channel_sums, "_serves", lambda x: True)
    check()


def test_kernel():
    interpreted.run(check_kernel)
