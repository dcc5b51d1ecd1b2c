"""TurboQuant's codes against the paper's algorithms written out in numpy, and against its error law."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotated import RotatedCode
from kvfold.codecs.rotation import haar, hadamard


def slow(x, matrix, levels, keep_norm):
    """Algorithm 1 for one vector: rotate the unit vector, nearest level by search, back, times the 16-bit norm."""
    length = np.linalg.norm(x)
    y = matrix @ (x / length)
    coded = np.array([levels[np.argmin(np.abs(levels - value))] for value in y])
    stored = np.float16(length / np.linalg.norm(coded) if keep_norm else length)
    return float(stored) * (matrix.T @ coded)


def round_trip(code, x, shares=None):
    return code.restore(code.decode(*code.encode(x, shares), shares))


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize("keep_norm", [True, False])
@pytest.mark.parametrize(("bits", "dim"), [(1, 64), (3, 80), (4, 7)])
def test_against_the_algorithm_written_out(rotation, keep_norm, bits, dim):
    x = torch.randn(20, dim) * torch.logspace(-2, 2, 20)[:, None]
    code = RotatedCode(((bits, dim),), rotation=rotation, keep_norm=keep_norm, seed=3)
    found = round_trip(code, x).double().numpy()
    matrix = (hadamard if rotation == "hadamard" else haar)(dim, 3).double().numpy()
    levels = integer_levels(bits, dim).double().numpy()
    for one, expected in zip(x.double().numpy(), found, strict=True):
        assert np.allclose(slow(one, matrix, levels, keep_norm), expected, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize(("bits", "law"), [(1, 0.36), (2, 0.117), (3, 0.0345), (4, 0.0095)])
def test_the_error_law(bits, law, rotation):
    """Mean squared error of a unit vector, TurboQuant theorem 1 and its measured figures at d = 128."""
    x = torch.nn.functional.normalize(
        torch.randn(4000, 128, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    code = RotatedCode(((bits, 128),), rotation=rotation, keep_norm=False)
    error = (round_trip(code, x) - x).square().sum(-1).mean()
    assert error == pytest.approx(law, rel=0.03)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([2, 6, 33, 80, 128]),
    st.sampled_from(["hadamard", "haar"]),
    st.floats(-3, 3),
    st.integers(0, 1000),
)
def test_error_falls_with_every_bit_and_lengths_stay(dim, rotation, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, dim, generator=generator) * 10**size
    errors = []
    # The uniform steps of 8 bits lose rare large coordinates, so that few vectors say little about their mean.
    for bits in range(1, 8):
        found = round_trip(RotatedCode(((bits, dim),), rotation=rotation, seed=seed), x)
        assert torch.allclose(found.norm(dim=-1), x.norm(dim=-1), rtol=2e-3)
        errors.append(float(((found - x).square().sum(-1) / x.square().sum(-1)).mean()))
    assert all(more < 0.6 * less for less, more in itertools.pairwise(errors))


def test_the_sketch_against_the_algorithm_written_out():
    x, dim = torch.randn(6, 16), 16
    code = RotatedCode(((2, dim),), rotation="haar", sketch=True)
    codes, scales = code.encode(x)
    matrix = haar(dim, 0).double().numpy()
    generator = torch.Generator().manual_seed(7919)
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator).numpy()
    levels = integer_levels(2, dim).double().numpy()
    for one, found, (_, lost_norm) in zip(
        x.double().numpy(),
        code.restore(code.decode(codes, scales)).numpy(),
        scales.double().numpy(),
        strict=True,
    ):
        coded = slow(one, matrix, levels, True)
        lost = matrix @ (one - coded)
        assert lost_norm == pytest.approx(np.linalg.norm(lost), rel=2e-3)
        estimate = np.zeros(dim)
        for row in gaussian:
            estimate += np.sqrt(np.pi / 2) / dim * lost_norm * np.sign(row @ lost) * row
        assert np.allclose(found, coded + matrix.T @ estimate, atol=1e-3)


def test_the_sketch_is_unbiased():
    """Over many projections, the mean inner product is the true one; without the sketch it is not."""
    generator = torch.Generator().manual_seed(5)
    x, q = torch.randn(1, 32, generator=generator), torch.randn(1, 32, generator=generator)
    means = {}
    for sketch in (True, False):
        products = []
        for seed in range(400):
            code = RotatedCode(((1, 32),), sketch=sketch, keep_norm=False, rotation="haar", seed=seed)
            products.append(float((code.query(q) * code.decode(*code.encode(x))).sum()))
        products = np.array(products)
        means[sketch] = (products.mean() - float((x * q).sum()), products.std() / 20)
    assert abs(means[True][0]) < 3 * means[True][1]
    # One bit shrinks every vector by 2 / pi.
    assert abs(means[False][0]) > 3 * means[False][1]


@pytest.mark.parametrize("norms", ["token", "group"])
def test_groups_are_codes_of_their_own(norms):
    x = torch.randn(50, 48)
    code = RotatedCode(((5, 8), (2, 40)), norms=norms, keep_norm=norms == "group")
    found, book = round_trip(code, x), {}
    for index, (part, piece) in enumerate(zip(x.split([8, 40], -1), found.split([8, 40], -1), strict=True)):
        width, channels = code.groups[index]
        if norms == "group":
            expected = round_trip(RotatedCode(((width, channels),), seed=index), part)
        else:
            # A fixed share of the whole norm, and levels for the Gaussian that this makes of each coordinate.
            share = x.norm(dim=-1, keepdim=True) * (channels / 48) ** 0.5
            book = integer_levels(width) / channels**0.5
            matrix = hadamard(channels, index)
            y = part @ matrix.T / share
            nearest = (y[..., None] - book).abs().argmin(-1)
            expected = book[nearest] @ matrix * share
        assert torch.allclose(piece, expected, atol=5e-3)


def test_one_norm_keeps_the_length_of_the_whole():
    x = torch.randn(30, 24) * torch.tensor([3.0] * 8 + [0.5] * 16)
    shares = torch.tensor([0.97, 0.25])
    code = RotatedCode(((4, 8), (3, 16)))
    known, unknown = round_trip(code, x, shares), round_trip(code, x)
    assert torch.allclose(known.norm(dim=-1), x.norm(dim=-1), rtol=2e-3)
    assert (known - x).square().sum() < 0.5 * (unknown - x).square().sum()


def test_products_in_rotated_coordinates():
    x, q = torch.randn(40, 24), torch.randn(5, 24)
    for code in (RotatedCode(((4, 8), (3, 16)), norms="group"), RotatedCode(((3, 24),), sketch=True)):
        coded = code.decode(*code.encode(x))
        assert torch.allclose(code.query(q) @ coded.T, q @ code.restore(coded).T, atol=1e-4)


def test_bytes_are_those_of_the_widths():
    code = RotatedCode(((6, 4), (3, 12), (1, 16)), norms="group", sketch=True)
    codes, scales = code.encode(torch.randn(2, 3, 32))
    assert codes.shape == (2, 3, code.nbytes) and scales.shape == (2, 3, code.scales)
    assert code.nbytes == packed_bytes(4, 6) + packed_bytes(12, 3) + packed_bytes(16, 1) + packed_bytes(32, 1)
    assert code.scales == 4 and scales.dtype == torch.float16


def test_zero_and_constant_vectors():
    x = torch.stack([torch.zeros(16), torch.full((16,), 3.0), torch.full((16,), -1e-6)])
    for code in (
        RotatedCode(((3, 16),)),
        RotatedCode(((2, 16),), sketch=True),
        RotatedCode(((4, 8), (2, 8))),
    ):
        found = round_trip(code, x)
        assert bool(torch.isfinite(found).all()) and bool((found[0] == 0).all())


def test_bad_input():
    with pytest.raises(ValueError, match="widths"):
        RotatedCode(((9, 16),))
    with pytest.raises(ValueError, match="2 channels"):
        RotatedCode(((3, 1), (2, 15)))
    with pytest.raises(ValueError, match="NaN"):
        RotatedCode(((3, 4),)).encode(torch.tensor([1.0, torch.nan, 0, 0]))
