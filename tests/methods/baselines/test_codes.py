"""Rivals that code every token: uniform, KIVI and TurboQuant, against their definitions written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.rotation import hadamard
from kvfold.kernels.position_bias import turned_rows
from kvfold.methods import KIVI, ShadowKV, TurboQuant, Uniform
from tests.methods.baselines.views import view
from tests.stores.checks import Turn


def affine(x, bits):
    """Round to the levels between the extremes of a list, in float64."""
    low, high = float(min(x)), float(max(x))
    step = (high - low) / (2**bits - 1)
    return [low + step * round((value - low) / step) for value in x], step


@pytest.mark.parametrize(("bits", "group"), [(4, 8), (2, 7), (8, None)])
def test_uniform_rounds_each_group_of_channels(bits, group):
    one = view(pads=(13, 0))
    (store,) = Uniform(bits=bits, group=group).fold([one])
    for row, pad in ((0, 13), (1, 0)):
        kept = store.kept(row, 1)
        assert kept.positions.tolist() == list(range(pad, 60))
        for states, found in ((one.keys, kept.keys), (one.values, kept.values)):
            for index, position in enumerate(kept.positions.tolist()):
                x = states[row, 1, position].double().tolist()
                size = group or len(x)
                for start in range(0, len(x), size):
                    expected, step = affine(x[start : start + size], bits)
                    error = np.abs(found[index, start : start + size].numpy() - expected)
                    # 16-bit scales and minima move levels a little; a value between two may fall to either.
                    assert (np.minimum(error, np.abs(error - step)) < 0.02).all()
                    assert error.max() < 1.05 * step


def test_kivi_groups_keys_by_token_and_values_by_channel():
    """arXiv 2402.02750, section 3.2: the newest tokens exact; a key channel's scale spans tokens, a value's channels."""
    one = view(tokens=75)
    (store,) = KIVI(bits=2, group=16, residual=16).fold([one])
    assert store.tokens == (75 - 16) // 16 * 16
    kept = store.kept(0, 1)
    order = kept.positions.argsort()
    keys, values = kept.keys[order].numpy(), kept.values[order].numpy()
    for start in range(0, store.tokens, 16):
        for channel in range(16):
            expected, step = affine(one.keys[0, 1, start : start + 16, channel].double().tolist(), 2)
            error = np.abs(keys[start : start + 16, channel] - expected)
            assert (np.minimum(error, np.abs(error - step)) < 0.01).all()
    for token in range(store.tokens):
        for start in (0, 16):
            expected, step = affine(one.values[0, 1, token, start : start + 16].double().tolist(), 2)
            error = np.abs(values[token, start : start + 16] - expected)
            assert (np.minimum(error, np.abs(error - step)) < 0.01).all()


def nearest(x, bits):
    """A vector by TurboQuant's first algorithm, with the norm of the levels taken out of the stored one."""
    matrix, levels = hadamard(len(x), 0).double().numpy(), integer_levels(bits, len(x)).double().numpy()
    length = np.linalg.norm(x)
    coded = np.array([levels[np.abs(levels - value).argmin()] for value in matrix @ x / length])
    return matrix.T @ coded * float(np.float16(length / np.linalg.norm(coded)))


@pytest.mark.parametrize("rotary", [True, False])
def test_turboquant_codes_what_the_mean_before_rope_leaves(rotary):
    bias = torch.linspace(-6, 6, 16)
    one = view(pads=(13, 0), rotary=rotary)
    at = Turn()
    for row in range(2):
        turned = at.rotate(bias.expand(60, -1), one.positions[row]) if rotary else bias
        one.keys[row] += turned
    (plain,), (out,) = (TurboQuant(bits=3, bias=bias).fold([one]) for bias in ("in", "mean"))
    for row, pad in ((0, 13), (1, 0)):
        keys = one.keys[row, 1, pad:].double()
        where = one.positions[row, pad:]
        before = at.unrotate(keys, where) if rotary else keys.float()
        mean = before.mean(0).half().float()
        turned = at.rotate(mean.expand(len(keys), -1), where) if rotary else mean.expand(len(keys), -1)
        if rotary:  # what is taken out: RoPE's turn, but for cosines and sines in halves
            taken = turned_rows(mean[None], at, keys.shape[0] + pad, int(where[0]) - pad)[0, pad:]
            assert torch.allclose(taken, turned, atol=2**-10 * float(mean.abs().max()))
            turned = taken
        expected = np.stack([nearest(key, 3) for key in (keys - turned).numpy()]) + turned.numpy()
        assert np.allclose(out.kept(row, 1, one.rotary).keys.numpy(), expected, atol=2e-3)
        simple = np.stack([nearest(key, 3) for key in keys.numpy()])
        assert np.allclose(plain.kept(row, 1).keys.numpy(), simple, atol=2e-2)
        values = np.stack([nearest(value, 3) for value in one.values[row, 1, pad:].double().numpy()])
        assert np.allclose(out.kept(row, 1, one.rotary).values.numpy(), values, atol=2e-3)
    errors = [(store.kept(1, 1, one.rotary).keys - one.keys[1, 1]).square().sum() for store in (plain, out)]
    assert errors[1] < 0.2 * errors[0]


def test_turboquant_prod_spends_one_bit_on_signs():
    one = view()
    (mse,), (prod,) = (TurboQuant(bits=3, variant=variant).fold([one]) for variant in ("mse", "prod"))
    assert mse.tensors()["key_codes"].shape == prod.tensors()["key_codes"].shape
    assert prod.tensors()["key_norms"].shape[-1] == 2 * mse.tensors()["key_norms"].shape[-1]
    assert torch.equal(mse.tensors()["value_codes"], prod.tensors()["value_codes"])
    coarse, *_ = TurboQuant(bits=2).fold([one])
    levels = prod.layout.keys[0]
    main = prod.coded_keys(0, slice(0, 60))[..., : levels.dim]
    assert torch.allclose(main, coarse.coded_keys(0, slice(0, 60)), atol=1e-5)


def test_bits_per_element_are_physical():
    one = view(tokens=256, key_dim=128, value_dim=128)
    for bits in (2, 3, 4):
        (store,) = TurboQuant(bits=bits).fold([one])
        assert 8 * store.nbytes / (256 * 2 * 256) == bits + 16 / 128


WIDE = {
    **{f"uniform{bits}": Uniform(bits=bits) for bits in (1, 2, 4)},
    **{f"kivi{bits}": KIVI(bits=bits, group=16, residual=12) for bits in (1, 2, 4)},
    "turboquant": TurboQuant(bits=4),
    "shadowkv": ShadowKV(rank=32, chunk=4, outlier_chunks=2, local_chunks=1),
}


@pytest.mark.parametrize("method", WIDE.values(), ids=WIDE)
def test_states_as_large_as_float16_holds(method):
    small = view(tokens=60, key_dim=16, value_dim=16)
    # Of one size and both signs: ranges, norms and factors are larger than any state.
    large = replace(small, keys=small.keys.sign() * 65504, values=small.values.sign() * 65504)
    (store,) = method.fold([large])
    for head in range(2):
        kept = store.kept(0, head, large.rotary)
        for found, states in ((kept.keys, large.keys), (kept.values, large.values)):
            lost, states = found - states[0, head, kept.positions], states[0, head, kept.positions]
            if method.name == "turboquant":
                # Of states as regular as these, rotated channels all lose the same, and one channel gets all of it.
                assert float((lost.norm(dim=-1) / states.norm(dim=-1)).max()) < 0.3
            else:
                assert lost.abs().max() < 0.02 * 65504


@pytest.mark.parametrize("method", [KIVI, TurboQuant, Uniform])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": 1000},
        {"bits": 2.5},
        {"bits": 1, "variant": "prod"},
        {"group": 0},
        {"group": -1},
        {"residual": -1},
        {"block_tokens": -1},
    ],
    ids=str,
)
def test_bad_options(method, options):
    if all(name in method.__dataclass_fields__ for name in options):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            method(**options)
