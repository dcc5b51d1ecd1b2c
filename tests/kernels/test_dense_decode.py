"""The dense decode kernel against float64 attention, interpreted where there is no GPU."""

from __future__ import annotations

import torch

from kvfold.kernels import dense_decode
from kvfold.kernels.dense_decode import Exact
from tests import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def reference(query, sides, scaling, softcap=None):
    """Softmax attention in float64 over the tokens that are seen."""
    group = query.shape[1] // sides[0].keys.shape[1]
    keys = torch.cat([side.keys for side in sides], 2).double().repeat_interleave(group, 1)
    values = torch.cat([side.values for side in sides], 2).double().repeat_interleave(group, 1)
    seen = []
    for side in sides:
        batch, _, tokens, _ = side.keys.shape
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=keys.device)
        if side.valid is not None:
            mask &= side.valid
        if side.length is not None:
            mask &= torch.arange(tokens, device=keys.device) < side.length
        seen.append(mask)
    scores = query.double() @ keys.transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~torch.cat(seen, 1)[:, None, None], -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def states(generator, batch, heads, tokens, dim, value_dim, dtype):
    shape = (batch, tokens, heads)  # tokens outermost: strides must be honoured
    keys = torch.randn(*shape, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    return keys, torch.randn(*shape, value_dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)


CASES = [
    # batch, kv heads, group, dim, value dim, history, tail, dtype, softcap
    (1, 2, 4, 64, 64, 150, 20, torch.float32, None),
    (2, 1, 7, 80, 80, 33, 5, torch.float32, 5.0),
    (
        3,
        2,
        1,
        128,
        96,
        70,
        40,
        torch.bfloat16 if CUDA else torch.float16,
        None,
    ),  # no bfloat16 in the interpreter
    (1, 1, 16, 256, 256, 64, 0, torch.float16, None),
    (2, 2, 2, 16, 16, 0, 17, torch.float32, None),
]


def check():
    generator = torch.Generator().manual_seed(0)
    for batch, heads, group, dim, value_dim, tokens, reserved, dtype, softcap in CASES:
        query = torch.randn(batch, heads * group, 1, dim, generator=generator).to(DEVICE, dtype)
        history = tail = None
        sides = []
        if tokens:
            keys, values = states(generator, batch, heads, tokens, dim, value_dim, dtype)
            valid = None
            if batch > 1:
                valid = torch.ones(batch, tokens, dtype=torch.bool, device=DEVICE)
                valid[0, : tokens // 2] = False
            history = Exact(keys, values, valid=valid)
            sides.append(history)
        if reserved:
            keys, values = states(generator, batch, heads, reserved, dim, value_dim, dtype)
            keys[:, :, reserved - 3 :] = torch.nan  # what nothing has been written to yet
            values[:, :, reserved - 3 :] = torch.nan
            tail = Exact(keys, values, length=torch.tensor([reserved - 3], device=DEVICE))
            written = Exact(keys[:, :, :-3], values[:, :, :-3])
            sides.append(written)
        output, lse = dense_decode.attend(query, history, tail, dim**-0.5, softcap)
        expected, expected_lse = reference(query, sides, dim**-0.5, softcap)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        error = (output.double() - expected).norm() / expected.norm()
        assert error < tolerance, (batch, heads, group, dim, error)
        assert torch.allclose(lse.double(), expected_lse, atol=1e-4 if dtype == torch.float32 else 2e-3)
        if history is not None and tail is not None:
            part = dense_decode.attend(query, history, None, dim**-0.5, softcap)
            merged, merged_lse = dense_decode.attend(query, None, tail, dim**-0.5, softcap, before=part)
            assert (merged.double() - expected).norm() / expected.norm() < 2 * tolerance
            assert torch.allclose(merged_lse, lse, atol=2e-3)
    slots = [torch.zeros(2, 3, 9, width, device=DEVICE) for width in (24, 16)]
    new = [torch.randn(2, 1, 3, width, generator=generator).to(DEVICE).transpose(1, 2) for width in (24, 16)]
    dense_decode.append(*new, *slots, torch.tensor([6], device=DEVICE))
    for slot, states_ in zip(slots, new, strict=True):
        assert torch.equal(slot[:, :, 6:7], states_) and slot.count_nonzero() == states_.count_nonzero()
    nothing = Exact(query, query, length=torch.tensor([0], device=DEVICE))
    output, lse = dense_decode.attend(query, None, nothing, 1.0)
    assert not output.any() and torch.isneginf(lse).all()


def test_against_float64():
    interpreted.run(check)


def test_says_why_it_cannot_run():
    assert dense_decode.problem(torch.device("cpu")) == "cpu has no Triton"


def test_what_fits():
    query = torch.zeros(1, 4, 1, 64)
    keys = torch.zeros(1, 2, 9, 64)
    assert dense_decode.fits(query, keys, keys)
    assert not dense_decode.fits(query.expand(-1, -1, 2, -1), keys, keys)
    assert not dense_decode.fits(query, keys.half(), keys)
    assert not dense_decode.fits(query, keys[..., ::2], keys)
