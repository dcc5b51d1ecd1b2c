"""The paged decode kernel against float64 attention, interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvfold.kernels import paged_decode
from kvfold.kernels.paged_decode import PAGE, Paged
from tests import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # no bfloat16 in the interpreter
CASES = [
    # batch, kv heads, group, dim, value dim, tokens of each slot, span, dtype, softcap
    (1, 2, 4, 64, 64, (150, 3), 4, torch.float32, None),
    (2, 2, 7, 80, 48, (33, 0, 16, 200), 1, torch.float32, 5.0),
    (3, 1, 1, 128, 96, (70, 40, 1), 2, HALF, None),
    (1, 1, 16, 256, 256, (600,), 8, torch.float16, None),
]


def layer(generator, counts, dim, value_dim, span, dtype, spare=1):
    """A second layer's pages, strewn over a pool that holds NaN wherever no token is; and each slot's tokens."""
    owned = [-(-count // PAGE) + spare for count in counts]
    first, pages = 5, sum(owned) + 9  # five pages before belong to a first layer of two slots
    table = torch.randperm(pages, generator=generator)
    starts = torch.tensor([0, 2, first, *(first + sum(owned[: i + 1]) for i in range(len(owned)))])
    keys, values = (torch.full((pages * PAGE, width), torch.nan) for width in (dim, value_dim))
    tokens = []
    for slot, count in enumerate(counts):
        k, v = (torch.randn(count, width, generator=generator) for width in (dim, value_dim))
        tokens.append((k.to(dtype), v.to(dtype)))
        for index in range(count):
            place = table[starts[2 + slot] + index // PAGE] * PAGE + index % PAGE
            keys[place], values[place] = k[index], v[index]
    each = [1, 2, *(-(-own // span) for own in owned)]
    slots = [slot for slot, number in enumerate(each) for _ in range(number)]
    pieces = torch.tensor([0, *(sum(each[: i + 1]) for i in range(len(each)))])

    def ints(x):
        return torch.as_tensor(x, dtype=torch.int32, device=DEVICE)

    paged = Paged(
        keys.to(DEVICE, dtype), values.to(DEVICE, dtype), ints(torch.zeros(pages * PAGE)),
        torch.zeros(pages * PAGE, device=DEVICE), ints(table), ints(starts)[2:], ints(counts), ints(pieces)[2:],
        ints(slots), first_slot=2, most=sum(each[2:]) + 4, span=span,
    )  # fmt: skip
    return paged, tokens


def reference(query, tokens, group, scaling, softcap):
    """Softmax attention in float64, one head after the other."""
    heads = query.flatten(0, 1)[:, 0].double().cpu()
    outputs, lses = [], []
    for number, q in enumerate(heads):
        keys, values = (states.double() for states in tokens[number // group])
        scores = keys @ q * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        outputs.append(scores.softmax(0) @ values)
        lses.append(scores.logsumexp(0))
    shape = query.shape[:3]
    return torch.stack(outputs).view(*shape, -1), torch.stack(lses).view(shape)


def check(attend=paged_decode.attend, append=paged_decode.append, move=paged_decode.move):
    generator = torch.Generator().manual_seed(0)
    for batch, heads, group, dim, value_dim, counts, span, dtype, softcap in CASES:
        paged, tokens = layer(generator, counts, dim, value_dim, span, dtype)
        query = torch.randn(batch, heads * group, 1, dim, generator=generator).to(DEVICE, dtype)
        assert paged_decode.fits(query, paged)
        for more in range(2):  # as it is, then with one token more in each slot
            output, lse = attend(query, paged, dim**-0.5, softcap)
            expected, expected_lse = reference(query, tokens, group, dim**-0.5, softcap)
            tolerance = 1e-5 if dtype == torch.float32 else 4e-3
            error = (output.double().cpu() - expected).norm() / expected.norm()
            assert error < tolerance, (counts, error)
            assert torch.allclose(lse.double().cpu(), expected_lse, atol=1e-4 if span < 8 else 4e-3)
            new = [
                torch.randn(batch, 1, heads, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
                for width in (dim, value_dim)
            ]  # tokens outermost: strides must be honoured
            before = paged.counts.clone()
            append(*new, paged, torch.tensor([7], device=DEVICE), 30)
            assert torch.equal(paged.counts, before + 1)
            for slot, old in enumerate(tokens):
                k, v = (states.flatten(0, 1)[slot].cpu() for states in new)
                count = len(old[0])
                tokens[slot] = torch.cat([old[0], k]), torch.cat([old[1], v])
                at = int(paged.table[paged.starts[slot] + count // PAGE]) * PAGE + count % PAGE
                assert int(paged.positions[at]) == 37
            assert int((paged.positions != 0).sum()) == len(counts) * (more + 1)
    # Some tokens are moved over others; the rest of the pool stays as it is.
    pools = [getattr(paged, name) for name in ("keys", "values", "positions", "log_beta")]
    for pool in pools:
        pool.copy_(torch.randint(0, 99, pool.shape, generator=generator))
    expected = [pool.clone() for pool in pools]
    places = torch.randperm(len(paged.keys), generator=generator).to(DEVICE)
    gaps, sources = places, places.roll(40)
    for pool in expected:
        pool[gaps[:37]] = pool[sources[:37]].clone()
    move(paged, gaps, sources, torch.tensor(37, device=DEVICE))
    assert all(torch.equal(pool, other) for pool, other in zip(pools, expected, strict=True))
    nothing = replace(paged, counts=torch.zeros_like(paged.counts))
    output, lse = attend(query, nothing, 1.0)
    assert not output.any() and torch.isneginf(lse).all()


def test_against_float64():
    interpreted.run(check)


def test_plain_against_float64():
    check(paged_decode.attend_plain, paged_decode.append_plain, paged_decode.move_plain)


def test_what_fits():
    paged, _ = layer(torch.Generator().manual_seed(0), (20, 3), 64, 64, 2, torch.float16)
    query = torch.zeros(1, 4, 1, 64, dtype=torch.float16)
    assert paged_decode.fits(query, paged)
    assert not paged_decode.fits(query.expand(-1, -1, 2, -1), paged)
    assert not paged_decode.fits(query.float(), paged)
    assert not paged_decode.fits(query[..., :32], paged)
