"""Lloyd-Max codebooks: textbook values, exact densities for short vectors, nearest-level coding."""

import pytest
import torch

from kvfold.codecs.codebook import (
    COMMON_UNIT,
    common_levels,
    decode,
    encode,
    gaussian_levels,
    integer_levels,
    integers,
    sphere_levels,
)


def unit_vectors(count, dim):
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(dim))
    return x / x.norm(dim=-1, keepdim=True)


def error(x, levels):
    return (x - decode(encode(x, levels), levels)).square().sum(-1).mean().item()


def test_textbook_gaussian_levels():
    """Max (1960), Table I."""
    table = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
    table[4] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    for bits, right in table.items():
        levels = gaussian_levels(bits)
        assert levels[2 ** (bits - 1) :].tolist() == pytest.approx(right, abs=5e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_symmetric_ascending_and_stationary(bits):
    for levels, limit in [
        (gaussian_levels(bits), 10.0),
        *((sphere_levels(bits, dim), 1.0) for dim in (2, 3, 5, 128)),
    ]:
        assert levels.shape == (2**bits,) and levels.dtype == torch.float32
        assert torch.equal(levels, -levels.flip(0))
        assert (levels.diff() > 0).all() and levels[-1] < limit
    # In three dimensions a coordinate is uniform, so the levels are known.
    uniform = (torch.arange(2**bits) + 0.5) / 2 ** (bits - 1) - 1
    assert torch.allclose(sphere_levels(bits, 3), uniform, atol=1e-5)
    # In two it is a projected circle: one bit is the mean of |cos|.
    assert sphere_levels(1, 2)[1].item() == pytest.approx(2 / torch.pi, abs=1e-6)


def test_mse_law():
    """TurboQuant: .36, .117, .03, .009 at 1 to 4 bits."""
    x = unit_vectors(4000, 128)
    for bits, expected in {1: 0.36, 2: 0.117, 3: 0.034, 4: 0.0093}.items():
        assert error(x, sphere_levels(bits, 128)) == pytest.approx(expected, rel=0.02)
        assert error(x * 128**0.5, gaussian_levels(bits)) / 128 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("dim", "bits", "gain"), [(2, 3, 0.6), (2, 4, 0.4), (4, 3, 0.7), (8, 4, 0.85)])
def test_short_vectors_want_their_own_levels(dim, bits, gain):
    """Block-GTQ notes, 4.3."""
    x = unit_vectors(50_000, dim)
    assert error(x, sphere_levels(bits, dim)) < gain * error(x, gaussian_levels(bits) / dim**0.5)


@pytest.mark.parametrize("dim", [2, 3, 4, 8])
def test_sphere_levels_are_never_worse(dim):
    x = unit_vectors(20_000, dim)
    for bits in (1, 2, 3, 4, 6, 8):
        assert error(x, sphere_levels(bits, dim)) < error(x, gaussian_levels(bits) / dim**0.5)


def test_encode_finds_the_nearest_level():
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2
    for bits in (1, 3, 8):
        levels = gaussian_levels(bits)
        codes = encode(x, levels)
        assert codes.dtype == torch.uint8 and codes.shape == x.shape
        distance = (x[..., None] - levels).abs()
        assert torch.allclose((x - decode(codes, levels)).abs(), distance.amin(-1))
        assert torch.equal(encode(levels, levels), torch.arange(2**bits, dtype=torch.uint8))
        assert torch.equal(encode(x.T, levels), codes.T)
    assert encode(x.half(), levels).dtype == torch.uint8
    assert decode(encode(x[:0], levels), levels).shape == (0, 50)


def test_the_cache_cannot_be_changed_from_outside():
    gaussian_levels(2).zero_()
    sphere_levels(2, 4).zero_()
    assert gaussian_levels(2)[3] > 1 and sphere_levels(2, 4)[3] > 0.5


def test_refused():
    for bits in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            gaussian_levels(bits)
        with pytest.raises(ValueError, match="1 to 8"):
            sphere_levels(bits, 8)
    with pytest.raises(ValueError, match="at least 2"):
        sphere_levels(4, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_codes_on_a_gpu():
    x, levels = unit_vectors(500, 16), sphere_levels(4, 16)
    codes = encode(x.cuda(), levels.cuda())
    assert torch.equal(codes.cpu(), encode(x, levels))
    assert torch.equal(decode(codes, levels.cuda()).cpu(), decode(codes.cpu(), levels))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [2, 4, 16, 128, None])
def test_integer_levels_cost_nothing(bits, dim):
    levels, whole = integer_levels(bits, dim), integers(bits, dim)
    assert torch.equal(whole, -whole.flip(0)) and (levels.diff() > 0).all()
    assert torch.allclose(levels / levels[-1], whole / whole[-1], atol=1e-6)
    if bits < 8:
        assert whole[-1] == 63 and torch.equal(whole, whole.round())
    else:
        assert torch.equal(whole + 127.5, torch.arange(256.0))
    exact = gaussian_levels(bits) if dim is None else sphere_levels(bits, dim)
    # Quantiles rather than draws: a rare large one would decide.
    quantiles = torch.special.ndtri((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    x = quantiles[:, None].float() if dim is None else unit_vectors(40_000 // dim, dim)
    assert error(x, levels) < (2.3 if bits == 8 else 1.025) * error(x, exact)


def test_widths_without_integer_levels():
    assert torch.equal(integer_levels(6, 64), sphere_levels(6, 64))
    with pytest.raises(ValueError, match="integer levels"):
        integers(6)


def test_common_levels_share_a_unit_and_cost_nothing():
    """By quadrature against the density, not by samples."""
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / torch.exp(-x.square() / 2).sum()

    def expected(levels):
        return float((density * (x - decode(encode(x, levels), levels).double()).square()).sum())

    for bits in range(1, 9):
        levels = common_levels(bits)
        assert (
            len(levels) == 2**bits
            and bool((levels.diff() > 0).all())
            and torch.equal(levels, -levels.flip(0))
        )
        limit = 2.2 if bits == 8 else 1.004
        assert expected(levels) <= limit * expected(gaussian_levels(bits))
        if bits <= 4:
            whole = levels / COMMON_UNIT
            assert torch.equal(whole, whole.round()) and float(whole.max()) <= 127
    assert torch.equal(common_levels(8) / COMMON_UNIT, torch.arange(256) - 127.5)
