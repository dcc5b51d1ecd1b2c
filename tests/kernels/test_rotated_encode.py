"""Codes made in one pass are those that a search for the nearest level in float64 finds, head by head."""

from __future__ import annotations

import pytest
import torch

from kvfold.codecs.packing import packed_bytes, unpack
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import channel_sums, rotated_encode
from kvfold.kernels.position_bias import turned_rows
from tests.stores.checks import Turn

pytestmark = pytest.mark.skipif(rotated_encode.NATIVE.problem() is not None, reason="no C loop")

HEADS = {
    "one width": [((4, 64),)] * 3,
    "other widths a head": [((8, 4), (5, 6), (3, 54)), ((2, 64),), ((7, 2), (6, 10), (4, 12), (1, 40))],
    "odd sizes": [((3, 80),), ((6, 13), (2, 67))],
    "wide": [((3, 256),), ((4, 16), (2, 240))],
}


def made(groups, by_group, dtype, tokens=37, rows=2):
    """Random vectors, codes, and for each head its channels' order and shares of the norm."""
    generator = torch.Generator().manual_seed(len(groups) + tokens)
    dim = sum(channels for _, channels in groups[0])
    size = torch.logspace(-2, 2, tokens)[:, None] * torch.linspace(0.2, 3, dim)
    x = (torch.randn(rows, len(groups), tokens, dim, generator=generator) * size).to(dtype)
    order = torch.stack([torch.randperm(dim, generator=generator) for _ in range(rows * len(groups))])
    order = order.view(rows, len(groups), dim).to(torch.uint8)
    shares = torch.rand(rows, len(groups), max(map(len, groups)), generator=generator) + 0.1
    codes = tuple(RotatedCode(one, norms="group" if by_group else "token", seed=5) for one in groups)
    return x, codes, None if by_group else shares, order


def nearest(x, codes, shares, order):
    """Codes (rows, heads, tokens, dim) and norms in float64, and how near each number is to a boundary."""
    x = x.double().gather(-1, order.long()[:, :, None].expand_as(x))
    found, norms, margin = [], [], []
    for head, code in enumerate(codes):
        y = code.rotate(x[:, head]).double()
        whole, start, pieces, parts = y.norm(dim=-1, keepdim=True), 0, [], []
        for index, ((_, channels), (_, levels)) in enumerate(
            zip(code.groups, code.tables(torch.device("cpu")), strict=True)
        ):
            part = y[..., start : start + channels]
            by = part.norm(dim=-1, keepdim=True)
            share = 1.0
            if code.norms == "token":
                share = (
                    (channels / code.dim) ** 0.5
                    if shares is None
                    else shares[:, head, index, None, None].double()
                )
                by = whole * share
            distance = (part / by)[..., None] - levels.double()
            two = distance.abs().sort(-1)
            found.append(two.indices[..., 0])
            margin.append(two.values[..., 1] - two.values[..., 0])
            level = levels.double()[found[-1]] * share
            pieces.append(level)
            parts.append(by / level.norm(dim=-1, keepdim=True))
            start += channels
        norms.append(
            torch.cat(parts, -1)
            if code.norms == "group"
            else whole / torch.cat(pieces, -1).norm(dim=-1, keepdim=True)
        )
    return found, norms, margin


def check(packed, norms, x, codes, shares, order):
    """Against `nearest`; numbers halfway between two levels may have either."""
    expected, lengths, margin = nearest(x, codes, shares, order)
    byte = group = 0
    for head, code in enumerate(codes):
        clear = torch.ones(lengths[head].shape, dtype=torch.bool)
        for index, (width, channels) in enumerate(code.groups):
            size = packed_bytes(channels, width)
            found = unpack(packed[..., byte : byte + size].contiguous(), width, channels)
            sure = margin[group] > 1e-4
            assert sure.double().mean() > 0.9
            assert torch.equal(found[sure].long(), expected[group][sure])
            clear[..., index if code.norms == "group" else 0] &= sure.all(-1)
            byte, group = byte + size, group + 1
        found = norms[..., sum(c.scales for c in codes[:head]) :][..., : code.scales]
        torch.testing.assert_close(found[clear].double(), lengths[head][clear], rtol=1e-4, atol=0)
    assert byte == packed.shape[-1]


@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("groups", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nearest_levels(groups, by_group, dtype):
    x, codes, shares, order = made(groups, by_group, dtype)
    check(*rotated_encode.encode_heads(x, codes, shares, order), x, codes, shares, order)


@pytest.mark.parametrize("keep_norm", [True, False])
def test_plain_torch_gives_the_same(keep_norm):
    """No order, no shares, and strides that a cache's layout has."""
    codes = tuple(RotatedCode(((5, 24), (2, 40)), keep_norm=keep_norm, seed=seed) for seed in range(2))
    x = torch.randn(3, 50, 2, 64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    packed, norms = rotated_encode.encode_heads(x, codes)
    for head, code in enumerate(codes):
        plain, scales = code.encode(x[:, head])
        same = packed[..., head * code.nbytes :][..., : code.nbytes] == plain
        assert same.double().mean() > 0.999
        torch.testing.assert_close(norms[..., head : head + 1].half(), scales, rtol=2e-3, atol=0)


@pytest.mark.parametrize("rotary", [None, Turn()], ids=["fixed", "turned"])
def test_less_a_constant(rotary, monkeypatch):
    """Some tokens at a time, from an index that no table of turns begins at."""
    monkeypatch.setattr(channel_sums, "AT_A_TIME", 70)
    codes, shifts = (RotatedCode(((4, 24), (2, 40)), norms="group"),) * 2, (5, 130)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 150, 2, 64, generator=generator).half().transpose(1, 2)
    constant = 3 * torch.randn(2, 2, 64, generator=generator).half()
    taken = constant[:, :, None].float()
    if rotary is not None:
        taken = torch.stack(
            [turned_rows(one.float(), rotary, 150, shift) for one, shift in zip(constant, shifts)]
        )
    found = rotated_encode.encode_heads(x, codes, None, None, constant, rotary, shifts)
    right = rotated_encode.encode_heads(x.float() - taken, codes)
    assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads(threads):
    x, codes, shares, order = made(HEADS["other widths a head"], True, torch.float32, tokens=100)
    one, before = rotated_encode.encode_heads(x, codes, shares, order), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        several = rotated_encode.encode_heads(x, codes, shares, order)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], several[0]) and torch.equal(one[1], several[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(bad):
    x = torch.randn(1, 2, 70, 64)
    x[0, 1, 69, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        rotated_encode.encode_heads(x, (RotatedCode(((3, 64),)),) * 2)


def test_zeros_decode_to_zeros():
    code = RotatedCode(((3, 8), (1, 8)), norms="group")
    packed, norms = rotated_encode.encode_heads(torch.zeros(1, 1, 3, 16), (code,))
    assert bool((code.decode(packed[:, :, None], norms[:, :, None]) == 0).all())


def test_what_only_plain_torch_serves():
    sketched = RotatedCode(((2, 16),), sketch=True)
    assert rotated_encode.encode_heads(torch.randn(1, 1, 4, 16), (sketched,)) is None
    assert rotated_encode.encode_heads(torch.randn(1, 1, 4, 300), (RotatedCode(((2, 300),)),)) is None
    assert rotated_encode.encode_heads(torch.randn(1, 1, 4, 16).double(), (RotatedCode(((2, 16),)),)) is None
